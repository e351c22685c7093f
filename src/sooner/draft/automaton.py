"""An online suffix automaton over tokens, with counts. Knows texts as whole numbers, and no drafts.

Every substring of the texts it has seen leads from the root to one state; substrings that end at the same places
share it (Blumer et al. 1985). A state's suffix link leads to the longest of its suffixes that also ends elsewhere.
Several texts may grow in one automaton, each from the root or from its own end. O(1) amortised per token.

All arrays are int32. states: [n, 4]; edges: [m, 4], those of one state a linked list; slots: a hash table from
(state, token) to an edge, by open addressing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from numba import njit

ROOT = 0
_LEN, _LINK, _COUNT, _FIRST = 0, 1, 2, 3  # of a state: longest substring, suffix link, places, first edge
_SOURCE, _TOKEN, _TARGET, _NEXT = 0, 1, 2, 3  # of an edge
_STATES, _EDGES = 0, 1  # how many there are, in `sizes`
_FULL = 0.8  # of the hash table
_REACH = 64  # suffixes of the new end whose counts go up with a token
_SCAN = 32  # edges of a state that are looked at for continuations
_LEVELS = 4  # suffixes of a context that may vote on what follows
_FRONTIER = 256  # nodes under consideration

Array = Any  # numpy's own types say nothing about shapes
F = TypeVar("F", bound=Callable[..., Any])


def _compiled(function: F) -> F:
    """Compiled at first use, and kept on disk where there is a folder to keep it in."""
    try:
        made: F = njit(cache=True)(function)
    except RuntimeError:  # no such folder
        made = njit(function)
    return made


@_compiled
def _slot(state: int, token: int, size: int) -> int:
    """Where the search for an edge begins."""
    mixed = state * 0x1E3779B97F4A7C15 + token * 0x42B2AE3D27D4EB4F
    mixed = (mixed ^ (mixed >> 29)) * 0x165667B19E3779F9
    return (((mixed >> 32) & 0x7FFFFFFF) * size) >> 31


@_compiled
def _find(edges: Array, slots: Array, state: int, token: int) -> int:
    """The edge of `state` for `token`, or -1."""
    at = _slot(state, token, len(slots))
    while slots[at] >= 0:
        edge = slots[at]
        if edges[edge, _SOURCE] == state and edges[edge, _TOKEN] == token:
            return int(edge)
        at = at + 1 if at + 1 < len(slots) else 0
    return -1


@_compiled
def _enter(edges: Array, slots: Array, edge: int) -> None:
    """Put an edge into the hash table."""
    at = _slot(edges[edge, _SOURCE], edges[edge, _TOKEN], len(slots))
    while slots[at] >= 0:
        at = at + 1 if at + 1 < len(slots) else 0
    slots[at] = edge


@_compiled
def _grown(rows: Array) -> Array:
    larger = np.empty((len(rows) + len(rows) // 4 + 16, rows.shape[1]), dtype=np.int32)
    larger[: len(rows)] = rows
    return larger


@_compiled
def _add_edge(
    states: Array, edges: Array, slots: Array, sizes: Array, source: int, token: int, target: int
) -> tuple[Array, Array]:
    """A new edge, the first of its source; returns the arrays, which may have had to grow."""
    edge = sizes[_EDGES]
    if edge == len(edges):
        edges = _grown(edges)
    if edge + 1 > _FULL * len(slots):
        slots = np.full(len(slots) + len(slots) // 2 + 16, -1, dtype=np.int32)
        for known in range(edge):
            _enter(edges, slots, known)
    edges[edge, _SOURCE], edges[edge, _TOKEN], edges[edge, _TARGET] = source, token, target
    edges[edge, _NEXT] = states[source, _FIRST]
    states[source, _FIRST] = edge
    _enter(edges, slots, edge)
    sizes[_EDGES] = edge + 1
    return edges, slots


@_compiled
def _add_state(states: Array, sizes: Array, length: int, link: int, count: int) -> Array:
    state = sizes[_STATES]
    if state == len(states):
        states = _grown(states)
    states[state, _LEN], states[state, _LINK] = length, link
    states[state, _COUNT], states[state, _FIRST] = count, -1
    sizes[_STATES] = state + 1
    return states


@_compiled
def _clone(
    states: Array, edges: Array, slots: Array, sizes: Array, parent: int, token: int, state: int
) -> tuple[Array, Array, Array]:
    """Split off the substrings of `state` up to those of `parent` and `token`, which now end elsewhere too."""
    states = _add_state(states, sizes, states[parent, _LEN] + 1, states[state, _LINK], states[state, _COUNT])
    made = sizes[_STATES] - 1
    states[state, _LINK] = made
    edge = states[state, _FIRST]
    while edge >= 0:
        edges, slots = _add_edge(states, edges, slots, sizes, made, edges[edge, _TOKEN], edges[edge, _TARGET])
        edge = edges[edge, _NEXT]
    while parent >= 0:
        edge = _find(edges, slots, parent, token)
        if edge < 0 or edges[edge, _TARGET] != state:
            break
        edges[edge, _TARGET] = made
        parent = states[parent, _LINK]
    return states, edges, slots


@_compiled
def _extend(
    states: Array, edges: Array, slots: Array, sizes: Array, end: int, tokens: Array, reach: int
) -> tuple[Array, Array, Array, int]:
    """Append tokens to the text that ends at state `end`; returns the arrays and the new end."""
    for token in tokens:
        parent, new = end, -1
        edge = _find(edges, slots, parent, token)
        if edge < 0:
            states = _add_state(states, sizes, states[end, _LEN] + 1, ROOT, 0)
            new = sizes[_STATES] - 1
        while edge < 0 and parent >= 0:
            edges, slots = _add_edge(states, edges, slots, sizes, parent, token, new)
            parent = states[parent, _LINK]
            if parent >= 0:
                edge = _find(edges, slots, parent, token)
        known = ROOT
        if parent >= 0:
            known = edges[edge, _TARGET]
            if states[known, _LEN] != states[parent, _LEN] + 1:
                states, edges, slots = _clone(states, edges, slots, sizes, parent, token, known)
                known = sizes[_STATES] - 1
        end = known
        if new >= 0:
            states[new, _LINK] = known
            end = new
        at, steps = end, 0
        while at != ROOT and steps < reach:
            states[at, _COUNT] += 1
            at = states[at, _LINK]
            steps += 1
    return states, edges, slots, end


@_compiled
def _match(states: Array, edges: Array, slots: Array, tokens: Array) -> tuple[int, int]:
    """The state of the longest suffix of `tokens` that is known, and that suffix's length."""
    state, length = ROOT, 0
    for token in tokens:
        edge = _find(edges, slots, state, token)
        while edge < 0 and state != ROOT:
            state = states[state, _LINK]
            length = states[state, _LEN]
            edge = _find(edges, slots, state, token)
        if edge >= 0:
            state = edges[edge, _TARGET]
            length += 1
    return state, length


