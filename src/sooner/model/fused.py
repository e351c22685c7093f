"""Our own decoder for Llama-shaped families: fewer, larger operations than the modules. Knows no requests.

The weights, rotary embedding and configuration are those of the transformers model it is made from; Q, K
and V become one product, gate and up another. What differs between the families is data in `Block`.
Held to `HFModel` by tests/model/test_fused.py.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sooner.core.step import Step
from sooner.errors import ModelError
from sooner.model import attention, frame
from sooner.model.decoder import Modules, Norm, Parts, Weights
from sooner.model.frame import Tiles
from sooner.model.graphs import Graphs, Recorder, graphs_for
from sooner.model.hf import context_limit
from sooner.model.lanes import LaneCache, staged_parents
from sooner.model.linear import Dense, Linear, pack
from sooner.model.protocol import Ends, Output

# A single bfloat16 row is rounded otherwise than several (see Linear), and packed products of one to three
# rows take longer than of four (measured: 31 ms a pass against 26 ms).
_EXACT = Tiles(least=4)
COARSE = Tiles(least=8, coarse=True)


Block = Parts[Linear]


class FusedModel:
    """A Model for the families in FAMILIES. `module` is emptied: its weights move here, layer by layer.

    quantize: "int8", or "int4" for all but the LM head, which int4 would cost most and stays at int8.
    tiles, recorder: what passes are padded to and recorded with; those of the device by default.
    """

    def __init__(
        self,
        module: Any,
        quantize: str | None = None,
        *,
        tiles: Tiles | None = None,
        recorder: Callable[[], Recorder] | None = None,
    ) -> None:
        source = Modules(module)
        self._shape, self._embed = source.shape, source.embed
        shape = source.shape
        self.vocab_size = shape.vocab
        self.context_limit = context_limit(shape.config)
        self.device = shape.device
        self._blocks = []
        for i in range(shape.layers):
            self._blocks.append(_block(source.parts(i), quantize))
            source.drop(i)
        self._head = pack(source.head.weights, source.head.biases, quantize and "int8")
        self._tied = source.tied
        self._turned = {block.rotary for block in self._blocks if block.rotary is not None}
        self.lanes = LaneCache(shape.layers, shape.kv_heads, shape.dim, shape.dtype, self.device)
        self._tiles = tiles or (_EXACT if self.device.type == "cpu" else COARSE)
        self._recorder = recorder or graphs_for(self.device)
        self._passes = Graphs(self._recorder)

    @torch.no_grad()
    def forward(self, step: Step, *, rows: Tensor, taps: Sequence[int] = ()) -> Output:
        """One pass; see Model.forward."""
        made = frame.frame(step, self.lanes, rows.tolist(), self._tiles)
        layout, store, tapped = made.layout, self.lanes.store, tuple(taps)

        def body(numbers: Tensor) -> tuple[Tensor, ...]:
            return self._pass(attention.spread(layout, numbers, store), tapped)

        logits, *features = self._passes.run((layout, tapped) if layout.small else None, store, made.numbers, body)
        for segment in step.segments:
            tokens = segment.certain + segment.draft.tokens
            self.lanes.stage(segment.lane, tokens, staged_parents(len(segment.certain), segment.draft.parents))
        return Output(logits[: len(rows)], features[0][: len(step.tokens)] if taps else None)

    def _pass(self, now: attention.Plan, taps: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Logits of the wanted rows, and features where there are taps: a function of the plan's tensors alone, of
        shapes that its layout fixes, which reads nothing back. So a device can record it."""
        x = self._embed(now.tokens)
        tables = self._tables(x, now.positions)
        seen: dict[int, Tensor] = {}
        for layer, block in enumerate(self._blocks):
            if layer in taps:
                seen[layer] = x
            x = self._layer(block, layer, x, now, tables)
        if len(self._blocks) in taps:
            seen[len(self._blocks)] = self._shape.norm(x)
        logits = self._head(self._shape.norm(x[now.wanted]))
        if self._shape.softcap is not None:
            logits = torch.tanh(logits / self._shape.softcap) * self._shape.softcap
        return (logits, torch.stack([seen[tap] for tap in taps], dim=1)) if taps else (logits,)

    def ends(self) -> Ends:
        """What draft heads share with this model."""
        embedding: Tensor = self._embed.weight.detach()

        def unpacked() -> Tensor:
            if self._tied:
                return embedding
            if not isinstance(self._head, Dense):
                raise ModelError("the LM head is quantised; a head is trained from weights that are not.")
            weight: Tensor = self._head.weight.to_dense() if self._head.packed else self._head.weight
            return weight

        return Ends(embedding, self._shape.norm.weight, self._head, unpacked)

    def _layer(
        self, block: Block, layer: int, x: Tensor, now: attention.Plan, tables: dict[str, tuple[Tensor, Tensor]]
    ) -> Tensor:
        h = x if block.before_attention is None else block.before_attention(x)
        q, k, v = self._split(block, block.qkv(h))
        if block.rotary is not None:
            q, k = _rotate(q, k, *tables[block.rotary])
        h = attention.attend(
            now, layer, q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1),
            scale=block.scale, window=block.window, softcap=block.softcap,
        )  # fmt: skip
        h = block.out(h.reshape(len(x), -1))
        x = x + (h if block.after_attention is None else block.after_attention(h))
        h = x if block.before_mlp is None else block.before_mlp(x)
        gate, up = block.gate_up(h).chunk(2, dim=-1)
        h = block.down(self._shape.act(gate) * up)
        return x + (h if block.after_mlp is None else block.after_mlp(h))

    def _split(self, block: Block, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[N, (H + 2 KV) * D] -> [N, H, D], [N, KV, D], [N, KV, D], head norms applied."""
        sizes = [
            self._shape.heads * self._shape.dim,
            self._shape.kv_heads * self._shape.dim,
            self._shape.kv_heads * self._shape.dim,
        ]
        q, k, v = torch.split(qkv, sizes, dim=-1)
        q, k = (_head_norm(block.q_norm, q, self._shape.dim), _head_norm(block.k_norm, k, self._shape.dim))
        return q, k, v.view(len(v), self._shape.kv_heads, self._shape.dim)

    def _tables(self, x: Tensor, positions: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Cosines and sines [N, 1, D'] of each kind of layer."""
        made = self._shape.tables(x, positions, self._turned)
        return {kind: (cos[:, None], sin[:, None]) for kind, (cos, sin) in made.items()}

    def first_layers(self, count: int) -> FusedModel:
        """The first `count` layers, the final norm and the head, on the same weights, with lanes of its own."""
        early, shape = copy.copy(self), self._shape
        early._blocks = self._blocks[:count]
        early.lanes = LaneCache(count, shape.kv_heads, shape.dim, shape.dtype, self.device)
        early._passes = Graphs(self._recorder)
        return early


def _block(parts: Parts[Weights], quantize: str | None) -> Block:
    fields = {f.name: getattr(parts, f.name) for f in dataclasses.fields(parts)}
    maps = {name: pack(w.weights, w.biases, quantize) for name, w in fields.items() if isinstance(w, Weights)}
    return Block(**fields | maps)


def _head_norm(norm: Norm | None, x: Tensor, dim: int) -> Tensor:
    """x [N, heads * D] -> [N, heads, D], normalised by head or over all heads, as wide as the norm is."""
    if norm is not None and norm.weight.shape[0] != dim:
        x = norm(x)
    x = x.view(len(x), -1, dim)
    return norm(x) if norm is not None and norm.weight.shape[0] == dim else x


def _rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary embedding of q and k [N, heads, D]; tables narrower than D leave the rest of a head alone."""
    both = torch.cat([q, k], dim=1)
    width = cos.shape[-1]
    turned, rest = both[..., :width], both[..., width:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat([-second, first], dim=-1) * sin
    both = torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned
    return both[:, : q.shape[1]], both[:, q.shape[1] :]
