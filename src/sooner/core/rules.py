"""The rules that decide which guesses survive. They know laws and drafts; their randomness is handed in.

Each rule is written once against `Chance`, so that the same code runs with noise in the engine and is
enumerated branch by branch in the tests. p is the target's law after a node, q the law a child was drawn
from (given its earlier siblings, and summing to 1); a point-mass guess has q = 1 at its own token.

match:      the target picks its own token at every node; a child survives if it *is* that token.
reject:     child x survives with min(1, p(x)/q(x)), else p becomes the normalised positive part of p - q and
            the next sibling is tried (Leviathan et al. 2211.17192, Chen et al. 2302.01318; reference G4, G5).
block:      chains; the chain is judged as a whole (Sun et al. 2403.10444; reference G6).
traversal:  trees, from the leaves to the root (Weng et al. 2505.12398; reference G7); block on a chain.

block and traversal accept at least as much as reject, on average, and never bias the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from sooner.core.sparse import Sparse
from sooner.core.tree import ROOT, Draft, child_with, children

Laws = Tensor | Sequence[Sparse]
"""[1 + n, V]: row 0 after the root, row 1 + i after node i; as a table, or row by row."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """path: surviving nodes from the root down; token: the correction or bonus that follows them.

    broken: the law after the last surviving node is not a law (NaN, or no mass); token is then -1.
    """

    path: tuple[int, ...]
    token: int
    broken: bool = False


class Chance(Protocol):
    """The random choices of a rule. `depth` is that of the token being chosen, 1 below the root."""

    def coin(self, probability: float, depth: int) -> bool:
        """True with that probability; never at 0, always at 1 or more."""

    def pick(self, weights: Tensor | Sparse, depth: int) -> int:
        """An id drawn from `weights`, [V] or sparse, which need not sum to 1 but have mass."""


class Picks(Protocol):
    """The target's own choices: [0] after the root, [1 + i] after node i. A list will do."""

    def __getitem__(self, row: int, /) -> int: ...


def match(picks: Picks, draft: Draft) -> Verdict:
    """Follow the target's choices for as long as there is a child that carries them."""
    path: list[int] = []
    node = ROOT
    while True:
        token = picks[node + 1]
        node = child_with(draft, node, token)
        if node == ROOT:
            return Verdict(tuple(path), token)
        path.append(node)


def reject(laws: Laws, draft: Draft, chance: Chance) -> Verdict:
    """From the root down, child by child."""
    below = children(draft.parents)
    path: list[int] = []
    node = ROOT
    while True:
        depth = len(path) + 1
        p = _normal(laws[node + 1], laws[node + 1])
        accepted = None
        for child in below.get(node, ()):
            if chance.coin(_ratio(p, draft, child), depth):
                accepted = child
                break
            # Equal p and q leave no residual; only rounding can bring us here then, and p itself is right.
            p = _normal(_residual(p, draft, child), p)
        if accepted is None:
            return Verdict(tuple(path), chance.pick(p, depth))
        path.append(accepted)
        node = accepted


def block(laws: Laws, draft: Draft, chance: Chance) -> Verdict:
    """The draft is a chain. The longest prefix whose own coin falls right survives."""
    length = len(draft)
    alive = [1.0]  # P_i of the reference: how much of the target's mass the prefix may still claim
    for node in range(length):
        alive.append(min(1.0, alive[-1] * _ratio(laws[node], draft, node)))
    for kept in range(length, 0, -1):
        p = laws[kept]
        left: Tensor | Sparse = p
        if kept == length:
            survives = alive[kept]
        else:
            left = _residual(p, draft, kept, alive[kept])
            survives = _share(float(left.sum()), alive[kept])
        if chance.coin(survives, kept):
            return Verdict(tuple(range(kept)), chance.pick(_normal(left, p), kept + 1))
    first = _residual(laws[0], draft, 0, 1.0) if length else laws[0]
    return Verdict((), chance.pick(_normal(first, laws[0]), 1))


def traversal(laws: Laws, draft: Draft, chance: Chance) -> Verdict:
    """From the leaves to the root.

    The first root-to-leaf path is taken; its leaf survives with its P, and the path with it. If not, the
    leaf is cut off, its parent's law loses what the leaf could claim, and the next path is taken.
    """
    below = {node: list(nodes) for node, nodes in children(draft.parents).items()}
    law: dict[int, Tensor | Sparse] = {ROOT: laws[0]}
    alive = {ROOT: 1.0}
    path: list[int] = []
    while True:
        last = path[-1] if path else ROOT
        while below.get(last):  # down to a leaf
            parent, last = last, below[last][0]
            path.append(last)
            if last not in alive:  # a node whose child has failed keeps what that left it
                alive[last] = min(1.0, alive[parent] * _ratio(law[parent], draft, last))
                law[last] = laws[last + 1]
        if not path or chance.coin(alive[last], len(path)):
            return Verdict(tuple(path), chance.pick(_normal(law[last], laws[last + 1]), len(path) + 1))
        path.pop()
        parent = draft.parents[last]
        left = _residual(law[parent], draft, last, alive[parent])
        below[parent].remove(last)
        if parent != ROOT:
            alive[parent] = _share(float(left.sum()), alive[parent])
        law[parent] = _normal(left, law[parent])


def _ratio(p: Tensor | Sparse, draft: Draft, child: int) -> float:
    """p(x) / q(x) for the child's token; q(x) > 0, since the token was drawn from q.

    Sparse laws meet point masses alone.
    """
    token = draft.tokens[child]
    if draft.probs is None or isinstance(p, Sparse):
        return float(p[token])
    return float(p[token] / draft.probs[child, token].to(p))


def _residual(p: Tensor | Sparse, draft: Draft, child: int, alive: float = 1.0) -> Tensor | Sparse:
    """The positive part of alive * p - q: what the target may still draw once the child has failed."""
    token = draft.tokens[child]
    if isinstance(p, Sparse):
        return p.without(token) * alive
    if draft.probs is None:
        left = p * alive
        left[token] = 0
        return left
    return (p * alive - draft.probs[child].to(p)).clamp(min=0)


def _share(mass: float, alive: float) -> float:
    """S / (S + 1 - P), 1 where both vanish."""
    whole = mass + 1 - alive
    return mass / whole if whole > 0 else 1.0


def _normal(weights: Tensor | Sparse, fallback: Tensor | Sparse) -> Tensor | Sparse:
    """weights scaled to sum to 1, or `fallback` where rounding left no mass."""
    if isinstance(weights, Sparse):
        mass = weights.sum()
        return weights / mass if mass > 0 else fallback
    total = weights.sum()
    return weights / total if bool(total > 0) else fallback
