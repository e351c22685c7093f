"""Padded batches of random prompts for tiny models. Knows no test."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def batch(lengths: list[int], *, seed: int = 0, vocab: int = 97, pad: int = 0) -> dict[str, Tensor]:
    """input_ids and attention_mask, padded on the left; some prompts repeat themselves, so lookup finds things."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.full((len(lengths), width), pad)
    mask = torch.zeros_like(ids)
    for r, length in enumerate(lengths):
        drawn = torch.randint(3, vocab, (length,), generator=generator)
        if r % 2:
            drawn = drawn[:4].repeat(length)[:length]
        ids[r, width - length :] = drawn
        mask[r, width - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def both(model: Any, inputs: dict[str, Tensor], ours: dict[str, Any], **keywords: Any) -> tuple[Any, Any]:
    """What transformers' generate gives, and what it gives with `custom_generate=sooner.generate`.

    Left to itself ours would weigh whether guesses pay, and with tiny models they do not: they are told to guess.
    """
    import sooner

    said = any(name.startswith(("assistant", "prompt_")) for name in ours)
    ours = ours if said else {"k": 8} | ours
    plain = model.generate(**inputs, **keywords)
    return plain, model.generate(**inputs, **keywords, custom_generate=sooner.generate, **ours)
