"""Keys and values of a head's slots: a lane for each request, scratch columns for guesses. Knows no head.

Slots made of the target's features are settled by content; guesses lie in columns after the longest of the
batch and are never settled, so nothing of them is left for the next round.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sooner.heads.eagle import Attend
from sooner.model.lanes import LaneCache


class Slots:
    """Lanes of one layer."""

    def __init__(
        self, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.lanes = LaneCache(1, kv_heads, head_dim, dtype, device)
        self._share, self._kv_heads = heads // kv_heads, kv_heads

    def chunks(self, parts: Sequence[tuple[int, int, int]]) -> Attend:
        """Attention of rows that go on with lanes, (lane, first new slot, rows); each sees its lane up to it."""
        for lane, start, rows in parts:
            self.lanes.reserve(lane, start, rows)
        sizes = [rows for _, _, rows in parts]

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            pieces = zip(parts, *(torch.split(x, sizes) for x in (query, key, value)), strict=True)
            seen = [self._chunk(lane, start, q, k, v) for (lane, start, _), q, k, v in pieces]
            return seen[0] if len(seen) == 1 else torch.cat(seen)

        return attend

    def _chunk(self, lane: int, start: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        end = start + len(query)
        keys, values = self.lanes.store[0, 0, lane], self.lanes.store[0, 1, lane]
        keys[:, start:end] = key.transpose(0, 1)
        values[:, start:end] = value.transpose(0, 1)
        places = torch.arange(end, device=query.device)
        bias = torch.zeros((1, len(query), end), dtype=query.dtype, device=query.device)
        bias.masked_fill_(places > places[start:, None], -torch.inf)
        return self.attend(query[None], keys[None, :, :end], values[None, :, :end], bias)

    def scratch(self, lanes: Sequence[int], held: Sequence[int]) -> Scratch:
        """Room for guesses of several requests, which hold so many slots."""
        return Scratch(self, lanes, held)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        """query [R, Q, H, D], key and value [R, KV, C, D], bias [R, Q, C] -> [R * Q, H * D].

        Heads that share a key head become more rows of it, so keys are read once.
        """
        count, rows, heads, dim = query.shape
        q = query.view(count, rows, self._kv_heads, self._share, dim).permute(0, 2, 3, 1, 4)
        q = q.reshape(count, self._kv_heads, self._share * rows, dim)
        out = scaled_dot_product_attention(q, key, value, attn_mask=bias.repeat(1, self._share, 1)[:, None])
        out = out.view(count, self._kv_heads, self._share, rows, dim).permute(0, 3, 1, 2, 4)
        return out.reshape(count * rows, heads * dim)


class Scratch:
    """Guesses of R requests, a level at a time: columns after the longest lane, the same for all."""

    def __init__(self, slots: Slots, lanes: Sequence[int], held: Sequence[int]) -> None:
        self._slots, self._held = slots, held
        low, high = min(lanes), max(lanes) + 1
        together = list(lanes) == list(range(low, high))
        device = slots.lanes.store.device
        self._lanes: slice | Tensor = slice(low, high) if together else torch.tensor(lanes, device=device)
        self._numbers = list(lanes)
        self._start = self._end = max(held)
        store = slots.lanes.store
        bias = torch.zeros((len(lanes), self._start), dtype=store.dtype, device=device)
        for r, length in enumerate(held):
            bias[r, length:] = -torch.inf
        self._settled = bias[:, None]  # [R, 1, C]
        self._above: Tensor | None = None  # [R * B, scratch columns] of the last level: whom each row saw

    def level(self, beams: int, parents: Tensor) -> Attend:
        """Attention of the next `beams` rows of each request; parents: rows of the last level."""
        count = len(self._held)
        store = self._slots.lanes.store
        own = torch.full((beams, beams), -torch.inf, dtype=store.dtype, device=store.device)
        own.fill_diagonal_(0.0)
        own = own.repeat(count, 1)
        seen = own if self._above is None else torch.cat([self._above[parents], own], dim=1)
        self._above = seen
        start, self._end = self._end, self._end + beams
        for lane, length in zip(self._numbers, self._held, strict=True):
            self._slots.lanes.reserve(lane, length, self._end - length)
        bias = torch.cat([self._settled.expand(-1, beams, -1), seen.view(count, beams, -1)], dim=-1)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self._slots.lanes.store[0, 0], self._slots.lanes.store[0, 1]
            shape = (count, beams, key.shape[1], key.shape[2])
            keys[self._lanes, :, start : self._end] = key.view(shape).transpose(1, 2)
            values[self._lanes, :, start : self._end] = value.view(shape).transpose(1, 2)
            seen_keys, seen_values = keys[self._lanes, :, : self._end], values[self._lanes, :, : self._end]
            return self._slots.attend(query.view(count, beams, *query.shape[1:]), seen_keys, seen_values, bias)

        return attend
