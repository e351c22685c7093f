"""transformers' own generate and forward pass, on the same weights: the yardstick. Knows no draft of ours."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

from sooner.errors import ModelError
from sooner.model.load import Loaded, resolve
from sooner.params import SamplingParams


@dataclass(frozen=True, slots=True)
class PlainRun:
    """One text that transformers wrote.

    first: how many of the tokens came with the prompt's pass. steps: passes that gave tokens, that one
    included. prompt_s, decode_s: seconds up to those tokens, and from there to the last one.
    """

    tokens: tuple[int, ...]
    first: int
    steps: int
    prompt_s: float
    decode_s: float


class _Stamps:
    """What generate takes for a streamer: notes when tokens come, and how many."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []

    def put(self, tokens: Tensor) -> None:
        self.times.append(time.perf_counter())
        self.counts.append(tokens.numel())

    def end(self) -> None:
        """Nothing is kept back."""


class PlainModel:
    """A second copy of a loaded model's weights, with transformers' own (sdpa) attention."""

    def __init__(self, loaded: Loaded) -> None:
        dtype = loaded.model.lanes.store.dtype
        module = AutoModelForCausalLM.from_pretrained(
            resolve(loaded.name), dtype=dtype, attn_implementation="sdpa"
        )
        self._module: Any = module.to(loaded.device).eval()
        # The model's own sampling defaults (temperature, repetition penalty, ...) would not be what was asked.
        self._module.generation_config = GenerationConfig()
        self._eos = list(loaded.eos_ids)

    def generate(self, prompt: Sequence[int], params: SamplingParams, lookup: int | None = None) -> PlainRun:
        """Go on from token ids. lookup: prompt_lookup_num_tokens, None = plain decoding.

        Takes max_tokens, temperature, top_k, top_p, min_p and seed of `params`; refuses the others by name.
        """
        _refuse_others(params)
        inputs = torch.tensor([list(prompt)], device=self._module.device)
        stamps = _Stamps()
        with torch.random.fork_rng(devices=[]):
            if params.seed is not None:
                torch.manual_seed(params.seed % 2**63)
            started = time.perf_counter()
            output = self._module.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                generation_config=self._settings(params, lookup),
                streamer=stamps,
            )
        written = output[0, inputs.shape[1] :].tolist()
        times = stamps.times[1:]  # the first call brings the prompt
        prompt_s, decode_s = times[0] - started, times[-1] - times[0]
        return PlainRun(tuple(written), min(stamps.counts[1], len(written)), len(times), prompt_s, decode_s)

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Logits after the last of `tokens`, float32 [V], from one plain pass without a cache."""
        inputs = torch.tensor([list(tokens)], device=self._module.device)
        logits: Tensor = self._module(inputs, use_cache=False, logits_to_keep=1).logits[0, -1]
        return logits.float()

    def _settings(self, params: SamplingParams, lookup: int | None) -> GenerationConfig:
        shaped: dict[str, Any] = {}
        if not params.greedy:
            shaped = {"temperature": params.temperature, "top_k": max(params.top_k, 0), "top_p": params.top_p}
            shaped["min_p"] = params.min_p or None
        return GenerationConfig(
            max_new_tokens=params.max_tokens,
            do_sample=not params.greedy,
            eos_token_id=self._eos or None,
            pad_token_id=self._eos[0] if self._eos else 0,
            prompt_lookup_num_tokens=lookup,
            **shaped,
        )


def _refuse_others(params: SamplingParams) -> None:
    taken = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "rule", "skip_special_tokens")
    plain = SamplingParams()
    for name in SamplingParams.__slots__:
        if name not in taken and getattr(params, name) != getattr(plain, name):
            raise ModelError(f"the comparison with transformers does not take {name}.")
    if params.max_tokens is None:
        raise ModelError("the comparison with transformers needs max_tokens.")
