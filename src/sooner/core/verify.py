"""Which guesses survive, and the token that follows them. Knows laws, drafts and noise; changes nothing.

Two exact rules, each written once against `Chance`, the source of its random choices, so that the
same code is run with noise in the engine and enumerated branch by branch in the tests.

match:  the target picks its own token at every node; a child survives if it *is* that token.
reject: child x survives with min(1, p(x)/q(x)), else the law becomes the normalised positive part of
        p - q, and the next sibling is tried (Leviathan et al. 2211.17192, Chen et al. 2302.01318; siblings
        without replacement and point-mass siblings as in algorithms G4b, G4c of the reference).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from sooner.core import noise
from sooner.core.law import Law
from sooner.core.tree import ROOT, Draft, children, depths


@dataclass(frozen=True, slots=True)
class Verdict:
    """path: surviving nodes from the root down; token: the correction or bonus that follows them.

    broken: the law after the last surviving node is not a law (NaN, or no mass); token is then -1.
    """

    path: tuple[int, ...]
    token: int
    broken: bool = False


@dataclass(frozen=True, slots=True)
class Trial:
    """One segment to judge: `first` is the row of its root in the laws, its nodes follow in order.

    root: position of the root in the text. rule is "match" for greedy rows, whatever was asked.
    """

    first: int
    draft: Draft
    root: int
    seed: int
    rule: Literal["match", "reject"]


class Chance(Protocol):
    """The random choices of *reject*. `depth` is that of the token being chosen, 1 below the root."""

    def coin(self, probability: float, depth: int) -> bool:
        """True with that probability; never at 0, always at 1 or more."""

    def pick(self, weights: Tensor, depth: int) -> int:
        """An id drawn from `weights` [V], which need not sum to 1 but have mass."""


class NoiseChance:
    """Chance from counter-based noise: every draw of a round has a key of its own."""

    def __init__(self, seed: int, root: int) -> None:
        self._seed, self._root, self._draws = seed, root, 0

    def _key(self, depth: int, stream: int) -> int:
        self._draws += 1
        return noise.key(self._seed, self._root + depth, stream, self._root, self._draws)

    def coin(self, probability: float, depth: int) -> bool:
        return noise.uniform(self._key(depth, noise.COIN)) < probability

    def pick(self, weights: Tensor, depth: int) -> int:
        return int(noise.race(weights[None], [self._key(depth, noise.RESIDUAL)]))


def match(picks: Sequence[int], draft: Draft) -> Verdict:
    """picks[0] is the target's choice after the root, picks[1 + i] its choice after node i."""
    below = children(draft.parents)
    path: list[int] = []
    node = ROOT
    while True:
        token = picks[node + 1]
        child = next((c for c in below.get(node, ()) if draft.tokens[c] == token), None)
        if child is None:
            return Verdict(tuple(path), token)
        path.append(child)
        node = child


def reject(laws: Tensor, draft: Draft, chance: Chance) -> Verdict:
    """laws [1 + n, V]: row 0 after the root, row 1 + i after node i."""
    below = children(draft.parents)
    path: list[int] = []
    node = ROOT
    while True:
        depth = len(path) + 1
        p = laws[node + 1]
        accepted = None
        for child in below.get(node, ()):
            ratio, p = _try_child(p, draft, child)
            if chance.coin(ratio, depth):
                accepted = child
                break
            # Equal p and q leave no residual; only rounding can bring us here then, and p itself is right.
            p = p if bool(p.sum() > 0) else laws[node + 1]
        if accepted is None:
            return Verdict(tuple(path), chance.pick(p, depth))
        path.append(accepted)
        node = accepted


def _try_child(p: Tensor, draft: Draft, child: int) -> tuple[float, Tensor]:
    """Chance of accepting `child` under the law p [V], and the law that is left if it is rejected."""
    token = draft.tokens[child]
    if draft.probs is None:
        ratio = float(p[token] / p.sum())
        left = p.clone()
        left[token] = 0
        return ratio, left
    q = draft.probs[child].to(p)
    share, q = p / p.sum(), q / q.sum()
    # q(token) > 0, since the token was drawn from q.
    return float(share[token] / q[token]), (share - q).clamp(min=0)


def verify(law: Law, trials: Sequence[Trial]) -> list[Verdict]:
    """Judge every trial against its rows of `law`. One transfer of ids from the device in all."""
    picks = target_picks(law, trials)
    broken = law.broken.tolist()
    verdicts = []
    for trial in trials:
        rows = range(trial.first, trial.first + 1 + len(trial.draft))
        if trial.rule == "match" or law.index[trial.first] < 0:
            verdict = match(picks[rows.start : rows.stop], trial.draft)
        elif broken[trial.first]:
            verdict = Verdict((), -1)
        else:
            sampled = law.probs[law.index[rows.start] : law.index[rows.stop - 1] + 1]
            verdict = reject(sampled, trial.draft, NoiseChance(trial.seed, trial.root))
        verdicts.append(_cut_at_broken(verdict, broken[rows.start : rows.stop]))
    return verdicts


def target_picks(law: Law, trials: Sequence[Trial]) -> list[int]:
    """The target's own choice at every row: the likeliest id, or the draw its TARGET noise makes."""
    best = law.best
    rows, keys = [], []
    for trial in trials:
        if trial.rule == "match" and law.index[trial.first] >= 0:
            for offset, depth in enumerate([0, *depths(trial.draft.parents)]):
                rows.append(trial.first + offset)
                keys.append(noise.key(trial.seed, trial.root + depth + 1, noise.TARGET))
    if rows:
        probs = law.probs[[law.index[r] for r in rows]]
        best = best.clone()
        best[torch.tensor(rows, device=best.device)] = noise.race(probs, keys)
    picked: list[int] = best.tolist()
    return picked


def _cut_at_broken(verdict: Verdict, broken: list[bool]) -> Verdict:
    """A row without a law ends the path there; the request that owns it ends with an error."""
    nodes = (ROOT, *verdict.path)
    for length, node in enumerate(nodes):
        if broken[node + 1]:
            return Verdict(verdict.path[:length], -1, broken=True)
    return verdict
