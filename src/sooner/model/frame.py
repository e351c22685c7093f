"""All that one pass reads beside weights and lanes: its layout, and whole numbers in one buffer. Knows no model.

Sizes are rounded up to tiles, so that passes share few layouts and a GPU can record a pass once and replay it.
Padding is a copy: rows beyond the last are that row once more, write what it writes to the same place, and nobody
reads their result. A lane that is in reach but not in the step sees column 0 alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from sooner.core.step import Segment, Step
from sooner.core.tree import depths, is_chain
from sooner.model.lanes import LaneCache, round_columns

WORD = 32  # ancestors in one number
_ROW_GRAIN = 4  # heights are rounded up too: an odd last row goes through another bfloat16 kernel
_SHORT = 32  # segments up to this many rows always share a group
_TALLEST = 64  # coarse tiles double up to here; what is higher is a prompt, and comes in multiples of it
_WIDE = 256  # the least coarse tile of columns; later ones are a sixteenth of the next power of two


@dataclass(frozen=True, slots=True)
class Tiles:
    """What sizes are rounded up to. least: rows of a pass, and of its wanted rows. coarse: few sizes, for devices
    that record passes; otherwise what keeps the bits of a row on CPU."""

    least: int
    coarse: bool = False

    def rows(self, count: int) -> int:
        count = max(count, self.least)
        if not self.coarse:
            return count
        return _doubled(count) if count <= _TALLEST else _up(count, _TALLEST)

    def height(self, count: int, alone: bool) -> int:
        """Of a group; a segment alone is as high as the pass, so that nothing has to be gathered."""
        if not self.coarse:
            return _up(count, _ROW_GRAIN)
        return self.rows(count) if alone else max(_doubled(count), _ROW_GRAIN)

    def columns(self, count: int) -> int:
        return _up(count, max(_WIDE, _doubled(count) // 16)) if self.coarse else round_columns(count)

    def places(self, count: int) -> int:
        return _doubled(count) if self.coarse else count


@dataclass(frozen=True, slots=True)
class Group:
    """Segments that share one attention call, padded to `places` lanes of `height` rows over `columns` columns.

    lanes: from one to before another where they lie together (no copy of keys), None = by index.
    gathered: whether the rows of the pass have to be brought into the places. words: per row, numbers that
    name its ancestors; 0 where drafts are chains.
    """

    lanes: tuple[int, int] | None
    places: int
    height: int
    columns: int
    words: int
    gathered: bool = True

    @property
    def sizes(self) -> list[int]:
        """Of `index`, `rows`, `start`, `first`, `limit`, `position` and `above`, as Fields has them."""
        square = self.places * self.height
        index = self.places if self.lanes is None else 0
        return [index, square * self.gathered, self.places, self.places, square, square, square * self.words]


@dataclass(frozen=True, slots=True)
class Layout:
    """The sizes of one pass. rows, wanted: with padding. groups: see Group."""

    rows: int
    wanted: int
    groups: tuple[Group, ...]

    @property
    def small(self) -> bool:
        """Whether such passes come often: no prompts, and texts alone."""
        return self.rows <= _TALLEST and len(self.groups) == 1

    @property
    def direct(self) -> bool:
        """Whether row r of the pass is place r of its only group."""
        return len(self.groups) == 1 and self.groups[0].places == 1

    @property
    def sizes(self) -> list[int]:
        """Of tokens, positions, lanes, columns, `place`, wanted rows; then those of the groups."""
        ends = [*[self.rows] * 4, 0 if self.direct else self.rows, self.wanted]
        return [*ends, *chain.from_iterable(group.sizes for group in self.groups)]


@dataclass(frozen=True, slots=True)
class Frame:
    """One pass: `numbers` is int64, on the host, laid out by `layout`."""

    layout: Layout
    numbers: Tensor


def frame(step: Step, cache: LaneCache, wanted: Sequence[int], tiles: Tiles) -> Frame:
    """Reserve the step's columns and lay the pass out. wanted: the rows whose logits are asked for."""
    for segment in step.segments:
        cache.reserve(segment.lane, segment.start, segment.rows)
    count = len(step.tokens)
    rows = tiles.rows(count)
    groups: list[Group] = []
    numbers: list[list[int]] = []
    place = [0] * count
    base = 0
    for members in _similar(step):
        group, chosen = _group([step.segments[s] for s in members], cache, tiles, rows)
        offsets = {step.segments[s].lane: step.offsets[s] for s in members}
        numbers += _numbers(group, chosen, offsets)
        for g, (segment, real) in enumerate(chosen):
            if real:
                at, first = offsets[segment.lane], base + g * group.height
                place[at : at + segment.rows] = range(first, first + segment.rows)
        groups.append(group)
        base += group.places * group.height
    wanted = _padded(list(wanted), tiles.rows(len(wanted)) if len(wanted) else 0)
    layout = Layout(rows, len(wanted), tuple(groups))
    fields = (step.tokens, step.positions, step.lanes, step.columns)
    ends = [_padded(field.tolist(), rows) for field in fields]
    ends += [[] if layout.direct else _padded(place, rows), wanted]
    flat = array("q", chain.from_iterable((*ends, *numbers)))
    return Frame(layout, torch.frombuffer(flat, dtype=torch.int64))


