"""Our own decoder for Llama-shaped families: fewer, larger operations than the modules. Knows no requests.

The weights, rotary embedding and configuration are those of the transformers model it is made from; Q, K
and V become one product, gate and up another. What differs between the families is data in `Block`.
Held to `HFModel` by tests/model/test_fused.py.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sooner.core.step import Step
from sooner.errors import ModelError
from sooner.model import attention
from sooner.model.hf import context_limit, pad_rows
from sooner.model.lanes import LaneCache, staged_parents
from sooner.model.linear import Dense, Linear, pack
from sooner.model.protocol import Ends, Output

# A single bfloat16 row is rounded otherwise than several (see Linear), and packed products of one to three
# rows take longer than of four (measured: 31 ms a pass against 26 ms).
_LEAST_ROWS = 4

FAMILIES = frozenset(
    {
        "gemma",
        "gemma2",
        "gemma3_text",
        "llama",
        "ministral",
        "mistral",
        "olmo2",
        "phi3",
        "qwen2",
        "qwen3",
        "smollm3",
    }
)


@dataclass(frozen=True, slots=True)
class Norm:
    """Root-mean-square norm; `weight` is what the normalised input is multiplied by (Gemma's 1 is added in)."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        # Seven operations; torch.rms_norm takes twice the time on CPU (measured: 50 us against 25).
        wide = x.float()
        scale = wide.square().mean(-1, keepdim=True).add_(self.eps).rsqrt_()
        return wide.mul_(scale).mul_(self.weight).to(x.dtype) if wide is not x else x * scale * self.weight


@dataclass(frozen=True, slots=True)
class Block:
    """One layer. Norms that a family does not have are None; head norms act on each head or on all at once.

    rotary: which of the pass's rotary tables it uses, None for no rotation. window: sliding attention.
    """

    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear
    before_attention: Norm | None
    after_attention: Norm | None
    before_mlp: Norm | None
    after_mlp: Norm | None
    q_norm: Norm | None
    k_norm: Norm | None
    rotary: str | None
    window: int | None
    scale: float
    softcap: float | None


class FusedModel:
    """A Model for the families in FAMILIES. `module` is emptied: its weights move here, layer by layer.

    quantize: "int8", or "int4" for all but the LM head, which int4 would cost most and stays at int8.
    """

    def __init__(self, module: Any, quantize: str | None = None) -> None:
        config = module.config
        body = module.model
        mlp = body.layers[0].mlp
        self.vocab_size = int(module.get_output_embeddings().weight.shape[0])
        self.context_limit = context_limit(config)
        self.device = body.embed_tokens.weight.device
        self._heads = int(config.num_attention_heads)
        self._kv_heads = int(config.num_key_value_heads)
        self._dim = int(getattr(config, "head_dim", None) or config.hidden_size // self._heads)
        self._softcap = getattr(config, "final_logit_softcapping", None)
        self._embed = body.embed_tokens
        self._rotary = body.rotary_emb
        self._norm = _norm(body.norm)
        self._act: nn.Module = getattr(mlp, "act_fn", None) or mlp.activation_fn
        self._kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(body.layers)
        # Gemma-3 turns its local and its global layers by different bases: one table for each kind.
        self._per_kind = isinstance(getattr(self._rotary, "rope_type", None), dict)
        self._blocks = []
        for i in range(len(body.layers)):
            self._blocks.append(self._block(config, body.layers[i], self._kinds[i], quantize))
            body.layers[i] = nn.Identity()
        self._head = pack(
            [module.get_output_embeddings().weight], [getattr(module.lm_head, "bias", None)], quantize and "int8"
        )
        self._tied = module.get_output_embeddings().weight is self._embed.weight
        self.lanes = LaneCache(len(self._blocks), self._kv_heads, self._dim, self._embed.weight.dtype, self.device)

    @torch.no_grad()
    def forward(self, step: Step, *, rows: Tensor, taps: Sequence[int] = ()) -> Output:
        """One pass; see Model.forward."""
        now = attention.plan(step, self.lanes)
        count = len(step.tokens)
        x = self._embed(pad_rows(step.tokens, _LEAST_ROWS).to(self.device))
        tables = self._tables(x, pad_rows(step.positions, _LEAST_ROWS).to(self.device))
        seen: dict[int, Tensor] = {}
        for layer, block in enumerate(self._blocks):
            if layer in taps:
                seen[layer] = x[:count]
            x = self._layer(block, layer, x, now, tables)
        if taps and len(self._blocks) in taps:
            seen[len(self._blocks)] = self._norm(x[:count])
        wanted = pad_rows(rows, _LEAST_ROWS if len(rows) else 0).to(self.device)
        logits = self._head(self._norm(x[wanted]))[: len(rows)]
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        for segment in step.segments:
            tokens = segment.certain + segment.draft.tokens
            self.lanes.stage(segment.lane, tokens, staged_parents(len(segment.certain), segment.draft.parents))
        return Output(logits, torch.stack([seen[tap] for tap in taps], dim=1) if taps else None)

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

        return Ends(embedding, self._norm.weight, self._head, unpacked)

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
        h = block.down(self._act(gate) * up)
        return x + (h if block.after_mlp is None else block.after_mlp(h))

    def _split(self, block: Block, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[N, (H + 2 KV) * D] -> [N, H, D], [N, KV, D], [N, KV, D], head norms applied."""
        sizes = [self._heads * self._dim, self._kv_heads * self._dim, self._kv_heads * self._dim]
        q, k, v = torch.split(qkv, sizes, dim=-1)
        q, k = (_head_norm(block.q_norm, q, self._dim), _head_norm(block.k_norm, k, self._dim))
        return q, k, v.view(len(v), self._kv_heads, self._dim)

    def _tables(self, x: Tensor, positions: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Cosines and sines [N, 1, D'] of each kind of layer."""
        made = {}
        for kind in {block.rotary for block in self._blocks if block.rotary is not None}:
            arguments = (x[None], positions[None], kind) if self._per_kind else (x[None], positions[None])
            cos, sin = self._rotary(*arguments)
            made[kind] = (cos[0, :, None].to(x.dtype), sin[0, :, None].to(x.dtype))
        return made

    def first_layers(self, count: int) -> FusedModel:
        """The first `count` layers, the final norm and the head, on the same weights, with lanes of its own."""
        early = copy.copy(self)
        early._blocks = self._blocks[:count]
        early.lanes = LaneCache(count, self._kv_heads, self._dim, self.lanes.store.dtype, self.device)
        return early

    def _block(self, config: Any, layer: Any, kind: str, quantize: str | None) -> Block:
        attn, mlp = layer.self_attn, layer.mlp
        qkv = [attn.qkv_proj] if hasattr(attn, "qkv_proj") else [attn.q_proj, attn.k_proj, attn.v_proj]
        gate_up = [mlp.gate_up_proj] if hasattr(mlp, "gate_up_proj") else [mlp.gate_proj, mlp.up_proj]
        norms = [_named_norm(layer, f"{name}_layernorm") for name in ("input", "post_attention")]
        feed = [_named_norm(layer, f"{name}_layernorm") for name in ("pre_feedforward", "post_feedforward")]
        # Without norms of its own around the MLP, the norm after attention is the one before the MLP.
        sandwich = feed[0] is not None or feed[1] is not None
        return Block(
            qkv=_linear(qkv, quantize),
            out=_linear([attn.o_proj], quantize),
            gate_up=_linear(gate_up, quantize),
            down=_linear([mlp.down_proj], quantize),
            before_attention=norms[0],
            after_attention=norms[1] if sandwich else None,
            before_mlp=feed[0] if sandwich else norms[1],
            after_mlp=feed[1],
            q_norm=_named_norm(attn, "q_norm"),
            k_norm=_named_norm(attn, "k_norm"),
            rotary=(kind if self._per_kind else "all") if getattr(attn, "use_rope", True) else None,
            window=_window(config, attn, kind),
            scale=float(attn.scaling),
            softcap=getattr(attn, "attn_logit_softcapping", None),
        )


def _window(config: Any, attn: Any, kind: str) -> int | None:
    """The sliding window of a layer: its own word where it has one, else the model's."""
    if hasattr(attn, "sliding_window"):
        return attn.sliding_window  # type: ignore[no-any-return]  # transformers is untyped here
    if getattr(config, "layer_types", None) and kind != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None)


def _linear(parts: list[Any], quantize: str | None) -> Linear:
    return pack([part.weight for part in parts], [part.bias for part in parts], quantize)


def _named_norm(module: Any, name: str) -> Norm | None:
    """A norm the family may not have."""
    found = getattr(module, name, None)
    return None if found is None else _norm(found)


def _norm(module: Any) -> Norm:
    eps = getattr(module, "variance_epsilon", None) or module.eps
    weight = module.weight.detach().float()
    return Norm(weight + 1 if type(module).__name__.startswith("Gemma") else weight, float(eps))


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
