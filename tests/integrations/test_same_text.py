"""The drop-in writes the tokens of transformers' own greedy generate, row by row, whatever guesses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

import sooner
from sooner.model import decoder, hf
from sooner.model.borrowed import borrow
from sooner.model.native import NativeModel
from sooner.testing import ScriptedDrafter
from tests.integrations.prompts import batch, both
from tests.model.test_hf import tiny

LENGTHS = [1, 3, 7, 12, 2, 30, 9, 5]


# GPT-2 and OPT hand keywords on to their attention from 5.3 on; before that they are refused by name.
OLD = {"gpt2", "opt"} if Version(transformers.__version__) < Version("5.3") else set()


@pytest.mark.parametrize("family", sorted(hf.FAMILIES - OLD))
def test_every_family_writes_the_same_rows(family: str) -> None:
    model = tiny(family, "eager")
    plain, ours = both(model, batch(LENGTHS), {}, max_new_tokens=24, do_sample=False)
    assert torch.equal(plain, ours)
    assert ours.sooner_stats.total.emitted >= 24


@pytest.mark.parametrize("family", sorted(decoder.FAMILIES - {"olmo2", "phi3"}))
def test_families_of_our_own_decoder_write_the_same_rows_with_it(family: str) -> None:
    model = tiny(family, "eager", hidden_size=64, head_dim=16)
    assert isinstance(borrow(model), NativeModel) or decoder.scaled_elsewhere(model)
    plain, ours = both(model, batch(LENGTHS), {}, max_new_tokens=24, do_sample=False)
    assert torch.equal(plain, ours)


@pytest.mark.parametrize("keywords", [{}, {"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}])
@pytest.mark.parametrize("ours", [{}, {"assistant_early_exit": 2}])
def test_a_mask_may_have_holes(ours: dict[str, Any], keywords: dict[str, Any]) -> None:
    """What is masked is seen by no row and counted by no position; processors see it, as in transformers."""
    model, inputs = tiny("llama", "sdpa"), batch(LENGTHS)
    for r, hole in ((3, 22), (5, 0), (5, 7), (5, 8), (7, 26)):
        inputs["attention_mask"][r, hole] = 0
    plain, made = both(model, inputs, ours, max_new_tokens=24, do_sample=False, **keywords)
    assert torch.equal(plain, made)


def test_where_nobody_says_how_much_is_guessed_costs_decide_and_not_what_is_written() -> None:
    model, inputs = tiny("llama", "sdpa"), batch(LENGTHS)
    plain = model.generate(**inputs, max_new_tokens=40, do_sample=False)
    ours = model.generate(**inputs, max_new_tokens=40, do_sample=False, custom_generate=sooner.generate)
    assert torch.equal(plain, ours)
    assert ours.sooner_stats.draft == "auto"


@pytest.mark.parametrize("draft", ["auto", "lookup", "recycle", "lookup+recycle", "none", "model", "scripted"])
def test_every_drafter_writes_the_same_rows(draft: str) -> None:
    model = tiny("llama", "sdpa", max_position_embeddings=1024)
    inputs = batch([1, 500, 37, 260, 4, 128, 63, 9])
    wishes: dict[str, Any] = {"draft": draft}
    if draft == "model":
        wishes = {"assistant_model": tiny("llama", "sdpa", num_hidden_layers=2, max_position_embeddings=1024)}
    if draft == "scripted":
        wishes = {"draft": ScriptedDrafter(lambda context, budget: sooner.Draft((5, 6, 7), (-1, -1, 0))), "k": 8}
    plain, ours = both(model, inputs, wishes, max_new_tokens=40, do_sample=False)
    assert torch.equal(plain, ours)


def test_rows_that_end_early_are_padded_as_transformers_pads_them() -> None:
    model = tiny("qwen2", "sdpa")
    inputs = batch(LENGTHS, seed=3)
    seen = model.generate(**inputs, max_new_tokens=30, do_sample=False)[:, 30:]
    ends = [int(seen[0, 6]), int(seen[3, 2])]
    plain, ours = both(model, inputs, {}, max_new_tokens=30, do_sample=False, eos_token_id=ends, pad_token_id=1)
    assert torch.equal(plain, ours)
    assert bool((ours[:, 30:] == 1).any()), "no row ended early, so nothing was shown"


def test_a_batch_of_the_last_width_ends_with_its_longest_row() -> None:
    """All rows end before max_new_tokens: the output is as wide as the longest, not as wide as asked."""
    model = tiny("llama", "sdpa")
    inputs = batch([4, 6])
    seen = model.generate(**inputs, max_new_tokens=20, do_sample=False)[:, 6:]
    ends = [int(seen[0, 2]), int(seen[1, 4])]
    plain, ours = both(model, inputs, {}, max_new_tokens=20, do_sample=False, eos_token_id=ends)
    assert torch.equal(plain, ours)
    assert ours.shape[1] < 26


def test_drafts_that_are_always_right_save_passes() -> None:
    model = tiny("llama", "sdpa")
    wishes = {"assistant_model": model, "assistant_confidence_threshold": 0.0, "num_assistant_tokens": 10}
    _, ours = both(model, batch([9, 5]), wishes, max_new_tokens=30, do_sample=False)
    assert ours.sooner_stats.passes == 3  # 11 tokens, 11 and 8: the prompt's own pass has a draft already
    assert ours.sooner_stats.total.acceptance == 1


def test_many_prompts_through_few_lanes_are_the_texts_of_each_alone() -> None:
    model = tiny("llama", "sdpa")
    prompts = [[5, 6, 7], [8], [9, 10, 11, 12] * 5, [20, 21], [30] * 7]
    texts = sooner.generate_batch(model, prompts, lanes=2, max_new_tokens=17, do_sample=False)
    for prompt, text in zip(prompts, texts, strict=True):
        alone = model.generate(torch.tensor([prompt]), max_new_tokens=17, do_sample=False)
        assert list(text.ids) == alone[0, len(prompt) :].tolist()
    assert texts.sooner_stats.total.emitted == sum(len(text.ids) for text in texts)


def test_nothing_but_a_begin_token_is_a_prompt_too() -> None:
    model = tiny("llama", "sdpa")
    plain = model.generate(max_new_tokens=9, do_sample=False)
    assert torch.equal(plain, sooner.generate(model, max_new_tokens=9, do_sample=False))


def test_a_text_goes_on_beyond_the_trained_length_as_it_does_in_transformers() -> None:
    model = tiny("llama", "sdpa")  # 128 positions
    plain, ours = both(model, batch([120, 90]), {}, max_new_tokens=30, do_sample=False, eos_token_id=None)
    assert torch.equal(plain, ours)
    assert ours.shape[1] == 150