@_compiled
def _listen(states: Array, edges: Array, state: int, heard: Array) -> tuple[int, int]:
    """What followed a state, into `heard`: tokens, targets, counts. How many there are, and all their counts."""
    total, count, edge = 0, 0, states[state, _FIRST]
    while edge >= 0 and count < _SCAN:
        target = edges[edge, _TARGET]
        heard[count, 0], heard[count, 1], heard[count, 2] = edges[edge, _TOKEN], target, states[target, _COUNT]
        total += heard[count, 2]
        count, edge = count + 1, edges[edge, _NEXT]
    if edge >= 0:  # there are more; the state's own count is that of all
        total = max(total, states[state, _COUNT])
    return count, total


@_compiled
def _offer(
    states: Array, edges: Array, trust: Array, least: float, levels: int, begin: int, front: Array, scores: Array,
    heard: Array,
) -> int:  # fmt: skip
    """Put what may follow a node into the frontier, from `begin` on; returns the frontier's size.

    The last row of `front` is the node, its state and the length of its match, with its score. A context of length
    l is trusted with trust[l]; the rest goes to its next shorter suffix, and so on for `levels` that have anything
    to say.
    """
    size = begin
    node, state, length, score = front[-1, 0], front[-1, 2], front[-1, 3], scores[-1]
    while levels > 0 and state != ROOT:
        sure = score * trust[min(length, len(trust) - 1)]
        if sure < least:
            break
        count, total = _listen(states, edges, state, heard)
        for i in range(count):
            share, at = sure * heard[i, 2] / total, begin
            while at < size and front[at, 1] != heard[i, 0]:
                at += 1
            if at < size:
                scores[at] += share
            elif share >= least and size < len(front) - 1:
                front[size, 0], front[size, 1], front[size, 2], front[size, 3] = (
                    node,
                    heard[i, 0],
                    heard[i, 1],
                    length + 1,
                )
                scores[size] = share
                size += 1
        if count > 0:
            score -= sure
            levels -= 1
        state = states[state, _LINK]
        length = states[state, _LEN]
    return size


