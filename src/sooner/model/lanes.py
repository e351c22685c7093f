"""Keys and values of many requests, one lane each, keyed by content. Knows nothing of acceptance.

A lane holds a *settled* part (a prefix of its request's text) and after it a *staged* part (the rows
of the last pass). Nothing is rolled back: `settle` is told what the text is now, keeps the longest
prefix of it that the lane holds, moves the staged columns that belong to it into place, and forgets
the rest. Acceptance, rejection, abort, preemption and a step that failed half-way are all that call.

A lane that is closed may be remembered: it is as free as any, but until it is opened again its content can be had
back. So what recent requests left behind costs no memory beyond the lanes there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sooner.core.tree import EMPTY, ROOT, Draft, follow
from sooner.native.pages import Pages

_GRAIN = 64  # columns and lanes are allocated in multiples of these
_LANE_GRAIN = 4
_BLOCK = 512  # key columns that torch's CPU attention takes at a time


@dataclass(slots=True)
class _Lane:
    settled: list[int] = field(default_factory=list)
    staged: Draft = EMPTY


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
        self._pages = Pages((layers, 2, 0, kv_heads, 0, head_dim), dtype, device)
        self._lanes: dict[int, _Lane] = {}
        self._free: list[int] = []
        self._remembered: dict[int, tuple[str, list[int]]] = {}  # free lanes, the longest closed first
        self.most_bytes: int | None = None  # growth stays within, as long as what is needed does

    @property
    def store(self) -> Tensor:
        """The keys and values; another tensor whenever the cache has grown."""
        return self._pages.tensor

    @property
    def capacity(self) -> int:
        """Columns a lane has room for at the moment."""
        return self.store.shape[4]

    @property
    def in_use(self) -> int:
        """Open lanes."""
        return len(self._lanes)

    @property
    def span(self) -> int:
        """Lanes up to the highest open one."""
        return max(self._lanes, default=-1) + 1

    @property
    def bytes(self) -> int:
        """What the store takes."""
        return self.store.numel() * self.store.element_size()

    def bytes_for(self, lanes: int, columns: int) -> int:
        """What a store for so many lanes of so many tokens takes at least."""
        layers, two, _, heads, _, width = self.store.shape
        return layers * two * heads * width * self.store.element_size() * lanes * round_columns(columns)

    def open(self, other_than: int | None = None) -> int:
        """An empty lane, the lowest that is free, so that lanes in use lie close together; one whose content is
        remembered only where there is no other, the longest closed first."""
        if not self._free:
            self._grow(lanes=self.store.shape[2] + 1, columns=self.capacity)
        blank = [lane for lane in self._free if lane not in self._remembered]
        lane = min(blank) if blank else next(lane for lane in self._remembered if lane != other_than)
        return self._take(lane, [])

    def close(self, lane: int, scope: str | None = None) -> None:
        """Give a lane back. scope: remember its settled tokens for whoever may `reopen` it, None = nobody."""
        entry = self._lanes.pop(lane)
        self._free.append(lane)
        if scope is not None and entry.settled:
            self._remembered[lane] = (scope, entry.settled)

    def remembered(self, scope: str) -> list[int]:
        """Free lanes whose content is remembered in that scope."""
        return [lane for lane, (of, _) in self._remembered.items() if of == scope]

    def shared(self, lane: int, tokens: Sequence[int]) -> int:
        """How many tokens at the beginning of `tokens` the lane holds, be it open or remembered."""
        settled = self._lanes[lane].settled if lane in self._lanes else self._remembered[lane][1]
        return common_prefix(settled, tokens)

    def remembered_length(self, lane: int) -> int:
        """Tokens that a remembered lane holds."""
        return len(self._remembered[lane][1])

    def reopen(self, lane: int, length: int) -> int:
        """Open a remembered lane with the first `length` tokens it held; returns it."""
        return self._take(lane, self._remembered[lane][1][:length])

    def _take(self, lane: int, settled: list[int]) -> int:
        self._free.remove(lane)
        self._remembered.pop(lane, None)
        self._lanes[lane] = _Lane(settled)
        return lane

    def trim(self) -> None:
        """Give back what open lanes do not need, and all that is remembered."""
        self._remembered.clear()
        lanes = self.span
        columns = max((len(e.settled) + len(e.staged) for e in self._lanes.values()), default=0)
        columns = round_columns(columns) if columns else 0
        if lanes < self.store.shape[2] or columns < self.capacity:
            self._resize(lanes, min(columns, self.capacity))
            self._free = [lane for lane in self._free if lane < lanes]

    def gather(self) -> dict[int, int]:
        """Move open lanes to the lowest places; old -> new for those that moved."""
        moved: dict[int, int] = {}
        for new, old in enumerate(sorted(self._lanes)):
            if new != old:
                self._remembered.pop(new, None)
                length = len(self._lanes[old].settled) + len(self._lanes[old].staged)
                self.store[:, :, new, :, :length] = self.store[:, :, old, :, :length]
                self._lanes[new] = self._lanes.pop(old)
                self._free[self._free.index(new)] = old
                moved[old] = new
        return moved

    def fork(self, lane: int, length: int) -> int:
        """A new lane that holds the first `length` settled tokens of `lane`, which is open or remembered."""
        known = self._lanes[lane].settled if lane in self._lanes else self._remembered[lane][1]
        if length > len(known):
            raise ValueError(f"lane {lane} holds {len(known)} tokens, cannot fork {length}")
        if self._free == [lane]:
            return self.reopen(lane, length)
        new = self.open(other_than=lane)
        self.store[:, :, new, :, :length] = self.store[:, :, lane, :, :length]
        self._lanes[new].settled = known[:length]
        return new

    def reserve(self, lane: int, start: int, rows: int) -> None:
        """Make room for columns start to start + rows; what the lane held from `start` on is forgotten."""
        entry = self._lanes[lane]
        if start > len(entry.settled):
            raise ValueError(f"lane {lane} holds {len(entry.settled)} tokens, cannot go on from {start}")
        del entry.settled[start:]
        entry.staged = EMPTY
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
        same = common_prefix(entry.settled, tokens)
        if same < len(entry.settled):
            del entry.settled[same:]
        else:
            path = follow(entry.staged, tokens[same:])
            self._compact(lane, same, path)
            entry.settled += tokens[same : same + len(path)]
        entry.staged = EMPTY
        return len(entry.settled)

    def held(self, lane: int) -> tuple[int, ...]:
        """The settled tokens of a lane."""
        return tuple(self._lanes[lane].settled)

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        if not set(self._remembered) <= set(self._free):
            raise AssertionError(f"remembered {sorted(self._remembered)}, free {sorted(self._free)}")
        if set(self._lanes) & set(self._free) or len(self._lanes) + len(self._free) != self.store.shape[2]:
            raise AssertionError(f"lanes in use {sorted(self._lanes)}, free {sorted(self._free)}")
        for lane, entry in self._lanes.items():
            if len(entry.settled) + len(entry.staged) > self.capacity:
                raise AssertionError(f"lane {lane} claims more than its {self.capacity} columns")

    def _compact(self, lane: int, start: int, path: Sequence[int]) -> None:
        """Move the columns of the path's nodes to start, start + 1, ..."""
        for i, node in enumerate(path):  # no node moves onto one that is still to move: nodes rise, and node >= i
            if node != i:
                self.store[:, :, lane, :, start + i] = self.store[:, :, lane, :, start + node]

    def _grow(self, lanes: int, columns: int) -> None:
        """To so many lanes and columns, and some more where memory is not limited."""
        old = self.store
        if columns > self.capacity:
            columns = round_columns(columns)
        roomy = (
            lanes if lanes <= old.shape[2] else -(-lanes // _LANE_GRAIN) * _LANE_GRAIN,
            # Growing by a quarter at least keeps the copying linear in the length of the text.
            columns if columns <= self.capacity else round_columns(max(columns, self.capacity * 5 // 4)),
        )
        if self.most_bytes is None or self.bytes_for(*roomy) <= self.most_bytes:
            lanes, columns = roomy
        elif self.bytes_for(max(lanes, old.shape[2]), max(columns, self.capacity)) > self.most_bytes:
            one_more, wider = lanes > old.shape[2], columns > self.capacity
            self.trim()
            old = self.store
            lanes = old.shape[2] + one_more
            columns = columns if wider else self.capacity
        self._resize(lanes, columns)
        self._free += range(old.shape[2], lanes)

    def _resize(self, lanes: int, columns: int) -> None:
        """Another store with what has room in it. The old one goes layer by layer: both are never there whole."""
        old = self._pages
        layers, two, had, heads, held, width = old.tensor.shape
        new = Pages((layers, two, lanes, heads, columns, width), old.tensor.dtype, old.tensor.device)
        both, all_of = min(had, lanes), min(held, columns)
        try:
            for layer in range(layers):
                new.tensor[layer, :, :both, :, :all_of] = old.tensor[layer, :, :both, :, :all_of]
                old.give_back(layer)
            self._pages = new
        except BaseException:  # Ctrl-C half-way: some layers are gone, so no lane holds anything
            self._remembered.clear()
            for entry in self._lanes.values():
                entry.settled, entry.staged = [], EMPTY
            raise


def round_columns(count: int) -> int:
    """The next width of the key columns at which a row's bits are those at any other such width.

    A last block of 256 or 320 columns is summed in another order in bfloat16 (measured; one row in forty
    then differs in its last bit), so there are none: tests/model/test_columns.py.
    """
    width = -(-count // _GRAIN) * _GRAIN
    rest = width % _BLOCK
    return width - rest + 384 if rest in (256, 320) else width


def common_prefix(left: list[int], right: Sequence[int]) -> int:
    """How many tokens two texts have in common at their beginning."""
    length = min(len(left), len(right))
    if left[:length] == list(right[:length]):
        return length
    low, high = 0, length  # equal up to low, not up to high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if left[low:middle] == list(right[low:middle]) else (low, middle)
    return low


def staged_parents(certain: int, draft_parents: Sequence[int]) -> list[int]:
    """Parents of a segment's rows as `stage` wants them: the certain tokens a chain, the draft below it."""
    chain = list(range(ROOT, certain - 1))
    return chain + [certain - 1 if parent == ROOT else certain + parent for parent in draft_parents]
