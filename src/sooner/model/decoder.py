"""The parts of a Llama-shaped transformers module, layer by layer. Knows no runtime.

What differs between the families is data here: which norms there are, which layers rotate, how far they see.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

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
class Weights:
    """Linear maps with the same input, to be stacked by output: weights [out, in] and biases, None where none."""

    weights: list[Tensor]
    biases: list[Tensor | None]

    def stacked(self) -> tuple[Tensor, Tensor | None]:
        """One weight [sum of out, in] and one bias."""
        weight = (
            torch.cat([w.detach() for w in self.weights]) if len(self.weights) > 1 else self.weights[0].detach()
        )
        given = [b.detach() for b in self.biases if b is not None]
        return weight, torch.cat(given) if given else None


Map = TypeVar("Map")


@dataclass(frozen=True)  # no slots: Python 3.11's slots and Generic clash
class Parts(Generic[Map]):
    """One layer, its linear maps as weights or as a runtime has packed them.

    Norms that a family does not have are None; head norms act on each head or on all at once.
    rotary: which rotary table it uses, None for no rotation. window: sliding attention.
    """

    qkv: Map
    out: Map
    gate_up: Map
    down: Map
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


class Shape:
    """What all layers of a module share: sizes, embedding, rotary tables, activation, final norm."""

    def __init__(self, module: Any) -> None:
        config, body = module.config, module.model
        mlp = body.layers[0].mlp
        self.config = config
        self.vocab = int(module.get_output_embeddings().weight.shape[0])
        self.hidden = int(config.hidden_size)
        self.heads = int(config.num_attention_heads)
        self.kv_heads = int(config.num_key_value_heads)
        self.dim = int(getattr(config, "head_dim", None) or config.hidden_size // self.heads)
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self.embed = body.embed_tokens
        self.act = getattr(mlp, "act_fn", None) or mlp.activation_fn
        self.norm = norm(body.norm)
        self.rotary = body.rotary_emb
        self.kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(body.layers)
        # Gemma-3 turns its local and its global layers by different bases: one table for each kind.
        self.per_kind = isinstance(getattr(self.rotary, "rope_type", None), dict)

    def parts(self, layer: Any, kind: str) -> Parts[Weights]:
        """The parts of one layer of the module."""
        attn, mlp = layer.self_attn, layer.mlp
        qkv = [attn.qkv_proj] if hasattr(attn, "qkv_proj") else [attn.q_proj, attn.k_proj, attn.v_proj]
        gate_up = [mlp.gate_up_proj] if hasattr(mlp, "gate_up_proj") else [mlp.gate_proj, mlp.up_proj]
        norms = [_named_norm(layer, f"{name}_layernorm") for name in ("input", "post_attention")]
        feed = [_named_norm(layer, f"{name}_layernorm") for name in ("pre_feedforward", "post_feedforward")]
        # Without norms of its own around the MLP, the norm after attention is the one before the MLP.
        sandwich = feed[0] is not None or feed[1] is not None
        return Parts(
            qkv=_weights(qkv),
            out=_weights([attn.o_proj]),
            gate_up=_weights(gate_up),
            down=_weights([mlp.down_proj]),
            before_attention=norms[0],
            after_attention=norms[1] if sandwich else None,
            before_mlp=feed[0] if sandwich else norms[1],
            after_mlp=feed[1],
            q_norm=_named_norm(attn, "q_norm"),
            k_norm=_named_norm(attn, "k_norm"),
            rotary=(kind if self.per_kind else "all") if getattr(attn, "use_rope", True) else None,
            window=_window(self.config, attn, kind),
            scale=float(attn.scaling),
            softcap=getattr(attn, "attn_logit_softcapping", None),
        )

    def tables(self, x: Tensor, positions: Tensor, kinds: set[str]) -> dict[str, tuple[Tensor, Tensor]]:
        """Cosines and sines [N, D'] of each kind of layer, in the dtype of x [N, H]."""
        made = {}
        for kind in kinds:
            arguments = (x[None], positions[None], kind) if self.per_kind else (x[None], positions[None])
            cos, sin = self.rotary(*arguments)
            made[kind] = (cos[0].to(x.dtype), sin[0].to(x.dtype))
        return made


def scaled_elsewhere(module: Any) -> bool:
    """Whether the body's forward scales the embeddings, which our decoders would not see: Gemma in transformers
    before 5.4."""
    family = str(module.config.model_type)
    return family.startswith("gemma") and not hasattr(module.model.embed_tokens, "embed_scale")


def norm(module: Any) -> Norm:
    """A transformers RMS norm as data."""
    eps = getattr(module, "variance_epsilon", None) or module.eps
    weight = module.weight.detach().float()
    return Norm(weight + 1 if type(module).__name__.startswith("Gemma") else weight, float(eps))


def _weights(modules: list[Any]) -> Weights:
    return Weights([m.weight for m in modules], [m.bias for m in modules])


def _named_norm(module: Any, name: str) -> Norm | None:
    """A norm the family may not have."""
    found = getattr(module, name, None)
    return None if found is None else norm(found)


def _window(config: Any, attn: Any, kind: str) -> int | None:
    """The sliding window of a layer: its own word where it has one, else the model's."""
    if hasattr(attn, "sliding_window"):
        return attn.sliding_window  # type: ignore[no-any-return]  # transformers is untyped here
    if getattr(config, "layer_types", None) and kind != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None)
