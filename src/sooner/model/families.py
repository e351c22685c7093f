"""What the Llama-shaped families differ in beyond their configurations, and what they call their weights, as data.

Knows no tensors and no runtime. A name that ends in a dot goes on with "weight" or "bias".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Q, K, V, QKV, O = (f"self_attn.{name}_proj." for name in ("q", "k", "v", "qkv", "o"))  # noqa: E741  # as the names in the files
GATE, UP, GATE_UP, DOWN = (f"mlp.{name}_proj." for name in ("gate", "up", "gate_up", "down"))
Q_NORM, K_NORM = "self_attn.q_norm.", "self_attn.k_norm."
INPUT, ATTENTION, BEFORE_MLP, AFTER_MLP = (
    f"{name}_layernorm." for name in ("input", "post_attention", "pre_feedforward", "post_feedforward")
)
EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Family:
    """norms: those of a layer. head_norms: norms of queries and keys, of each head or of all at once.
    biased: setting of the configuration -> the maps that have a bias if it is true; "" stands for always.
    fused: q, k, v are one map in the file, gate and up another. window: who sees `sliding_window` tokens only;
    "asked": layers of kind sliding_attention, if `use_sliding_window`. turned: the setting that lists the layers
    that are turned by position, None = all. per_kind: a rotary table for each kind of layer.
    gemma: norms lack a 1, embeddings are multiplied by the root of their width. query_scalar: attention is
    scaled by `query_pre_attn_scalar` and capped by `attn_logit_softcapping`. act: the setting that names the
    activation.
    """

    norms: tuple[str, ...] = (INPUT, ATTENTION)
    head_norms: Literal["each", "all"] | None = None
    biased: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fused: bool = False
    window: Literal["nobody", "all", "sliding", "asked"] = "nobody"
    turned: str | None = None
    per_kind: bool = False
    gemma: bool = False
    query_scalar: bool = False
    act: str = "hidden_act"


_ATTENTION = {"attention_bias": (Q, K, V, O)}
_BOTH = _ATTENTION | {"mlp_bias": (GATE, UP, DOWN)}
_SANDWICH = (INPUT, ATTENTION, BEFORE_MLP, AFTER_MLP)

TABLE: Mapping[str, Family] = {
    "gemma": Family(biased=_ATTENTION, gemma=True),
    "gemma2": Family(
        norms=_SANDWICH,
        biased=_ATTENTION,
        window="sliding",
        gemma=True,
        query_scalar=True,
        act="hidden_activation",
    ),
    "gemma3_text": Family(
        norms=_SANDWICH,
        head_norms="each",
        biased=_ATTENTION,
        window="sliding",
        per_kind=True,
        gemma=True,
        query_scalar=True,
        act="hidden_activation",
    ),
    "llama": Family(biased=_BOTH),
    "ministral": Family(window="sliding"),
    "mistral": Family(window="all"),
    "olmo2": Family(norms=(ATTENTION, AFTER_MLP), head_norms="all", biased=_ATTENTION),
    "phi3": Family(fused=True, window="all"),
    "qwen2": Family(biased={"": (Q, K, V)}, window="sliding"),
    "qwen3": Family(head_norms="each", biased=_ATTENTION, window="sliding"),
    "smollm3": Family(biased=_BOTH, window="asked", turned="no_rope_layers"),
}

STATIC_ROPE = ("default", "linear", "llama3", "yarn")  # angles that do not depend on the length of the text


def layer_name(layer: int, part: str) -> str:
    """The name in the file of a part of a layer."""
    return f"model.layers.{layer}.{part}"


def head_width(config: Any) -> int:
    """Width of one attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def tensors(config: Any) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this configuration has, and its shape."""
    hidden, vocab = int(config.hidden_size), int(config.vocab_size)
    found: dict[str, tuple[int, ...]] = {EMBEDDING: (vocab, hidden), NORM: (hidden,)}
    if not config.tie_word_embeddings:
        found[HEAD] = (vocab, hidden)
    parts = _layer_tensors(config, TABLE[str(config.model_type)])
    for layer in range(int(config.num_hidden_layers)):
        found |= {layer_name(layer, name): shape for name, shape in parts.items()}
    return found


def _layer_tensors(config: Any, family: Family) -> dict[str, tuple[int, ...]]:
    hidden, inner, width = int(config.hidden_size), int(config.intermediate_size), head_width(config)
    queries, keys = int(config.num_attention_heads) * width, int(config.num_key_value_heads) * width
    maps = {O: (hidden, queries), DOWN: (hidden, inner)}
    if family.fused:
        maps |= {QKV: (queries + 2 * keys, hidden), GATE_UP: (2 * inner, hidden)}
    else:
        maps |= {Q: (queries, hidden), K: (keys, hidden), V: (keys, hidden)}
        maps |= {GATE: (inner, hidden), UP: (inner, hidden)}
    found: dict[str, tuple[int, ...]] = {name + "weight": shape for name, shape in maps.items()}
    for setting, names in family.biased.items():
        if not setting or getattr(config, setting):
            found |= {name + "bias": (maps[name][0],) for name in names}
    found |= {name + "weight": (hidden,) for name in family.norms}
    if family.head_norms:
        alone = family.head_norms == "each"
        found[Q_NORM + "weight"] = (width if alone else queries,)
        found[K_NORM + "weight"] = (width if alone else keys,)
    return found
