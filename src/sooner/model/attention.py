"""Who sees whom in a step, and one masked attention call over the lanes. Knows no model family.

A row sees the settled columns of its lane, the certain tokens up to itself, and its own ancestors.
Segments of similar height share one padded call; a long prompt chunk does not pad the decoding rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sooner.core.step import Segment, Step
from sooner.core.tree import ancestors, is_chain
from sooner.model.lanes import LaneCache, round_columns

_ROW_GRAIN = 4  # heights are rounded up too: an odd last row goes through another bfloat16 kernel
_SHORT = 32  # segments up to this many rows always share a group


@dataclass(frozen=True, slots=True)
class Visible:
    """mask: bool [G, Q, C], true where a row sees a column. distance: int64 [G, Q, C], position of the
    row minus position of the column, for sliding windows."""

    mask: Tensor
    distance: Tensor


@dataclass(slots=True)
class Group:
    """Segments that share one attention call.

    lanes: a slice when they lie together (no copy of keys), else an index.
    rows: int64 [G, Q], the step's row in each place; padding repeats a row of the step.
    flat: places of the group in the padded layout that are real, with `owner` the rows they are; slices
        where they lie together (a single request), else int64.
    """

    lanes: slice | Tensor
    rows: Tensor
    flat: slice | Tensor
    owner: slice | Tensor
    visible: Visible
    biases: dict[tuple[int | None, int, torch.dtype], Tensor] = field(default_factory=dict)

    def bias(self, window: int | None, repeat: int, dtype: torch.dtype) -> Tensor:
        """Additive mask [G, 1, repeat * Q, C], made once a step for each kind of layer."""
        wanted = (window, repeat, dtype)
        if wanted not in self.biases:
            mask = self.visible.mask
            if window is not None:
                mask = mask & (self.visible.distance < window)
            bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
            self.biases[wanted] = bias.repeat(1, repeat, 1)[:, None]
        return self.biases[wanted]


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything the attention layers of one pass need; built once, before the first layer.

    rows: how many rows the step has. lanes, columns: where each row's keys and values go, int64 [N].
    """

    cache: LaneCache
    rows: int
    lanes: Tensor
    columns: Tensor
    groups: tuple[Group, ...]


def plan(step: Step, cache: LaneCache) -> Plan:
    """Reserve the step's columns and work out masks and groups, on the cache's device."""
    for segment in step.segments:
        cache.reserve(segment.lane, segment.start, segment.rows)
    device = cache.store.device
    groups = tuple(
        _group([step.segments[s] for s in members], [step.offsets[s] for s in members], cache)
        for members in _similar(step)
    )
    return Plan(cache, len(step.tokens), step.lanes.to(device), step.columns.to(device), groups)


def visible(segments: list[Segment], height: int, columns: int) -> Visible:
    """Masks of segments padded to `height` rows, over `columns` columns; CPU tensors.

    A padding row sees column 0 alone: its result is thrown away, but must not be NaN.
    """
    mask = torch.zeros((len(segments), height, columns), dtype=torch.bool)
    distance = torch.zeros((len(segments), height, columns), dtype=torch.int64)
    every = torch.arange(columns)
    for s, segment in enumerate(segments):
        own = torch.arange(segment.start, segment.start + segment.rows)
        mask[s, : segment.rows] = every <= own[:, None]
        distance[s, : segment.rows] = own[:, None] - every
        if not is_chain(segment.draft.parents):
            _tree(mask[s], distance[s], segment)
        mask[s, segment.rows :, 0] = True
    return Visible(mask, distance)


def _tree(mask: Tensor, distance: Tensor, segment: Segment) -> None:
    """Rewrite the rows of a tree's nodes: their columns are not their positions."""
    above = ancestors(segment.draft.parents)
    depth = above.sum(-1)
    certain, total = len(segment.certain), segment.rows
    first = segment.start + certain
    mask[certain:total, first : first + len(above)] = above
    position = segment.root + depth
    distance[certain:total, :first] = position[:, None] - torch.arange(first)
    distance[certain:total, first : first + len(above)] = position[:, None] - position


