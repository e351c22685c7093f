"""How likely nodes of drafts are, learnt and told in Python: the oracle of belief_native.py. Knows no pass.

belief.py says what they are.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sooner.control.price import worth_their_rows
from sooner.control.protocol import Guess, Tried
from sooner.control.state import Nodes, Worth
from sooner.native.belief import BUCKETS, RANKS, SAID, Prices, Terms

ROOT = -1

_MEMORY = 1 - 1 / 400  # share of the old counts that a new one leaves
_PRIOR = 3.0  # visits that the first guess of a rate counts for
_ENOUGH = 30.0  # visits from which it no longer counts
_FIRST, _LATER = 0.5, 0.12  # first guesses for the first child of a node, and for the others
# How far a request may depart from the rest, as the variance of its log odds: at first, and more with each node.
_DOUBT, _DRIFT = 2.0, 0.004
_SCORED, _SCORED_DRIFT = 0.3, 0.001  # the same where scores say most of it
_PULL = 0.06  # how fast it comes back to them
_AGAINST_ALL_ODDS = 0.9  # a hit that was so much more than expected puts in doubt what is known of a request
_BOUND = 6.0
_TINY = 0.01
_SHAPES = 256  # guesses whose shape is remembered
_SURE = 4.5  # log odds that no rate exceeds
_RANKS, _BUCKETS = RANKS, BUCKETS  # places among siblings and depths that are told apart, see `_bucket`
_SAID = SAID  # scores are looked at as log odds, from minus this to this
TERMS = Terms(
    memory=_MEMORY, prior=_PRIOR, enough=_ENOUGH, first=_FIRST, later=_LATER, doubt=_DOUBT, drift=_DRIFT,
    scored_doubt=_SCORED, scored_drift=_SCORED_DRIFT, pull=_PULL, against=_AGAINST_ALL_ODDS, bound=_BOUND,
    sure=_SURE,
)  # fmt: skip
_LEAST_SHARE, _MOST_SHARE = 1 / (1 + math.exp(_SAID)), 1 / (1 + math.exp(-_SAID))


@dataclass(slots=True)
class _Rate:
    """hits of visits, both fading."""

    hits: float = 0.0
    visits: float = 0.0
    known: float | None = None  # its log odds, until more is added

    def add(self, hit: bool) -> None:
        self.hits = self.hits * _MEMORY + hit
        self.visits = self.visits * _MEMORY + 1
        self.known = None

    @property
    def odds(self) -> float | None:
        """The log odds of their ratio once there are `_ENOUGH` of them."""
        if self.known is None and self.visits >= _ENOUGH:
            self.known = _odds(self.hits / self.visits)
        return self.known


class _Scores:
    """What a drafter's scores are worth: by how much their log odds are off, at whole numbers; linear between.

    The order that the scores give is kept nearly everywhere, so the best of many nodes can be told.
    """

    def __init__(self) -> None:
        size = 2 * _SAID + 2  # the last one is there so that each has a next
        self._hits, self._visits, self._said = [0.0] * size, [0.0] * size, [0.0] * size
        self.off = [0.0] * size
        self._stale: set[int] = set()  # where `off` lags behind; it is worked out before chances are told

    def odds(self, said: float) -> float:
        at = int(said + _SAID)
        below = self.off[at]
        return said + below + (said + _SAID - at) * (self.off[at + 1] - below)

    def survivals(self, said: Sequence[float], parents: Sequence[int], shift: float, floor: float) -> list[float]:
        """The chance of each node with all above it; below a chance of `floor` it is 0."""
        for at in self._stale:
            visits = self._visits[at]
            mean = self._said[at] / visits
            share = (self._hits[at] + _PRIOR * _logistic(mean)) / (visits + _PRIOR)
            self.off[at] = _odds(share) - mean
        self._stale.clear()
        return _down_tree(parents, [self.odds(one) for one in said], shift, floor)

    def add(self, said: float, hit: bool) -> None:
        at = int(said + _SAID + 0.5)
        self._hits[at] = self._hits[at] * _MEMORY + hit
        self._visits[at] = self._visits[at] * _MEMORY + 1
        self._said[at] = self._said[at] * _MEMORY + said
        self._stale.add(at)


@dataclass(slots=True)
class _Pending:
    """A guess the text is still being compared with, from `node` on."""

    guess: Guess
    node: int
    depth: int


@dataclass(slots=True)
class _Known:
    """A guess, and of each node its score as log odds (given its parent's) or its place; the children of the
    root and of every node that has any, worked out when they are asked for."""

    guess: Guess
    said: list[float] | None
    places: list[int]
    found: dict[int, list[int]] | None = None

    @property
    def below(self) -> dict[int, list[int]]:
        if self.found is None:
            self.found = _below(self.guess.parents)
        return self.found


@dataclass(slots=True)
class _Own:
    """What is known of one request."""

    shift: float = 0.0
    doubt: float | None = None  # variance of the shift
    pending: _Pending | None = None


class PlainBeliefs:
    """Beliefs in Python."""

    def __init__(self) -> None:
        self._places = [_Rate() for _ in range(_BUCKETS * _RANKS)]
        self._levels = [_Rate() for _ in range(_BUCKETS)]
        self._scores = _Scores()
        self._own: dict[str, _Own] = {}
        self._shapes: dict[int, _Known] = {}
        self.waiting: set[str] = set()

    def weigh(self, guesses: Sequence[tuple[str, Guess]], floor: float, prices: Prices) -> tuple[Nodes, Worth]:
        nodes: list[tuple[float, int, int]] = []
        for place, (name, guess) in enumerate(guesses):
            chances = self.survivals(name, guess, floor)
            nodes += [(-chance, place, node) for node, chance in enumerate(chances) if chance]
        nodes.sort()
        values = [value for value, _, _ in nodes]
        found = Nodes(values, [place for _, place, _ in nodes], [node for *_, node in nodes])
        return found, worth_their_rows(values, prices)

    def survivals(self, request_id: str, guess: Guess, floor: float = 0.0) -> list[float]:
        shift = self._of(request_id).shift
        known = self._known(guess)
        if known.said is not None:
            return self._scores.survivals(known.said, guess.parents, shift, floor)
        odds = [self._deep(self._places, place // _RANKS, place % _RANKS, _RANKS) for place in known.places]
        if guess.drawn:
            return _down_drawn(guess.parents, odds, shift)
        return _down_tree(guess.parents, odds, shift, floor)

    def levels(self, request_ids: Sequence[str], depth: int) -> list[list[float]]:
        odds = [self._deep(self._levels, _bucket(d), 0, 1) for d in range(1, depth + 1)]
        return [down(odds, self._of(name).shift) for name in request_ids]

    def learn(self, tried: Sequence[Tried]) -> list[int]:
        return [self._learn(one) for one in tried]

    def _learn(self, tried: Tried) -> int:
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
                self._level(own, known, known.below[ROOT], right, 1)
        return self._compare(own, tried.tokens)

    def __len__(self) -> int:
        return len(self._own)

    def forget(self, request_id: str) -> None:
        self._own.pop(request_id, None)
        self.waiting.discard(request_id)

    def _verified(self, own: _Own, tried: Tried) -> _Pending | None:
        """Learn from the nodes that were judged; what was left out below them can still be compared."""
        guess, kept, path = tried.guess, set(tried.kept), set(tried.path)
        known = self._known(guess)
        for depth, above in enumerate((ROOT, *tried.path), 1):
            below = [c for c in known.below.get(above, ()) if c in kept]
            self._level(own, known, below, path, depth)
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
            self._level(own, known, below, set(right), waiting.depth)
            if not right:
                own.pending = None
                return count
            more = right[0] in known.below
            own.pending = _Pending(waiting.guess, right[0], waiting.depth + 1) if more else None
        return len(tokens)

    def _level(self, own: _Own, known: _Known, below: Sequence[int], right: Collection[int], depth: int) -> None:
        if not below:
            return
        any_right, said, shift = False, known.said, own.shift
        first, drift = (_DOUBT, _DRIFT) if said is None else (_SCORED, _SCORED_DRIFT)
        doubt = first if own.doubt is None else min(own.doubt, first)
        for node in below:
            hit = node in right
            any_right |= hit
            odds = self._node_odds(known, node) if said is None else self._scores.odds(said[node])
            chance = 1 / (1 + math.exp(-odds - shift))
            weight = chance * (1 - chance)  # what was sure to come says little; what came against all odds a lot
            if hit - chance > _AGAINST_ALL_ODDS:  # the text is another one
                doubt = first
            doubt /= 1 + weight * doubt
            shift += doubt * (hit - chance) - _PULL * weight * shift
            doubt += drift
            shift = -_BOUND if shift < -_BOUND else _BOUND if shift > _BOUND else shift
            if said is not None:
                self._scores.add(said[node], hit)
            else:
                self._places[known.places[node]].add(hit)
        own.shift, own.doubt = shift, doubt
        self._levels[_bucket(depth)].add(any_right)

    def _node_odds(self, known: _Known, node: int) -> float:
        bucket, rank = divmod(known.places[node], _RANKS)
        return self._deep(self._places, bucket, rank, _RANKS)

    def _deep(self, rates: Sequence[_Rate], bucket: int, rank: int, ranks: int) -> float:
        """Log odds at a depth; while little is known of it, drawn towards what holds one level higher."""
        odds = rates[bucket * ranks + rank].odds
        return odds if odds is not None else _odds(_share(rates, bucket, rank, ranks))

    def _known(self, guess: Guess) -> _Known:
        """Kinds and children of its nodes, worked out once."""
        found = self._shapes.get(id(guess))
        if found is None or found.guess is not guess:
            if len(self._shapes) >= _SHAPES:
                self._shapes.clear()
            scored = guess.scores is not None and not guess.drawn
            said, places = (_said(guess), []) if scored else (None, _place(guess.parents))
            found = self._shapes[id(guess)] = _Known(guess, said, places)
        return found

    def _of(self, request_id: str) -> _Own:
        found = self._own.get(request_id)
        if found is None:
            found = self._own[request_id] = _Own()
        return found


def _share(rates: Sequence[_Rate], bucket: int, rank: int, ranks: int) -> float:
    """Hits of visits; while there are few, drawn towards what holds one level higher."""
    rate = rates[bucket * ranks + rank]
    if rate.visits >= _ENOUGH:
        return rate.hits / rate.visits
    first = _share(rates, bucket - 1, rank, ranks) if bucket > 1 else _LATER if rank else _FIRST
    return (rate.hits + _PRIOR * first) / (rate.visits + _PRIOR)


def _said(guess: Guess) -> list[float]:
    """The score of each node, given its parent's, as log odds."""
    scores = guess.scores or ()
    found, log = [], math.log
    for score, parent in zip(scores, guess.parents, strict=True):
        above = 1.0 if parent < 0 else scores[parent]
        share = score / above if above > 0 else 0.0
        if not share > _LEAST_SHARE:  # NaN too
            found.append(float(-_SAID))
        elif share >= _MOST_SHARE:
            found.append(float(_SAID))
        else:
            found.append(log(share / (1 - share)))
    return found


def _place(parents: Sequence[int]) -> list[int]:
    """Of each node its depth and its place among its siblings, as one number."""
    found: list[int] = []
    depths: list[int] = []
    born: dict[int, int] = {}
    for parent in parents:
        depth = 1 if parent < 0 else depths[parent] + 1
        depths.append(depth)
        rank = born.get(parent, 0)
        born[parent] = rank + 1
        found.append(_bucket(depth) * _RANKS + min(rank, _RANKS - 1))
    return found


def _below(parents: Sequence[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        found.setdefault(parent, []).append(node)
    return found


def _down_tree(parents: Sequence[int], odds: Sequence[float], shift: float, floor: float) -> list[float]:
    found: list[float] = []
    for own, parent in zip(odds, parents, strict=True):
        above = 1.0 if parent < 0 else found[parent]
        chance = above * _logistic(own + shift) if above else 0.0
        found.append(chance if chance >= floor else 0.0)
    return found


def _down_drawn(parents: Sequence[int], odds: Sequence[float], shift: float) -> list[float]:
    """Drawn siblings count in the order of drawing."""
    found: list[float] = []
    last: dict[int, int] = {}
    for node, parent in enumerate(parents):
        chance = (1.0 if parent < 0 else found[parent]) * _logistic(odds[node] + shift)
        if parent in last:
            chance = min(chance, found[last[parent]])
        last[parent] = node
        found.append(chance)
    return found


def _bucket(depth: int) -> int:
    """Depths by one up to four, then by two, by four, and all from thirteen on."""
    return depth if depth <= 4 else 5 + (depth - 5) // 2 if depth <= 8 else 7 + (min(depth, 13) - 9) // 4


def down(odds: Sequence[float], shift: float) -> list[float]:
    """The chances along a chain, without the tiny ones."""
    chance, found = 1.0, []
    for own in odds:
        chance *= _logistic(own + shift)
        if chance < _TINY:
            break
        found.append(chance)
    return found


def _odds(share: float) -> float:
    odds = _SURE if share >= 1 else -_SURE if share <= 0 else math.log(share / (1 - share))
    return min(max(odds, -_SURE), _SURE)


def _logistic(odds: float) -> float:
    return 1 / (1 + math.exp(-odds))