def numbers_of(segments: Sequence[Segment], group: Group) -> Tensor:
    """The numbers of one group on its own, for whoever wants its masks alone."""
    lists = _numbers(group, [(segment, True) for segment in segments], {s.lane: 0 for s in segments})
    return torch.tensor(list(chain.from_iterable(lists)), dtype=torch.int64)


def _similar(step: Step) -> Iterable[list[int]]:
    """Segments grouped by height: the short ones together, long ones with those within a factor of two."""
    groups: dict[int, list[int]] = {}
    for s, segment in enumerate(step.segments):
        groups.setdefault(max(segment.rows, _SHORT).bit_length(), []).append(s)
    return groups.values()


def _group(
    segments: list[Segment], cache: LaneCache, tiles: Tiles, rows: int
) -> tuple[Group, list[tuple[Segment, bool]]]:
    """A group and what is in its places: a segment and True, or a stand-in and False."""
    by_lane = {segment.lane: segment for segment in segments}
    total = cache.store.shape[2]
    low, high = min(by_lane), max(by_lane) + 1
    together = high - low <= 2 * len(by_lane)
    if together:
        places = min(tiles.places(high - low), total)
        low = min(low, total - places)
        lanes = list(range(low, low + places))
    else:
        lanes = _padded(sorted(by_lane), tiles.places(len(by_lane)))
    idle = Segment(lane=0, start=0, certain=(0,), law=False)
    first = {lane: g for g, lane in reversed(list(enumerate(lanes)))}  # a lane that pads is there once more
    chosen = [(by_lane[n], True) if n in by_lane and first[n] == g else (idle, False) for g, n in enumerate(lanes)]
    height = tiles.height(max(segment.rows for segment in segments), alone=len(lanes) == 1)
    columns = tiles.columns(max(segment.start + segment.rows for segment in segments))
    return Group(
        (low, low + len(lanes)) if together else None,
        len(lanes),
        height,
        min(columns, cache.capacity),
        words=_words(segments, height if tiles.coarse and height <= _TALLEST else 0),
        gathered=len(lanes) > 1 or height != rows,
    ), chosen


def _words(segments: Iterable[Segment], least: int) -> int:
    nodes = [len(s.draft) for s in segments if not is_chain(s.draft.parents)]
    return -(-max([least, *nodes]) // WORD)


def _numbers(group: Group, chosen: Sequence[tuple[Segment, bool]], offsets: dict[int, int]) -> list[list[int]]:
    """The numbers of a group, field by field, as in Group.sizes."""
    index = [segment.lane for segment, _ in chosen] if group.lanes is None else []
    rows: list[int] = []
    start: list[int] = []
    first: list[int] = []
    limit: list[int] = []
    position: list[int] = []
    above: list[int] = []
    for segment, real in chosen:
        if group.gathered:
            at = offsets[segment.lane] if real else 0
            rows += _padded(list(range(at, at + segment.rows)), group.height)
        begin = segment.start + len(segment.certain)
        straight = is_chain(segment.draft.parents)
        own = list(
            range(segment.start + 1, segment.start + 1 + (segment.rows if straight else len(segment.certain)))
        )
        limit += _padded(own + [begin] * (segment.rows - len(own)), group.height)
        where = [*range(segment.start, begin), *(segment.root + depth for depth in depths(segment.draft.parents))]
        position += _padded(where, group.height)
        start.append(segment.start)
        first.append(begin)
        above += _above(segment, straight, group)
    return [index, rows, start, first, limit, position, above]


def _above(segment: Segment, straight: bool, group: Group) -> list[int]:
    """[height, words]: bit i of a row's words is set where node i is its ancestor, or itself."""
    if not group.words:
        return []
    seen: list[int] = []
    for i, parent in enumerate(() if straight else segment.draft.parents):
        seen.append((seen[parent] if parent >= 0 else 0) | 1 << i)
    bits = _padded([0] * (segment.rows - len(seen)) + seen, group.height)
    return [row >> WORD * w & (1 << WORD) - 1 for row in bits for w in range(group.words)]


def _padded(values: list[int], length: int) -> list[int]:
    """The last one repeated."""
    return values + values[-1:] * (length - len(values))


def _up(count: int, grain: int) -> int:
    return -(-count // grain) * grain


def _doubled(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()
