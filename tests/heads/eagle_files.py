"""Writes EAGLE heads as their authors do, from the published names and shapes. Knows none of our code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

H, INTER, HEADS, KV, DIM, VOCAB, DRAFT = 16, 24, 4, 2, 4, 40, 14
PLAIN = {
    "model_type": "llama",
    "hidden_size": H,
    "intermediate_size": INTER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
}

Tensors = dict[str, Tensor]
Settings = dict[str, Any]


def some(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.4


def near_one(width: int, seed: int) -> Tensor:
    return 1 + some(width, seed=seed)


def layer(prefix: str, reads: int) -> Tensors:
    """A Llama layer that reads `reads` numbers, without its norms before attention."""
    return {
        f"{prefix}.self_attn.q_proj.weight": some(HEADS * DIM, reads, seed=1),
        f"{prefix}.self_attn.k_proj.weight": some(KV * DIM, reads, seed=2),
        f"{prefix}.self_attn.v_proj.weight": some(KV * DIM, reads, seed=3),
        f"{prefix}.self_attn.o_proj.weight": some(H, HEADS * DIM, seed=4),
        f"{prefix}.mlp.gate_proj.weight": some(INTER, H, seed=5),
        f"{prefix}.mlp.up_proj.weight": some(INTER, H, seed=6),
        f"{prefix}.mlp.down_proj.weight": some(H, INTER, seed=7),
        f"{prefix}.post_attention_layernorm.weight": near_one(H, seed=8),
    }


def eagle1(*, bias: bool = True) -> tuple[Settings, Tensors]:
    """EAGLE-1 and -2: fc over [token, feature], no norm before the layer, no LM head."""
    tensors = {"fc.weight": some(H, 2 * H, seed=9), **layer("layers.0", H)}
    if bias:
        tensors["fc.bias"] = some(H, seed=10)
    return dict(PLAIN) if bias else PLAIN | {"bias": False}, tensors


def eagle3(*, target_hidden: int = H, own_embedding: bool = False) -> tuple[Settings, Tensors]:
    """EAGLE-3, official: midlayer, three streams, its own norm and LM head over DRAFT ids, d2t offsets."""
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(0))[:DRAFT].sort().values
    tensors = {
        "fc.weight": some(H, 3 * target_hidden, seed=9),
        **layer("midlayer", 2 * H),
        "midlayer.hidden_norm.weight": near_one(H, seed=11),
        "midlayer.input_layernorm.weight": near_one(H, seed=12),
        "norm.weight": near_one(H, seed=13),
        "lm_head.weight": some(DRAFT, H, seed=14) * 4,
        "d2t": ids - torch.arange(DRAFT),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True),
    }
    if own_embedding:
        tensors["embed_tokens.weight"] = some(VOCAB, H, seed=15)
    settings = PLAIN | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT}
    return (settings if target_hidden == H else settings | {"target_hidden_size": target_hidden}), tensors


def speculators(*, norm_before_residual: bool = False) -> tuple[Settings, Tensors]:
    """The same head as the `speculators` library saves it: layers.0, its embedding, the layer's config inside."""
    _, tensors = eagle3(own_embedding=True)
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    verifier = {"name_or_path": "target", "architectures": ["LlamaForCausalLM"]}
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": 3,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": verifier,
        },
        "transformer_layer_config": dict(PLAIN),
        "draft_vocab_size": DRAFT,
        "norm_before_residual": norm_before_residual,
    }, tensors


def with_fc_norm(tensors: Tensors, width: int = H) -> Tensors:
    return tensors | {f"fc_norm.{i}.weight": near_one(width, seed=20 + i) for i in range(3)}


def with_attention_bias(tensors: Tensors, prefix: str) -> Tensors:
    wide, narrow = HEADS * DIM, KV * DIM
    sizes = {"q": wide, "k": narrow, "v": narrow}
    names = {f"{prefix}.self_attn.{x}_proj.bias": some(sizes[x], seed=30 + sizes[x] + ord(x)) for x in sizes}
    return tensors | names


def write(folder: Path, settings: Settings, tensors: Tensors, weights: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    if weights.endswith(".safetensors"):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / weights)
    else:
        torch.save(tensors, folder / weights)
    return folder
