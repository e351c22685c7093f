"""Writes Medusa checkpoints in every published layout, from the tables of the formats. Knows no reader of ours.

Each function writes `heads`: for every head a list of (weight, bias) blocks and the LM head or None.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

Head = tuple[list[tuple[Tensor, Tensor]], Tensor | None]


def some_heads(count: int, blocks: int, hidden: int, vocab: int | None, seed: int = 0) -> list[Head]:
    """Random heads; vocab None = v2, without LM heads."""
    g = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).float()

    return [
        (
            [(rand(hidden, hidden), rand(hidden)) for _ in range(blocks)],
            None if vocab is None else rand(vocab, hidden),
        )
        for _ in range(count)
    ]


def official(heads: Sequence[Head]) -> dict[str, Tensor]:
    """`{i}.{j}.linear.weight`, `{i}.{j}.linear.bias`, and behind the last block `{i}.{K}.weight`."""
    tensors = {}
    for i, (blocks, out) in enumerate(heads):
        for j, (weight, bias) in enumerate(blocks):
            tensors[f"{i}.{j}.linear.weight"] = weight
            tensors[f"{i}.{j}.linear.bias"] = bias
        if out is not None:
            tensors[f"{i}.{len(blocks)}.weight"] = out
    return tensors


def config(folder: Path, **settings: Any) -> None:
    (folder / "config.json").write_text(json.dumps(settings))


def heads_only(folder: Path, heads: Sequence[Head], **settings: Any) -> Path:
    save_file(official(heads), folder / "medusa_lm_head.safetensors")
    config(folder, **{"medusa_num_heads": 2, "medusa_num_layers": len(heads[0][0])} | settings)
    return folder


def pickled(folder: Path, heads: Sequence[Head]) -> Path:
    torch.save(official(heads), folder / "medusa_lm_head.pt")
    config(folder, medusa_num_heads=2, medusa_num_layers=len(heads[0][0]))
    return folder


def merged(folder: Path, heads: Sequence[Head], shards: bool) -> Path:
    """A whole model: its own weights, and the heads under `medusa_head.`; one file, or three with an index."""
    own = {"model.embed_tokens.weight": torch.zeros(3, 2), "lm_head.weight": torch.ones(3, 2)}
    named = {f"medusa_head.{name}": tensor for name, tensor in official(heads).items()}
    config(folder, architectures=["MedusaLlamaForCausalLM"], medusa_num_layers=len(heads[0][0]))
    if not shards:
        save_file(own | named, folder / "model.safetensors")
        return folder
    names = sorted(named)
    files = [own, {n: named[n] for n in names[::2]}, {n: named[n] for n in names[1::2]}]
    index = {}
    for i, tensors in enumerate(files):
        file = f"model-{i + 1:05}-of-00003.safetensors"
        save_file(tensors, folder / file)
        index |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def blocks_layout(
    folder: Path,
    heads: Sequence[Head],
    *,
    bias: bool,
    prefix: str = "",
    token_map: Sequence[int] | None = None,
    one_lm_head: bool = False,
    **settings: Any,
) -> Path:
    """`blocks.{i}.layers.{j}.weight`, `lm_heads.{i}.weight`, `token_map`."""
    tensors = {}
    for i, (blocks, out) in enumerate(heads):
        for j, (weight, shift) in enumerate(blocks):
            tensors[f"{prefix}blocks.{i}.layers.{j}.weight"] = weight
            if bias:
                tensors[f"{prefix}blocks.{i}.layers.{j}.bias"] = shift
        if out is not None and (i == 0 or not one_lm_head):
            tensors[f"{prefix}lm_heads.{i}.weight"] = out
    if token_map is not None:
        tensors["token_map"] = torch.tensor(token_map)
    save_file(tensors, folder / "model.safetensors")
    given = {"model_type": "medusa", "num_heads": len(heads), "num_hidden_layers": len(heads[0][0])}
    given |= {"medusa_fc_bias": bias} if bias else {}
    given |= {"original_lm_head": True} if one_lm_head else {}
    config(folder, **given | settings)
    return folder


def expected_logits(heads: Sequence[Head], state: Tensor, lm_head: Tensor, *, bias: bool = True) -> list[Tensor]:
    """The heads' mathematics, element by element, in float64: one row of logits for each head."""
    found = []
    for blocks, out in heads:
        x = state.double().tolist()
        for weight, shift in blocks:
            rows = weight.double().tolist()
            added = [sum(w * v for w, v in zip(row, x, strict=True)) for row in rows]
            if bias:
                added = [a + b for a, b in zip(added, shift.double().tolist(), strict=True)]
            x = [v + a / (1 + 2.718281828459045**-a) for v, a in zip(x, added, strict=True)]
        last = lm_head if out is None else out
        found.append(last.double() @ torch.tensor(x, dtype=torch.float64))
    return found