@_compiled
def _best_first(
    states: Array,
    edges: Array,
    trust: Array,
    state: int,
    length: int,
    depth: int,
    width: int,
    nodes: int,
    least: float,
) -> tuple[Array, Array]:
    """Nodes in the order of their scores: [n, 2] tokens and parents, [n] scores."""
    made = np.empty((nodes, 2), dtype=np.int64)
    likely = np.empty(nodes, dtype=np.float64)
    below = np.zeros((nodes + 1, 2), dtype=np.int64)  # children and depth; the root's are last
    front = np.empty((_FRONTIER + 1, 4), dtype=np.int64)  # parent, token, state, length of the match
    scores = np.empty(_FRONTIER + 1, dtype=np.float64)
    heard = np.empty((_SCAN, 3), dtype=np.int64)
    levels = _LEVELS if width > 1 else 1
    front[-1, 0], front[-1, 2], front[-1, 3], scores[-1] = -1, state, length, 1.0
    size, count = _offer(states, edges, trust, least, levels, 0, front, scores, heard), 0
    while size > 0 and count < nodes:
        best = scores[:size].argmax()
        front[-1], scores[-1] = front[best], scores[best]
        size -= 1
        front[best], scores[best] = front[size], scores[size]
        parent = front[-1, 0]
        if below[parent, 0] >= width:
            continue
        below[parent, 0] += 1
        below[count, 1] = below[parent, 1] + 1
        made[count, 0], made[count, 1], likely[count] = front[-1, 1], parent, scores[-1]
        front[-1, 0] = count
        if below[count, 1] < depth:
            size = _offer(states, edges, trust, least, levels, size, front, scores, heard)
        count += 1
    return made[:count], likely[:count]


class Automaton:
    """The substrings of texts, and what followed them.

        >>> automaton = Automaton()
        >>> end = automaton.extend(ROOT, [1, 2, 3, 1, 2])
        >>> automaton.match([9, 1, 2])[1], automaton.count([1, 2])
        (2, 2)

    reach: with each token the counts of so many of the longest suffixes of the text go up. Without a limit a
    text that goes in circles would cost more with every round; with it, short contexts count less there.
    """

    def __init__(self, reach: int = _REACH) -> None:
        self._reach = reach
        self._states = np.empty((64, 4), dtype=np.int32)
        self._edges = np.empty((64, 4), dtype=np.int32)
        self._slots = np.full(96, -1, dtype=np.int32)
        self._sizes = np.array([1, 0], dtype=np.int64)
        self._states[ROOT] = (0, -1, 0, -1)
        self.tokens = 0

    @property
    def bytes(self) -> int:
        """Memory of the arrays, spare room included."""
        return int(self._states.nbytes + self._edges.nbytes + self._slots.nbytes)

    def extend(self, end: int, tokens: Sequence[int] | Array) -> int:
        """Append tokens to the text that ends at state `end` (ROOT begins a text); returns its new end."""
        new = np.asarray(tokens, dtype=np.int64)
        self._states, self._edges, self._slots, end = _extend(
            self._states, self._edges, self._slots, self._sizes, end, new, self._reach
        )
        self.tokens += len(new)
        return int(end)

    def match(self, tokens: Sequence[int] | Array) -> tuple[int, int]:
        """The longest suffix of `tokens` that has been seen: its state and its length."""
        state, length = _match(self._states, self._edges, self._slots, np.asarray(tokens, dtype=np.int64))
        return int(state), int(length)

    def before(self, end: int) -> tuple[int, int]:
        """The longest suffix of the text that ends at `end` which was also seen elsewhere: state and length."""
        link = max(int(self._states[end, _LINK]), ROOT)
        return link, int(self._states[link, _LEN])

    def count(self, tokens: Sequence[int]) -> int:
        """How often `tokens` were seen (see `reach`)."""
        state, length = self.match(tokens)
        return int(self._states[state, _COUNT]) if length == len(tokens) else 0

    def continuations(
        self, state: int, length: int, trust: Array, limits: tuple[int, int, int], least: float
    ) -> tuple[list[int], list[int], list[float]]:
        """What may follow the last `length` tokens, which are at `state`: tokens, parents and scores of a tree.

        trust: how likely what follows a context of length l is among what followed it before. limits: depth,
        width, nodes. least: no node with a lower score.
        """
        nodes, scores = _best_first(self._states, self._edges, trust, state, length, *limits, least)
        tokens, parents = nodes.T.tolist()
        return tokens, parents, scores.tolist()
