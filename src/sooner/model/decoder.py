"""The parts of a Llama-shaped model, layer by layer, and how they are had from a transformers module.

Knows no runtime. model/stored.py has the same parts from files; families.py says what families differ in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from sooner.model import families

FAMILIES = frozenset(families.TABLE)


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

    def stacked(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """One weight [sum of out, in] and one bias of that dtype; a single weight as it is, of any dtype."""
        weight = self.weights[0].detach()
        if len(self.weights) > 1:
            weight = torch.cat([w.detach().to(dtype) for w in self.weights])
        given = [b.detach().to(dtype) for b in self.biases if b is not None]
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


@dataclass(frozen=True, slots=True)
class Shape:
    """What all layers of a model share: sizes, activation, final norm, rotary tables, kinds of layers.

    embed_scale: what embeddings are multiplied by. rotary: called as transformers' modules are, with `rope_type`.
    """

    config: Any
    dtype: torch.dtype
    device: torch.device
    vocab: int
    act: Callable[[Tensor], Tensor]
    norm: Norm
    rotary: Any
    embed_scale: float

    @property
    def layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def hidden(self) -> int:
        return int(self.config.hidden_size)

    @property
    def inner(self) -> int:
        return int(self.config.intermediate_size)

    @property
    def heads(self) -> int:
        return int(self.config.num_attention_heads)

    @property
    def kv_heads(self) -> int:
        return int(self.config.num_key_value_heads)

    @property
    def dim(self) -> int:
        return families.head_width(self.config)

    @property
    def softcap(self) -> float | None:
        return getattr(self.config, "final_logit_softcapping", None)

    @property
    def kinds(self) -> Sequence[str]:
        """The kind of every layer."""
        return getattr(self.config, "layer_types", None) or ["full_attention"] * self.layers

    @property
    def per_kind(self) -> bool:
        """Gemma-3 turns its local and its global layers by different bases: one table for each kind."""
        return isinstance(getattr(self.rotary, "rope_type", None), dict)

    def table(self, layer: int) -> str:
        """Which rotary table a layer uses, if it turns."""
        return self.kinds[layer] if self.per_kind else "all"

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


class Source(Protocol):
    """Where a runtime has a model's weights from. head: the LM head. tied: it is the embedding."""

    shape: Shape
    head: Weights
    tied: bool

    def embedding(self) -> Tensor:
        """The embedding [V, H], in the model's dtype."""

    def rotary(self, layer: int) -> str | None:
        """Which rotary table a layer uses."""

    def parts(self, layer: int) -> Parts[Weights]:
        """The parts of one layer; its maps may be of another dtype than the model's."""

    def drop(self, layer: int) -> None:
        """The layer has been read and will not be asked for again."""

    def drop_ends(self) -> None:
        """Embedding and head have been read; where they are one, they will not be asked for again."""


class Modules:
    """The Source that a transformers module is; dropped parts are taken out of it. embed: its embedding module."""

    def __init__(self, module: Any) -> None:
        self._body, self._head = module.model, module.get_output_embeddings()
        self.embed = self._body.embed_tokens
        mlp, weight = self._body.layers[0].mlp, self.embed.weight
        self.shape = Shape(
            config=module.config,
            dtype=weight.dtype,
            device=weight.device,
            vocab=int(self._head.weight.shape[0]),
            act=getattr(mlp, "act_fn", None) or mlp.activation_fn,
            norm=norm(self._body.norm),
            rotary=self._body.rotary_emb,
            embed_scale=float(torch.as_tensor(getattr(self.embed, "embed_scale", 1.0)).to(weight.dtype)),
        )
        self.head = Weights([self._head.weight], [getattr(self._head, "bias", None)])
        self.tied = self._head.weight is weight

    def embedding(self) -> Tensor:
        """The embedding [V, H]."""
        weight: Tensor = self.embed.weight
        return weight

    def rotary(self, layer: int) -> str | None:
        """Which rotary table a layer uses, None for no rotation."""
        turns = getattr(self._body.layers[layer].self_attn, "use_rope", True)
        return self.shape.table(layer) if turns else None

    def parts(self, layer: int) -> Parts[Weights]:
        """The parts of one layer of the module."""
        module = self._body.layers[layer]
        attn, mlp = module.self_attn, module.mlp
        qkv = [attn.qkv_proj] if hasattr(attn, "qkv_proj") else [attn.q_proj, attn.k_proj, attn.v_proj]
        gate_up = [mlp.gate_up_proj] if hasattr(mlp, "gate_up_proj") else [mlp.gate_proj, mlp.up_proj]
        norms = [_named_norm(module, f"{name}_layernorm") for name in ("input", "post_attention")]
        feed = [_named_norm(module, f"{name}_layernorm") for name in ("pre_feedforward", "post_feedforward")]
        return Parts(
            qkv=_weights(qkv),
            out=_weights([attn.o_proj]),
            gate_up=_weights(gate_up),
            down=_weights([mlp.down_proj]),
            **placed(*norms, *feed),
            q_norm=_named_norm(attn, "q_norm"),
            k_norm=_named_norm(attn, "k_norm"),
            rotary=self.rotary(layer),
            window=_window(self.shape.config, attn, self.shape.kinds[layer]),
            scale=float(attn.scaling),
            softcap=getattr(attn, "attn_logit_softcapping", None),
        )

    def drop(self, layer: int) -> None:
        """Take a layer out of the module."""
        self._body.layers[layer] = nn.Identity()

    def drop_ends(self) -> None:
        """Take the embedding out of the module, where the head is the same."""
        if self.tied:
            self.embed.weight = nn.Parameter(self.embed.weight.new_zeros(0), requires_grad=False)
            self._head.weight = self.embed.weight
            self.head = Weights([], [])


def placed(
    first: Norm | None, attention: Norm | None, before_mlp: Norm | None, after_mlp: Norm | None
) -> dict[str, Norm | None]:
    """Norms as the families name them -> as they act: without norms of its own around the MLP, the norm "after
    attention" is the one before the MLP."""
    sandwich = before_mlp is not None or after_mlp is not None
    return {
        "before_attention": first,
        "after_attention": attention if sandwich else None,
        "before_mlp": before_mlp if sandwich else attention,
        "after_mlp": after_mlp,
    }


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
    if families.TABLE[str(config.model_type)].window == "nobody":
        return None  # whatever the configuration says: these modules do not look
    if hasattr(attn, "sliding_window"):
        return attn.sliding_window  # type: ignore[no-any-return]  # transformers is untyped here
    if getattr(config, "layer_types", None) and kind != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None)
