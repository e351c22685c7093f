"""How likely each node of a draft is to be accepted, learnt from what became of earlier ones. Knows no costs.

A node's chance, given that its parent was accepted, is that of its kind over all requests (its depth and place
among its siblings, or the drafter's score), shifted by how this request has done better or worse than that.

What was offered but not verified teaches too: the text that is written afterwards says whether it was right. So a
drafter whose guesses are not worth verifying is still watched, for the price of its guessing alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sooner.control.protocol import Guess, Tried

ROOT = -1
Key = tuple[str, int, int]

_MEMORY = 1 - 1 / 400  # share of the old counts that a new one leaves
_PRIOR = 3.0  # visits that the first guess of a rate counts for
_ENOUGH = 30.0  # visits from which it no longer counts
_FIRST, _LATER = 0.5, 0.12  # first guesses for the first child of a node, and for the others
_RATE, _FLOOR = 0.07, 0.1  # how fast a request departs from the rest
_PULL = 0.06  # and comes back to it
_BOUND = 6.0
_TINY = 0.01
_SHAPES = 256  # guesses whose shape is remembered
_SURE = 4.5  # log odds that no rate exceeds


@dataclass(slots=True)
class _Rate:
    """hits of visits, both fading; odds: the log odds of their ratio once there are `_ENOUGH` of them."""

    hits: float = 0.0
    visits: float = 0.0
    odds: float | None = None

    def add(self, hit: bool) -> None:
        self.hits = self.hits * _MEMORY + hit
        self.visits = self.visits * _MEMORY + 1
        self.odds = _odds(self.hits / self.visits) if self.visits >= _ENOUGH else None


@dataclass(slots=True)
class _Pending:
    """A guess the text is still being compared with, from `node` on."""

    guess: Guess
    node: int
    depth: int


@dataclass(frozen=True, slots=True)
class _Known:
    """A guess, the kinds of its nodes, and the children of the root and of every node that has any."""

    guess: Guess
    keys: list[Key]
    below: dict[int, list[int]]


@dataclass(slots=True)
class _Own:
    """What is known of one request."""

    shift: float = 0.0
    pending: _Pending | None = None


class Beliefs:
    """Chances of nodes, for one drafter and all requests it serves."""

    def __init__(self) -> None:
        self._rates: dict[Key, _Rate] = {}
        self._own: dict[str, _Own] = {}
        self._shapes: dict[int, _Known] = {}
        self._chain: list[float] = []
        self.waiting: set[str] = set()  # requests with a guess that the text is still being compared with

    def survivals(self, request_id: str, guess: Guess, floor: float = 0.0) -> list[float]:
        """The chance of each node that the whole path down to it is accepted; never above its parent's.

        What is below `floor` may be given as 0, or left out at the end.
        """
        shift = self._of(request_id).shift
        if guess.scores is None and guess.parents == tuple(range(ROOT, len(guess) - 1)):
            return _down(self._chain_odds(len(guess)), shift, floor)
        found: list[float] = []
        last: dict[int, int] = {}
        own: dict[Key, float] = {}
        for node, (parent, key) in enumerate(zip(guess.parents, self._known(guess).keys, strict=True)):
            above = 1.0 if parent == ROOT else found[parent]
            alone = own.get(key)
            if alone is None:
                alone = own[key] = _logistic(self._odds(key) + shift)
            chance = above * alone if above > floor else 0.0
            if guess.drawn and parent in last:
                chance = min(chance, found[last[parent]])  # drawn siblings count in the order of drawing
            last[parent] = node
            found.append(chance)
        return found

    def levels(self, request_id: str, depth: int) -> list[float]:
        """For depths 1 to `depth`: the chance that a draft is accepted at least so far; without the tiny ones."""
        odds = [self._odds(("level", _bucket(d), 0)) for d in range(1, depth + 1)]
        return _down(odds, self._of(request_id).shift, _TINY)

    def learn(self, tried: Tried) -> int:
        """Take in what one pass brought for a request. Returns how many guesses not verified were right."""
        own = self._of(tried.request_id)
        right = self._follow(own, tried)
        if own.pending is None:
            self.waiting.discard(tried.request_id)
        else:
            self.waiting.add(tried.request_id)
        return right

    def _follow(self, own: _Own, tried: Tried) -> int:
        guess = tried.guess
        if tried.kept:
            own.pending = self._verified(own, tried)
            return self._compare(own, tried.tokens[len(tried.path) :])
        if len(guess) and not guess.drawn:
            if own.pending is None:
                own.pending = _Pending(guess, ROOT, 1)
            elif tried.tokens:  # an earlier one is still being followed; of this one the first level will do
                known = self._known(guess)
                right = {c for c in known.below[ROOT] if guess.tokens[c] == tried.tokens[0]}
                self._level(own, known.keys, known.below[ROOT], right, 1)
        return self._compare(own, tried.tokens)

    def forget(self, request_id: str) -> None:
        self._own.pop(request_id, None)
        self.waiting.discard(request_id)

    def _verified(self, own: _Own, tried: Tried) -> _Pending | None:
        """Learn from the nodes that were judged; what was left out below them can still be compared."""
        guess, kept, path = tried.guess, set(tried.kept), set(tried.path)
        known = self._known(guess)
        for depth, above in enumerate((ROOT, *tried.path), 1):
            below = [c for c in known.below.get(above, ()) if c in kept]
            self._level(own, known.keys, below, path, depth)
        end = tried.path[-1] if tried.path else ROOT
        rest = known.below.get(end, [])
        if guess.drawn or not rest or any(c in kept for c in rest):
            return None
        return _Pending(guess, end, len(tried.path) + 1)

    def _compare(self, own: _Own, tokens: Sequence[int]) -> int:
        """Follow the pending guess along the tokens that were written; how far it went."""
        for count, token in enumerate(tokens):
            waiting = own.pending
            if waiting is None:
                return count
            known = self._known(waiting.guess)
            below = known.below.get(waiting.node, [])
            right = [c for c in below if waiting.guess.tokens[c] == token]
            self._level(own, known.keys, below, set(right), waiting.depth)
            if not right:
                own.pending = None
                return count
            more = right[0] in known.below
            own.pending = _Pending(waiting.guess, right[0], waiting.depth + 1) if more else None
        return len(tokens)

    def _level(self, own: _Own, keys: Sequence[Key], below: Sequence[int], right: set[int], depth: int) -> None:
        if not below:
            return
        for node in below:
            hit = node in right
            chance = _logistic(self._odds(keys[node]) + own.shift)
            weight = chance * (1 - chance)  # what was sure to come says little; what came against all odds a lot
            step = _RATE * (hit - chance) / (weight + _FLOOR) - _PULL * weight * own.shift
            own.shift = min(max(own.shift + step, -_BOUND), _BOUND)
            self._add(keys[node], hit)
        self._add(("level", _bucket(depth), 0), any(node in right for node in below))

    def _chain_odds(self, depth: int) -> list[float]:
        """Log odds of the nodes of a chain, worked out once between two lessons."""
        if len(self._chain) < depth:
            self._chain = [self._odds(("depth", _bucket(d), 0)) for d in range(1, depth + 1)]
        return self._chain[:depth]

    def _known(self, guess: Guess) -> _Known:
        """Kinds and children of its nodes, worked out once."""
        found = self._shapes.get(id(guess))
        if found is None or found.guess is not guess:
            if len(self._shapes) >= _SHAPES:
                self._shapes.clear()
            found = self._shapes[id(guess)] = _Known(guess, _keys(guess), _below(guess))
        return found

    def _of(self, request_id: str) -> _Own:
        found = self._own.get(request_id)
        if found is None:
            found = self._own[request_id] = _Own()
        return found

    def _add(self, key: Key, hit: bool) -> None:
        rate = self._rates.get(key)
        if rate is None:
            rate = self._rates[key] = _Rate()
        rate.add(hit)
        self._chain = []

    def _odds(self, key: Key) -> float:
        rate = self._rates.get(key)
        return rate.odds if rate is not None and rate.odds is not None else _odds(self._share(key))

    def _share(self, key: Key) -> float:
        """Hits of visits; while there are few, drawn towards what holds one level higher."""
        rate = self._rates.get(key)
        if rate is not None and rate.visits >= _ENOUGH:
            return rate.hits / rate.visits
        kind, where, rank = key
        if kind == "score":
            first = min(max((where + 0.5) / 10, 0.02), 0.95)
        elif where > 1:
            first = self._share((kind, where - 1, rank))
        else:
            first = _LATER if rank else _FIRST
        hits, visits = (rate.hits, rate.visits) if rate is not None else (0.0, 0.0)
        return (hits + _PRIOR * first) / (visits + _PRIOR)


def _keys(guess: Guess) -> list[Key]:
    """The kind of each node: its score given its parent's, else its depth and place among its siblings."""
    keys: list[Key] = []
    depths: list[int] = []
    born: dict[int, int] = {}
    for node, parent in enumerate(guess.parents):
        depth = 1 if parent == ROOT else depths[parent] + 1
        depths.append(depth)
        rank = born.get(parent, 0)
        born[parent] = rank + 1
        if guess.scores is not None and not guess.drawn:
            above = 1.0 if parent == ROOT else guess.scores[parent]
            keys.append(("score", _tenth(guess.scores[node], above), 0))
        else:
            keys.append(("depth", _bucket(depth), min(rank, 3)))
    return keys


def _below(guess: Guess) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for node, parent in enumerate(guess.parents):
        found.setdefault(parent, []).append(node)
    return found


def _tenth(score: float, above: float) -> int:
    share = score / above if above > 0 else 0.0
    return int(min(max(share, 0.0), 0.999) * 10) if math.isfinite(share) else 0


def _bucket(depth: int) -> int:
    """Depths by one up to four, then by two, by four, and all from thirteen on."""
    return depth if depth <= 4 else 5 + (depth - 5) // 2 if depth <= 8 else 7 + (min(depth, 13) - 9) // 4


def _down(odds: Sequence[float], shift: float, floor: float) -> list[float]:
    """The chances along a chain, as far as they are above `floor`."""
    chance, found = 1.0, []
    for own in odds:
        chance *= _logistic(own + shift)
        if chance < floor:
            break
        found.append(chance)
    return found


def _odds(share: float) -> float:
    odds = _SURE if share >= 1 else -_SURE if share <= 0 else math.log(share / (1 - share))
    return min(max(odds, -_SURE), _SURE)


def _logistic(odds: float) -> float:
    return 1 / (1 + math.exp(-odds))
