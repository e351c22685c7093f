"""Keys and values of many requests, one lane each, keyed by content. Knows nothing of acceptance.

A lane holds a *settled* part (a prefix of its request's text) and after it a *staged* part (the rows
of the last pass). Nothing is rolled back: `settle` is told what the text is now, keeps the longest
prefix of it that the lane holds, moves the staged columns that belong to it into place, and forgets
the rest. Acceptance, rejection, abort, preemption and a step that failed half-way are all that call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from sooner.core.tree import ROOT, Draft, follow

_GRAIN = 64  # columns and lanes are allocated in multiples of these
_LANE_GRAIN = 4
_BLOCK = 512  # key columns that torch's CPU attention takes at a time


@dataclass(slots=True)
class _Lane:
    settled: list[int] = field(default_factory=list)
    staged: Draft = field(default_factory=Draft)


class LaneCache:
    """[layers, 2, lanes, kv_heads, capacity, head_dim]; lanes and capacity grow on demand.

    dtype, device: of the stored keys and values.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.store = torch.zeros((layers, 2, 0, kv_heads, 0, head_dim), dtype=dtype, device=device)
        self._lanes: dict[int, _Lane] = {}
        self._free: list[int] = []

    @property
    def capacity(self) -> int:
        """Columns a lane has room for at the moment."""
        return self.store.shape[4]

    @property
    def in_use(self) -> int:
        """Open lanes."""
        return len(self._lanes)

    def open(self) -> int:
        """An empty lane, the lowest that is free, so that lanes in use lie close together."""
        if not self._free:
            self._grow(lanes=self.store.shape[2] + 1, columns=self.capacity)
        lane = min(self._free)
        self._free.remove(lane)
        self._lanes[lane] = _Lane()
        return lane

    def close(self, lane: int) -> None:
        del self._lanes[lane]
        self._free.append(lane)

    def fork(self, lane: int, length: int) -> int:
        """A new lane that holds the first `length` settled tokens of `lane`."""
        known = self._lanes[lane].settled
        if length > len(known):
            raise ValueError(f"lane {lane} holds {len(known)} tokens, cannot fork {length}")
        new = self.open()
        self.store[:, :, new, :, :length] = self.store[:, :, lane, :, :length]
        self._lanes[new].settled = known[:length]
        return new

    def reserve(self, lane: int, start: int, rows: int) -> None:
        """Make room for columns start to start + rows; what the lane held from `start` on is forgotten."""
        entry = self._lanes[lane]
        if start > len(entry.settled):
            raise ValueError(f"lane {lane} holds {len(entry.settled)} tokens, cannot go on from {start}")
        del entry.settled[start:]
        entry.staged = Draft()
        if start + rows > self.capacity:
            self._grow(lanes=self.store.shape[2], columns=start + rows)

    def stage(self, lane: int, tokens: Sequence[int], parents: Sequence[int]) -> None:
        """Say that the columns after the settled part now hold these tokens; the length does not move.

        parents: as in Draft, -1 = the last settled token. Call it only when keys and values are written.
        """
        self._lanes[lane].staged = Draft(tuple(tokens), tuple(parents))

    def settle(self, lane: int, tokens: Sequence[int]) -> int:
        """Make the lane hold the longest known prefix of `tokens`; return its length."""
        entry = self._lanes[lane]
        same = _common_prefix(entry.settled, list(tokens))
        if same < len(entry.settled):
            del entry.settled[same:]
        else:
            path = follow(entry.staged, tokens[same:])
            self._compact(lane, same, path)
            entry.settled += tokens[same : same + len(path)]
        entry.staged = Draft()
        return len(entry.settled)

    def held(self, lane: int) -> tuple[int, ...]:
        """The settled tokens of a lane."""
        return tuple(self._lanes[lane].settled)

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        if set(self._lanes) & set(self._free) or len(self._lanes) + len(self._free) != self.store.shape[2]:
            raise AssertionError(f"lanes in use {sorted(self._lanes)}, free {sorted(self._free)}")
        for lane, entry in self._lanes.items():
            if len(entry.settled) + len(entry.staged) > self.capacity:
                raise AssertionError(f"lane {lane} claims more than its {self.capacity} columns")

    def _compact(self, lane: int, start: int, path: Sequence[int]) -> None:
        """Move the columns of the path's nodes to start, start + 1, ..."""
        moved = next((i for i, node in enumerate(path) if node != i), len(path))
        if moved < len(path):
            source = torch.tensor([start + node for node in path[moved:]], device=self.store.device)
            columns = self.store[:, :, lane, :, source]
            self.store[:, :, lane, :, start + moved : start + len(path)] = columns

    def _grow(self, lanes: int, columns: int) -> None:
        old = self.store
        lanes = old.shape[2] if lanes <= old.shape[2] else -(-lanes // _LANE_GRAIN) * _LANE_GRAIN
        if columns > old.shape[4]:
            # Growing by a quarter at least keeps the copying linear in the length of the text.
            columns = round_columns(max(columns, old.shape[4] * 5 // 4))
        new = old.new_zeros((*old.shape[:2], lanes, old.shape[3], columns, old.shape[5]))
        new[:, :, : old.shape[2], :, : old.shape[4]] = old
        self.store = new
        self._free += range(old.shape[2], lanes)


def round_columns(count: int) -> int:
    """The next width of the key columns at which a row's bits are those at any other such width.

    A last block of 256 or 320 columns is summed in another order in bfloat16 (measured; one row in forty
    then differs in its last bit), so there are none: tests/model/test_columns.py.
    """
    width = -(-count // _GRAIN) * _GRAIN
    rest = width % _BLOCK
    return width - rest + 384 if rest in (256, 320) else width


def _common_prefix(left: list[int], right: list[int]) -> int:
    length = min(len(left), len(right))
    if left[:length] == right[:length]:
        return length
    return next(i for i in range(length) if left[i] != right[i])


def staged_parents(certain: int, draft_parents: Sequence[int]) -> list[int]:
    """Parents of a segment's rows as `stage` wants them: the certain tokens a chain, the draft below it."""
    chain = list(range(ROOT, certain - 1))
    return chain + [certain - 1 if parent == ROOT else certain + parent for parent in draft_parents]