def _similar(step: Step) -> Iterable[list[int]]:
    """Segments grouped by height: the short ones together, long ones with those within a factor of two."""
    groups: dict[int, list[int]] = {}
    for s, segment in enumerate(step.segments):
        groups.setdefault(max(segment.rows, _SHORT).bit_length(), []).append(s)
    return groups.values()


def _group(segments: list[Segment], offsets: list[int], cache: LaneCache) -> Group:
    by_lane = {segment.lane: (segment, offset) for segment, offset in zip(segments, offsets, strict=True)}
    low, high = min(by_lane), max(by_lane) + 1
    together = high - low <= 2 * len(by_lane)
    height = -(-max(segment.rows for segment in segments) // _ROW_GRAIN) * _ROW_GRAIN
    columns = round_columns(max(segment.start + segment.rows for segment in segments))
    places = list(range(low, high)) if together else sorted(by_lane)
    idle = Segment(lane=0, start=0, certain=(0,), law=False)  # a lane in the slice that is not in the group
    chosen = [by_lane.get(lane, (idle, -1)) for lane in places]
    rows = torch.zeros((len(places), height), dtype=torch.int64)
    flat: list[int] = []
    owner: list[int] = []
    for g, (segment, offset) in enumerate(chosen):
        if offset >= 0:
            rows[g, : segment.rows] = torch.arange(offset, offset + segment.rows)
            flat += range(g * height, g * height + segment.rows)
            owner += range(offset, offset + segment.rows)
    seen = visible([segment for segment, _ in chosen], height, columns)
    device = cache.store.device
    return Group(
        slice(low, high) if together else torch.tensor(places, device=device),
        rows.to(device),
        _compact(flat, device),
        _compact(owner, device),
        Visible(seen.mask.to(device), seen.distance.to(device)),
    )


def _compact(places: list[int], device: torch.device) -> slice | Tensor:
    """Places as a slice where they are one run: a view then, not a copy."""
    if places == list(range(places[0], places[0] + len(places))):
        return slice(places[0], places[0] + len(places))
    return torch.tensor(places, device=device)


def attend(
    now: Plan,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Write the step's keys and values into their columns, then attend over the lanes.

    query [H, N, D]; key, value [KV, N, D] with H a multiple of KV; returns [N, H, D]. Rows from
    now.rows on are padding: nothing is stored for them and their result is zero.
    """
    keys, values = now.cache.store[layer, 0], now.cache.store[layer, 1]
    keys[now.lanes, :, now.columns] = key[:, : now.rows].transpose(0, 1).to(keys.dtype)
    values[now.lanes, :, now.columns] = value[:, : now.rows].transpose(0, 1).to(values.dtype)
    out = query.new_zeros((query.shape[1], query.shape[0], value.shape[-1]))
    for group in now.groups:
        out[group.owner] = _attend_group(group, query, keys, values, scale, window, softcap)
    return out


def _attend_group(
    group: Group,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Result of the group's real rows, [len(owner), H, D].

    The heads that share a key head are laid out as more rows of it, so keys are read once.
    """
    heads, kv_heads = query.shape[0], keys.shape[1]
    share = heads // kv_heads
    places, height = group.rows.shape
    columns = group.visible.mask.shape[-1]
    k, v = keys[group.lanes, :, :columns], values[group.lanes, :, :columns]
    q = query[:, group.rows.reshape(-1)].view(kv_heads, share, places, height, -1)
    q = q.permute(2, 0, 1, 3, 4).reshape(places, kv_heads, share * height, -1)
    bias = group.bias(window, share, q.dtype)
    if softcap is None:
        out = scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
    else:
        scores = softcap * torch.tanh((q @ k.transpose(-1, -2)).float() * scale / softcap)
        out = (scores + bias).softmax(dim=-1).to(v.dtype) @ v
    out = out.view(places, kv_heads, share, height, -1).permute(0, 3, 1, 2, 4)
    return out.reshape(places * height, heads, -1)[group.flat]
