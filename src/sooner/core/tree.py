"""The draft: a tree of guessed tokens. Knows nothing of who guessed or how the guesses are judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ROOT = -1


@dataclass(frozen=True, slots=True)
class Draft:
    """A tree hanging off the last certain token (the root, written -1).

    tokens: one token id a node.
    parents: parents[i] < i, or -1 for a child of the root; siblings carry different tokens.
    probs: [n, V] or None. Row i is the distribution node i was *actually drawn from*, given its earlier
        siblings; None says every node is a point-mass guess (a copy, an argmax, a top-k choice).
    scores: the drafter's estimate that the path down to the node survives, in [0, 1]; or None.

    A node is never un-drawn: dropping one because of its own value biases the output.
    Raises ValueError when the tree is malformed.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    probs: Tensor | None = None
    scores: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", tuple(self.tokens))  # drafters hand over lists
        object.__setattr__(self, "parents", tuple(self.parents))
        if len(self.tokens) != len(self.parents):
            raise ValueError(f"{len(self.tokens)} tokens but {len(self.parents)} parents")
        seen = set()
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            if type(parent) is not int or not ROOT <= parent < node:
                raise ValueError(
                    f"node {node} has parent {parent!r}; parents come before children, -1 is the root"
                )
            if (parent, token) in seen:
                raise ValueError(f"node {parent} has two children with token {token}")
            seen.add((parent, token))
        if self.scores is not None and len(self.scores) != len(self.tokens):
            raise ValueError(f"{len(self.tokens)} tokens but {len(self.scores)} scores")
        if self.probs is not None and (self.probs.dim() != 2 or len(self.probs) != len(self.tokens)):
            raise ValueError(f"probs must be [{len(self.tokens)}, V], got {list(self.probs.shape)}")

    def __len__(self) -> int:
        return len(self.tokens)


EMPTY = Draft()


def chain(tokens: Sequence[int], probs: Tensor | None = None) -> Draft:
    """Every node the child of the one before."""
    return Draft(tuple(tokens), tuple(range(ROOT, len(tokens) - 1)), probs)


def depths(parents: Sequence[int]) -> list[int]:
    """Depth of every node; a child of the root has depth 1."""
    result: list[int] = []
    for parent in parents:
        result.append(1 if parent == ROOT else result[parent] + 1)
    return result


def children(parents: Sequence[int]) -> dict[int, list[int]]:
    """Children of every node that has any, the root (-1) included, in drawing order."""
    result: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        result.setdefault(parent, []).append(node)
    return result


def ancestors(parents: Sequence[int]) -> Tensor:
    """bool [n, n]: row i is true at i and at every ancestor of i (the root is not a node)."""
    result = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent != ROOT:
            result[node] |= result[parent]
    return result


def is_chain(parents: Sequence[int]) -> bool:
    return all(parent == node - 1 for node, parent in enumerate(parents))


def keep(draft: Draft, nodes: Sequence[int]) -> Draft:
    """The draft with these nodes alone: rising, each with its parent, and of drawn siblings the first ones."""
    if len(nodes) == len(draft):
        return draft
    place = {node: i for i, node in enumerate(nodes)} | {ROOT: ROOT}
    return Draft(
        tuple(draft.tokens[node] for node in nodes),
        tuple(place[draft.parents[node]] for node in nodes),
        None if draft.probs is None else draft.probs[list(nodes)],
        None if draft.scores is None else tuple(draft.scores[node] for node in nodes),
    )


def follow(draft: Draft, tokens: Sequence[int]) -> list[int]:
    """The longest path from the root whose tokens are a prefix of `tokens`, as node indices."""
    path: list[int] = []
    node = ROOT
    for token in tokens:
        node = child_with(draft, node, token)
        if node == ROOT:
            break
        path.append(node)
    return path


def child_with(draft: Draft, node: int, token: int) -> int:
    """The child of a node (-1 = the root) that carries a token, or -1. Children come after their parents, so all
    the steps down a path look at every node once at most."""
    tokens, parents = draft.tokens, draft.parents
    for at in range(node + 1, len(tokens)):
        if parents[at] == node and tokens[at] == token:
            return at
    return ROOT


class Trie:
    """Grows a Draft from several guessed continuations, sharing their common beginnings."""

    def __init__(self, nodes: int, width: int) -> None:
        self._limit, self._width = nodes, width
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._below: dict[int, dict[int, int]] = {ROOT: {}}

    def add(self, tokens: Sequence[int]) -> None:
        """Put one continuation in, as far as the node and width limits allow."""
        node = ROOT
        for token in tokens:
            known = self._below[node].get(token)
            if known is None:
                if len(self._tokens) >= self._limit or len(self._below[node]) >= self._width:
                    return
                known = len(self._tokens)
                self._tokens.append(token)
                self._parents.append(node)
                self._below[node][token] = known
                self._below[known] = {}
            node = known

    @property
    def full(self) -> bool:
        return len(self._tokens) >= self._limit

    def draft(self) -> Draft:
        return Draft(tuple(self._tokens), tuple(self._parents))
