"""Medusa: heads on the target's last state guess the tokens after the next one; a static tree joins their guesses.

Knows the heads' arithmetic through heads/medusa.py and nothing of files. The heads' guesses do not depend on each
other, so a tree is a list of paths (a, b, c): the a-th guess of head 0, then the b-th of head 1, and so on.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from sooner.config import Budget
from sooner.core.tree import EMPTY, ROOT, Draft, follow
from sooner.draft.protocol import Context, Outcome
from sooner.errors import ConfigError, unknown
from sooner.heads.medusa import MedusaHeads, Project
from sooner.model.linear import pack

Path = tuple[int, ...]
Accuracies = Sequence[Sequence[float]]
"""[head][rank]: how often the rank-th guess of a head is right once those above it are."""

RANKS = 10  # guesses of a head that are considered
# How many children each node of the tree shipped with Medusa (mc_sim_7b_63, 63 nodes) has.
_SHIPPED = {(): 10, (0,): 10, (1,): 7, (2,): 3, (3,): 2} | {(a,): 1 for a in range(4, 10)}
_SHIPPED |= {(0, 0): 10, (0, 1): 3, (0, 2): 2, (1, 0): 2, (2, 0): 1, (0, 0, 0): 2} | {
    (0, b): 1 for b in range(3, 8)
}
# Published accuracies of the first guesses on a 7B target; the belief before anything is measured.
_BELIEF = (0.56, 0.316, 0.201, 0.147, 0.118)
_BELIEF_WEIGHT = 20.0  # in observations
_RECOUNT = 64  # observations between two trees


def shipped_tree() -> list[Path]:
    """The paths of the tree that comes with Medusa, shorter ones first."""
    return sorted(((*above, b) for above, count in _SHIPPED.items() for b in range(count)), key=len)


def best_tree(accuracies: Accuracies, budget: Budget, allowed: Container[Path] | None = None) -> list[Path]:
    """The paths that are likeliest to survive, best first, within a budget, out of `allowed` if it is given."""
    found: list[Path] = []
    below: Counter[Path] = Counter()
    heap: list[tuple[float, Path]] = [(-1.0, ())]
    while heap and len(found) < budget.nodes:
        score, path = heapq.heappop(heap)
        if path:
            if below[path[:-1]] == budget.width:
                continue
            below[path[:-1]] += 1
            found.append(path)
        if len(path) < min(budget.depth, len(accuracies)):
            for rank, chance in enumerate(accuracies[len(path)]):
                longer = (*path, rank)
                if allowed is None or longer in allowed:
                    heapq.heappush(heap, (score * chance, longer))
    return found


@dataclass(slots=True)
class _State:
    """The target's state before the root of one request, the root's token, and what was guessed from it."""

    feature: Tensor
    root: int
    guesses: list[list[int]] = field(default_factory=list)


class MedusaDrafter:
    """Heads on a target whose final state is tap `layers`; `project` is its LM head, for heads without their own.

    tree: "measured" (the best for the accuracies seen so far, those published to begin with) or "shipped" (that
        of Medusa's release). Both are cut to the budget, likeliest paths first.
    Guesses are the heads' likeliest ids, not drawn, so they are exact at any temperature without `probs`.
    Raises ModelError for heads that do not fit a target of `hidden` and `vocab`.
    """

    name = "medusa"

    def __init__(
        self,
        heads: MedusaHeads,
        project: Project,
        *,
        layers: int,
        hidden: int,
        vocab: int,
        tree: Literal["measured", "shipped"] = "measured",
    ) -> None:
        if tree not in ("measured", "shipped"):
            raise ConfigError(unknown("tree", tree, ("measured", "shipped")))
        heads.check_target(hidden, vocab)
        self.taps: tuple[int, ...] = (layers,)
        self._heads, self._project = heads, project
        self._outs = [None if head.out is None else pack([head.out], [None]) for head in heads.heads]
        self._allowed = frozenset(shipped_tree()) if tree == "shipped" else None
        self._ranks = min(RANKS, vocab)
        self._right = [
            [_BELIEF_WEIGHT * chance for chance in _belief(i, self._ranks)] for i in range(len(heads.heads))
        ]
        self._seen = [_BELIEF_WEIGHT] * len(heads.heads)
        self._trees: dict[Budget, list[Path]] = {}
        self._until_recount = _RECOUNT
        self._states: dict[str, _State] = {}

    @property
    def accuracies(self) -> list[list[float]]:
        """[head][rank]: how often each guess was right where those before it were, beliefs included."""
        return [[right / seen for right in row] for row, seen in zip(self._right, self._seen, strict=True)]

    @torch.no_grad()
    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        drafts = [EMPTY] * len(contexts)
        ready: list[tuple[int, _State]] = []
        for i, (context, budget) in enumerate(zip(contexts, budgets, strict=True)):
            state = self._states.get(context.request_id)
            if state is not None and state.root == context.tokens[-1] and not budget.empty:
                ready.append((i, state))
        if not ready:
            return drafts
        depth = min(len(self._heads.heads), max(budgets[i].depth for i, _ in ready))
        guesses = self._guess(torch.stack([state.feature for _, state in ready]), depth)
        for (i, state), mine in zip(ready, guesses, strict=True):
            state.guesses = mine
            drafts[i] = self._draft(mine, budgets[i])
        return drafts

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            state = self._states.pop(outcome.request_id, None)
            if state is not None:
                self._count(state.guesses, outcome.tokens)
            if outcome.features is not None and outcome.tokens:
                root = len(outcome.features) - len(outcome.draft) - 1  # row of the last certain token
                path = follow(outcome.draft, outcome.tokens[: outcome.accepted])
                row = root + 1 + path[-1] if path else root
                self._states[outcome.request_id] = _State(outcome.features[row, 0].clone(), outcome.tokens[-1])

    def forget(self, request_id: str) -> None:
        self._states.pop(request_id, None)

    def _guess(self, features: Tensor, depth: int) -> list[list[list[int]]]:
        """[request][head][rank]: the heads' likeliest ids. features: [requests, h]."""
        states = [head.state(features) for head in self._heads.heads[:depth]]
        if self._heads.own_lm_heads:
            rows = [out(x) for out, x in zip(self._outs, states, strict=False) if out is not None]
            logits = torch.stack(rows)
        else:
            logits = self._project(torch.cat(states)).view(depth, len(features), -1)
        best = logits.topk(min(self._ranks, logits.shape[-1]), dim=-1).indices
        ids = best if self._heads.ids is None else self._heads.ids[best]
        found: list[list[list[int]]] = ids.transpose(0, 1).tolist()
        return found

    def _draft(self, guesses: Sequence[Sequence[int]], budget: Budget) -> Draft:
        tree = self._trees.get(budget)
        if tree is None:
            tree = self._trees[budget] = best_tree(self.accuracies, budget, self._allowed)
        place: dict[Path, int] = {(): ROOT}
        scores: dict[Path, float] = {(): 1.0}
        tokens: list[int] = []
        chances = self.accuracies
        for path in tree:
            if len(path) > len(guesses) or path[-1] >= len(guesses[len(path) - 1]):
                continue
            place[path] = len(tokens)
            scores[path] = scores[path[:-1]] * chances[len(path) - 1][path[-1]]
            tokens.append(guesses[len(path) - 1][path[-1]])
        nodes = list(place)[1:]
        parents = tuple(place[path[:-1]] for path in nodes)
        return Draft(tuple(tokens), parents, scores=tuple(scores[path] for path in nodes))

    def _count(self, guesses: Sequence[Sequence[int]], tokens: Sequence[int]) -> None:
        """Which guesses were right. Token i was reached through accepted guesses, so it judges head i."""
        for i, (row, token) in enumerate(zip(guesses, tokens, strict=False)):
            self._seen[i] += 1
            if token in row:
                self._right[i][row.index(token)] += 1
        self._until_recount -= 1
        if self._until_recount == 0:
            self._until_recount = _RECOUNT
            self._trees.clear()


def _belief(head: int, ranks: int) -> list[float]:
    """Accuracies before anything is measured: the first guess as published, the others share part of the rest."""
    first = _BELIEF[head] if head < len(_BELIEF) else _BELIEF[-1] * 0.8 ** (head + 1 - len(_BELIEF))
    return [first] + [(1 - first) * 0.2 * 0.75 ** (rank - 1) for rank in range(1, ranks)]
