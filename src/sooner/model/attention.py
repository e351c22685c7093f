"""Who sees whom in a step, and one masked attention call over the lanes. Knows no model family.

A row sees the settled columns of its lane, the certain tokens up to itself, and its own ancestors.
Segments of similar height share one padded call; a long prompt chunk does not pad the decoding rows.
Nothing here reads a number back from the device, and shapes are those of the layout alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sooner.core.host import moved
from sooner.core.step import Segment, Step
from sooner.core.tree import is_chain
from sooner.model import frame
from sooner.model.frame import WORD, Group, Layout, Tiles
from sooner.model.lanes import LaneCache


@dataclass(frozen=True, slots=True)
class Visible:
    """mask: bool [G, Q, C], true where a row sees a column. distance: int64 [G, Q, C], position of the
    row minus position of the column, for sliding windows."""

    mask: Tensor
    distance: Tensor


@dataclass(slots=True)
class Places:
    """The numbers of a group as tensors of the device; G lanes of Q rows.

    index: its lanes, int64 [G], where they are no slice. rows: [G * Q], the row of the pass in each place.
    start: [G, 1], the first column of the segment. first: [G, 1], that of its first node. limit: [G, Q, 1], a row
    sees all columns below. position: [G, Q]. above: [G, Q, words], the nodes a row sees as well.
    """

    group: Group
    index: Tensor
    rows: Tensor
    start: Tensor
    first: Tensor
    limit: Tensor
    position: Tensor
    above: Tensor
    mask: Tensor | None = None
    biases: dict[tuple[int | None, int, torch.dtype], Tensor] = field(default_factory=dict)

    @property
    def lanes(self) -> slice | Tensor:
        return self.index if self.group.lanes is None else slice(*self.group.lanes)

    def bias(self, window: int | None, repeat: int, dtype: torch.dtype) -> Tensor:
        """Additive mask [G, 1, repeat * Q, C], made once a pass for each kind of layer."""
        wanted = (window, repeat, dtype)
        if wanted not in self.biases:
            self.mask = seen(self) if self.mask is None else self.mask
            mask = self.mask if window is None else self.mask & (distance(self) < window)
            bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
            self.biases[wanted] = bias.repeat(1, repeat, 1)[:, None]
        return self.biases[wanted]


@dataclass(frozen=True, slots=True)
class Plan:
    """A frame as tensors of the device, and the keys and values it is about.

    lanes, columns: where each row's keys and values go, int64 [N]. wanted: rows whose logits are asked for.
    place: the place of each row in the groups, one after another; unused where the layout is direct.
    """

    layout: Layout
    store: Tensor
    tokens: Tensor
    positions: Tensor
    lanes: Tensor
    columns: Tensor
    place: Tensor
    wanted: Tensor
    groups: tuple[Places, ...]


def spread(layout: Layout, numbers: Tensor, store: Tensor) -> Plan:
    """Views of `numbers`, on the device of the store. Nothing is read back."""
    parts = iter(torch.split(numbers, layout.sizes))
    tokens, positions, lanes, columns, place, wanted = (next(parts) for _ in range(6))
    groups = []
    for group in layout.groups:
        index, rows, start, first, limit, position, above = (next(parts) for _ in range(7))
        groups.append(_places(group, index, rows, start, first, limit, position, above))
    return Plan(layout, store, tokens, positions, lanes, columns, place, wanted, tuple(groups))


def plan(step: Step, cache: LaneCache, wanted: Sequence[int], tiles: Tiles) -> Plan:
    """Reserve the step's columns and lay the pass out on the cache's device."""
    made = frame.frame(step, cache, wanted, tiles)
    return spread(made.layout, moved(made.numbers, cache.store.device), cache.store)


def visible(segments: Sequence[Segment], height: int, columns: int) -> Visible:
    """Masks of segments padded to `height` rows, over `columns` columns; CPU tensors. Rows beyond the last are
    that row once more."""
    nodes = [len(s.draft) for s in segments if not is_chain(s.draft.parents)]
    group = Group(
        (0, len(segments)), len(segments), height, columns, -(-max(nodes, default=0) // WORD), gathered=False
    )
    here = _places(group, *torch.split(frame.numbers_of(segments, group), group.sizes))
    return Visible(seen(here), distance(here))


def _places(
    group: Group, index: Tensor, rows: Tensor, start: Tensor, first: Tensor, limit: Tensor, position: Tensor,
    above: Tensor,
) -> Places:  # fmt: skip
    grid = (group.places, group.height)
    return Places(
        group, index, rows, start[:, None], first[:, None], limit.view(*grid, 1), position.view(grid),
        above.view(*grid, group.words),
    )  # fmt: skip


def seen(here: Places) -> Tensor:
    """bool [G, Q, C]: the columns below a row's limit, and those of the nodes above it."""
    group = here.group
    columns = torch.arange(group.columns, device=here.limit.device)
    mask = columns < here.limit
    if not group.words:
        return mask
    node = columns - here.first  # [G, C]
    inside = (node >= 0) & (node < WORD * group.words)
    node = node.clamp(0, WORD * group.words - 1)
    bits = here.above
    if group.words > 1:
        bits = bits.gather(2, (node // WORD)[:, None].expand(-1, group.height, -1))
    return mask | ((bits >> (node % WORD)[:, None] & 1).bool() & inside[:, None])


def distance(here: Places) -> Tensor:
    """int64 [G, Q, C]: a column's position is its number, but for those of the segment's own rows."""
    columns = torch.arange(here.group.columns, device=here.limit.device)
    own = columns - here.start
    inside = (own >= 0) & (own < here.group.height)
    at = torch.where(inside, here.position.gather(1, own.clamp(0, here.group.height - 1)), columns)
    return here.position[:, :, None] - at[:, None]


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
    """Write the rows' keys and values into their columns, then attend over the lanes.

    query [H, N, D]; key, value [KV, N, D] with H a multiple of KV; returns [N, H, D].
    """
    keys, values = now.store[layer, 0], now.store[layer, 1]
    keys[now.lanes, :, now.columns] = key.transpose(0, 1).to(keys.dtype)
    values[now.lanes, :, now.columns] = value.transpose(0, 1).to(values.dtype)
    found = [_attend_group(group, query, keys, values, scale, window, softcap) for group in now.groups]
    if now.layout.direct:
        return found[0][: now.layout.rows]
    return (found[0] if len(found) == 1 else torch.cat(found))[now.place]


def _attend_group(
    here: Places,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Result of every place of the group, [places * height, H, D].

    The heads that share a key head are laid out as more rows of it, so keys are read once.
    """
    heads, kv_heads = query.shape[0], keys.shape[1]
    share = heads // kv_heads
    places, height, columns = here.group.places, here.group.height, here.group.columns
    k, v = keys[here.lanes, :, :columns], values[here.lanes, :, :columns]
    q = query[:, here.rows] if here.group.gathered else query
    q = q.view(kv_heads, share, places, height, -1)
    q = q.permute(2, 0, 1, 3, 4).reshape(places, kv_heads, share * height, -1)
    bias = here.bias(window, share, q.dtype)
    if softcap is None:
        out = scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
    else:
        scores = softcap * torch.tanh((q @ k.transpose(-1, -2)).float() * scale / softcap)
        out = (scores + bias).softmax(dim=-1).to(v.dtype) @ v
    out = out.view(places, kv_heads, share, height, -1).permute(0, 3, 1, 2, 4)
    return out.reshape(places * height, heads, -1)
