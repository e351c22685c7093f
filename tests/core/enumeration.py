"""Every way a round of drafting and judging can go, with its exact probability. Knows no noise and no model.

A `Fork` is a source of random choices that follows a given list of branches; `explore` runs a function
once for every list there is. What a rule writes is so found as a sum over all its choices, in float64,
and compared with the law of the target: no sampling, no tolerance beyond rounding.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from sooner.core.rules import Chance, Verdict, block, match, reject, traversal
from sooner.core.tree import ROOT, Draft

VOCAB = 3
EXACT = 1e-12  # total variation that float64 rounding may leave

T = TypeVar("T")
Text = tuple[int, ...]
Judge = Callable[[Tensor, Draft, Chance], Verdict]


class NotALaw(AssertionError):
    """A rule asked for a draw from weights that are negative, not finite or all zero, or a coin of NaN."""


@dataclass
class Fork:
    """A Chance whose choices are `forced` as far as that list goes, and after it the first possible one.

    trail: for every choice made, the branch taken and those that are still to be taken.
    """

    forced: Sequence[int] = ()
    probability: float = 1.0
    trail: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)

    def coin(self, probability: float, depth: int) -> bool:
        if probability != probability:
            raise NotALaw("a coin with probability NaN")
        heads = min(max(probability, 0.0), 1.0)
        return self._choose([heads, 1.0 - heads]) == 0

    def pick(self, weights: Tensor, depth: int) -> int:
        total = float(weights.sum())
        if not bool((weights >= 0).all()) or not 0 < total < float("inf"):
            raise NotALaw(f"a draw from weights {weights.tolist()}")
        return self._choose((weights / total).tolist())

    def _choose(self, probs: Sequence[float]) -> int:
        possible = [branch for branch, p in enumerate(probs) if p > 0]
        at = len(self.trail)
        branch = self.forced[at] if at < len(self.forced) else possible[0]
        self.trail.append((branch, tuple(b for b in possible if b > branch)))
        self.probability *= probs[branch]
        return branch


def explore(run: Callable[[Fork], T]) -> Iterator[tuple[float, T]]:
    """(probability, result) of `run` for every sequence of choices it can make, depth first."""
    forced: list[int] | None = []
    while forced is not None:
        fork = Fork(forced)
        result = run(fork)
        yield fork.probability, result
        forced = _next_branch(fork)


def _next_branch(fork: Fork) -> list[int] | None:
    trail = fork.trail
    while trail:
        _, left = trail.pop()
        if left:
            return [branch for branch, _ in trail] + [left[0]]
    return None


@dataclass
class World:
    """A target p and a drafter q: a random law [VOCAB], float64, for every text, the same at every call.

    kind: "full" - every token has mass; "sparse" - zeros in both; "equal" - q is p; "near" - q is p up
    to rounding noise; "one-hot p", "one-hot q", "disjoint" - as they say, on tokens that differ.
    """

    seed: int
    kind: str = "full"
    _laws: dict[tuple[str, Text], Tensor] = field(default_factory=dict)

    def p(self, text: Text) -> Tensor:
        return self._law("p", text)

    def q(self, text: Text) -> Tensor:
        return self._law("q", text)

    def _law(self, who: str, text: Text) -> Tensor:
        if (who, text) not in self._laws:
            self._laws["p", text], self._laws["q", text] = self._pair(text)
        return self._laws[who, text]

    def _pair(self, text: Text) -> tuple[Tensor, Tensor]:
        number = int("1" + "".join(str(token) for token in text), VOCAB)
        generator = torch.Generator().manual_seed(self.seed * 100_003 + number)
        p, q = _random_law(generator), _random_law(generator)
        first, *others = torch.randperm(VOCAB, generator=generator).tolist()
        match self.kind:
            case "full":
                pass
            case "sparse":
                p, q = _without(p, first), _without(q, others[number % 2])
            case "equal":
                q = p.clone()
            case "near":
                q = p + 1e-16 * torch.randn(VOCAB, generator=generator, dtype=torch.float64)
            case "one-hot p":
                p = _one_hot(first)
            case "one-hot q":
                p, q = _without(p, first), _one_hot(first)
            case "disjoint":
                p, q = _one_hot(first), _without(q, first)
            case _:
                raise ValueError(self.kind)
        return p, q


KINDS = ("full", "sparse", "equal", "near", "one-hot p", "one-hot q", "disjoint")


def _random_law(generator: torch.Generator) -> Tensor:
    return (1.5 * torch.randn(VOCAB, generator=generator, dtype=torch.float64)).softmax(-1)


def _without(law: Tensor, *tokens: int) -> Tensor:
    left = law.clone()
    left[list(tokens)] = 0
    return left / left.sum()


def _one_hot(token: int) -> Tensor:
    law = torch.zeros(VOCAB, dtype=torch.float64)
    law[token] = 1
    return law


@dataclass(frozen=True)
class Drawn:
    """Draws every node of `parents` from q, siblings without replacement; a node that nothing is left for
    is missing, with all below it."""

    parents: tuple[int, ...]

    def __call__(self, world: World, chance: Chance) -> Draft:
        return grow(self.parents, world.q, lambda law, rank: chance.pick(law, 0), drawn=True)


@dataclass(frozen=True)
class Guessed:
    """Point-mass nodes: the j-th child of a node is the j-th likeliest token of q there."""

    parents: tuple[int, ...]

    def __call__(self, world: World, chance: Chance) -> Draft:
        return grow(self.parents, world.q, lambda law, rank: int(law.argmax()), drawn=False)


@dataclass(frozen=True)
class Stopping:
    """A drawn chain that ends *after* a token q gave less than half: the choice to stop may look at tokens
    that are in the draft."""

    depth: int

    def __call__(self, world: World, chance: Chance) -> Draft:
        tokens: list[int] = []
        probs: list[Tensor] = []
        while len(tokens) < self.depth and (not tokens or probs[-1][tokens[-1]] >= 0.5):
            probs.append(world.q(tuple(tokens)))
            tokens.append(chance.pick(probs[-1], 0))
        return Draft(tuple(tokens), tuple(range(ROOT, len(tokens) - 1)), torch.stack(probs))


Make = Callable[[World, Chance], Draft]


def grow(
    parents: Sequence[int], q: Callable[[Text], Tensor], choose: Callable[[Tensor, int], int], *, drawn: bool
) -> Draft:
    """A draft of the shape `parents`; `choose(law, rank)` names the next child under the law that is left."""
    texts: dict[int, Text] = {ROOT: ()}
    left: dict[int, Tensor] = {}
    ranks: dict[int, int] = {}
    number = {ROOT: ROOT}  # node of the shape -> node of the draft
    tokens: list[int] = []
    kept: list[int] = []
    probs: list[Tensor] = []
    for node, parent in enumerate(parents):
        law = left.get(parent, q(texts[parent]) if parent in texts else None)
        if law is None or not bool(law.sum() > 0):
            continue
        law = law / law.sum()
        token = choose(law, ranks.setdefault(parent, 0))
        ranks[parent] += 1
        left[parent] = law.clone()
        left[parent][token] = 0
        texts[node] = (*texts[parent], token)
        number[node] = len(tokens)
        tokens.append(token)
        kept.append(number[parent])
        probs.append(law)
    return Draft(tuple(tokens), tuple(kept), torch.stack(probs) if drawn else None)


class _LazyPicks(Sequence[int]):
    """The target's choice at every node, drawn when it is first looked at: what nobody sees needs no branch."""

    def __init__(self, laws: Tensor, chance: Chance) -> None:
        self._laws, self._chance = laws, chance
        self._known: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._laws)

    def __getitem__(self, row: int) -> int:  # type: ignore[override]  # rows only, no slices
        if row not in self._known:
            self._known[row] = self._chance.pick(self._laws[row], 0)
        return self._known[row]


