"""Sampled texts have the distribution of transformers' own sampling: chi-square, with controls it must catch.

The expected law is enumerated from transformers' forward pass and its own processors, which none of our code
touches.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList

import sooner
from tests.core.goodness import LIMIT, chi_square
from tests.model.test_hf import tiny

VOCAB = 12
PROMPT = [5, 11, 10, 6, 5, 11, 10]  # lookup guesses 6, which has a chance of 0.10
SHAPE: dict[str, Any] = {"temperature": 0.8, "top_k": 6, "top_p": 0.9, "repetition_penalty": 1.5}
SEEDS = range(10)
ROWS = 120  # few enough for one pass to hold all prompts and a guess for each


def model(noise: float = 0.0) -> Any:
    made = tiny("llama", "sdpa", vocab_size=VOCAB, initializer_range=0.3)
    made.generation_config.eos_token_id = None
    with torch.no_grad():
        made.lm_head.weight += noise * torch.randn(made.lm_head.weight.shape)
    return made


def law(target: Any, shape: dict[str, Any]) -> Tensor:
    """[V, V]: probability of the next two tokens after PROMPT, by transformers alone."""
    kept: list[LogitsProcessorList] = []

    def keep(model: Any, input_ids: Tensor, logits_processor: Any, **_: Any) -> Tensor:
        kept.append(logits_processor)
        return input_ids

    ids = torch.tensor([PROMPT])
    target.generate(ids, do_sample=True, max_new_tokens=2, custom_generate=keep, **shape)

    def after(ids: Tensor) -> Tensor:
        return kept[0](ids, target(ids).logits[:, -1].float()).softmax(-1).double()[0]

    with torch.no_grad():
        first = after(ids)
        second = [after(torch.tensor([[*PROMPT, token]])) for token in range(VOCAB)]
    return first[:, None] * torch.stack(second)


@cache
def counts(drafter: str) -> Tensor:
    """[V, V]: how often each pair was written, over SEEDS * ROWS texts on fixed seeds."""
    target = model()
    wishes: dict[str, Any] = {"draft": drafter, "k": 8}
    if drafter == "model":
        wishes = {"assistant_model": model(noise=0.2), "assistant_confidence_threshold": 0.0}
    seen, done = torch.zeros(VOCAB * VOCAB), sooner.Acceptance()
    for seed in SEEDS:
        torch.manual_seed(seed)
        out = sooner.generate(
            target, torch.tensor([PROMPT] * ROWS), do_sample=True, max_new_tokens=2, **SHAPE, **wishes
        )
        pairs = out[:, -2] * VOCAB + out[:, -1]
        seen += torch.bincount(pairs, minlength=VOCAB * VOCAB)
        done += out.sooner_stats.total
    assert drafter == "none" or 0 < done.accepted < done.drafted
    return seen.view(VOCAB, VOCAB)


@pytest.mark.parametrize("drafter", ["none", "lookup", "model"])
def test_pairs_of_tokens_have_the_law_of_transformers(drafter: str) -> None:
    assert chi_square(counts(drafter), law(model(), SHAPE)) > LIMIT


@pytest.mark.parametrize(
    "biased", [{"temperature": 1.5}, {"repetition_penalty": 1.0}, {"top_p": 0.99}, {"top_k": 0, "top_p": 1.0}]
)
@pytest.mark.parametrize("drafter", ["lookup", "model"])
def test_a_law_that_is_off_in_one_parameter_is_told_apart(drafter: str, biased: dict[str, Any]) -> None:
    other = law(model(), SHAPE | biased)
    possible = (other > 0).double()
    lost = counts(drafter) * (1 - possible)  # outcomes the other law rules out tell them apart at once
    assert bool(lost.any()) or chi_square(counts(drafter), other) < LIMIT


def test_a_guess_accepted_for_its_own_sake_is_told_apart() -> None:
    """A rule that keeps every guess would write the assistant's text; the same count must catch that."""
    forged = law(model(noise=0.2), SHAPE)
    drawn = torch.multinomial(
        forged.flatten(), len(SEEDS) * ROWS, True, generator=torch.Generator().manual_seed(0)
    )
    seen = torch.bincount(drawn, minlength=VOCAB * VOCAB).view(VOCAB, VOCAB)
    true = law(model(), SHAPE)
    assert bool((seen * (true == 0)).any()) or chi_square(seen, true) < LIMIT