def judge_match(laws: Tensor, draft: Draft, chance: Chance) -> Verdict:
    return match(_LazyPicks(laws, chance), draft)


JUDGES: dict[str, Judge] = {"match": judge_match, "reject": reject, "traversal": traversal}
CHAIN_JUDGES: dict[str, Judge] = {**JUDGES, "block": block}


def node_texts(draft: Draft) -> list[Text]:
    """The text after the root, then after every node."""
    texts: list[Text] = [()]
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        texts.append((*texts[parent + 1], token))
    return texts


def written(world: World, make: Make, judge: Judge) -> dict[Text, float]:
    """Probability of every text that one round can write (accepted nodes, then the token that follows)."""
    mass: dict[Text, float] = {}
    for drawn, draft in explore(lambda fork: make(world, fork)):
        laws = torch.stack([world.p(text) for text in node_texts(draft)])
        for judged, verdict in explore(lambda fork, d=draft, p=laws: judge(p, d, fork)):  # type: ignore[misc]
            text = (*(draft.tokens[node] for node in verdict.path), verdict.token)
            mass[text] = mass.get(text, 0.0) + drawn * judged
    return mass


def deviation(world: World, make: Make, judge: Judge, length: int) -> float:
    """Total variation between the first `length` tokens of a round completed with p, and those of p."""
    mass = written(world, make, judge)
    if max(len(text) for text in mass) > length:
        raise ValueError(f"a round writes more than {length} tokens")
    for size in range(1, length):
        for text in [text for text in mass if len(text) == size]:
            given = mass.pop(text)
            for token, p in enumerate(world.p(text).tolist()):
                longer = (*text, token)
                mass[longer] = mass.get(longer, 0.0) + given * p
    return 0.5 * sum(abs(mass.get(text, 0.0) - _plain(world, text)) for text in _texts(length))


def accepted(world: World, make: Make, judge: Judge) -> float:
    """Mean number of accepted nodes in a round."""
    return sum(mass * (len(text) - 1) for text, mass in written(world, make, judge).items())


def _texts(length: int) -> Iterator[Text]:
    return itertools.product(range(VOCAB), repeat=length)


def _plain(world: World, text: Text) -> float:
    probability = 1.0
    for i, token in enumerate(text):
        probability *= float(world.p(text[:i])[token])
    return probability
