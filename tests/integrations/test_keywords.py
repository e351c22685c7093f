"""Every keyword of transformers' generate keeps its meaning: processors, criteria, ends, configurations."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteriaList,
    TopKLogitsWarper,
    WatermarkingConfig,
)

import sooner
from tests.integrations.prompts import batch, both
from tests.model.test_hf import tiny
from tests.tiny import make_tiny, tiny_tokenizer

LENGTHS = [1, 3, 7, 12, 2, 30, 9, 5]

GREEDY: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.4},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[5], [14, 59], [72, 59, 14]]},
    "sequence_bias": {"sequence_bias": [[[11], 4.0], [[20, 88], -5.0]]},
    "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": [14, 59, 72, 11, 23, 34]},
    "min_length": {"min_length": 37, "eos_token_id": [14, 59, 72, 11, 23, 34]},
    "forced_eos_token_id": {"forced_eos_token_id": 7},
    "forced_bos_token_id": {"forced_bos_token_id": 8},
    "suppress_tokens": {"suppress_tokens": [14, 59, 72]},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(3, 60))},
    "exponential_decay": {"exponential_decay_length_penalty": (4, 1.3), "eos_token_id": 40},
    "encoder_repetition": {"encoder_repetition_penalty": 1.5},
    "encoder_no_repeat": {"encoder_no_repeat_ngram_size": 1},
    "renormalize": {"renormalize_logits": True, "repetition_penalty": 1.2},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=2.5)},
    "several": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "min_new_tokens": 5, "eos_token_id": 14},
    "max_length": {"max_length": 41},
    "assistant_early_exit": {"assistant_early_exit": 2, "assistant_confidence_threshold": 0.1},
    "max_matching_ngram_size": {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 1},
}


@pytest.mark.parametrize("name", sorted(GREEDY))
def test_a_keyword_acts_as_in_transformers(name: str) -> None:
    model = tiny("llama", "sdpa")
    keywords = {"max_new_tokens": 24, "do_sample": False} | GREEDY[name]
    if "max_length" in keywords:
        del keywords["max_new_tokens"]
    guessing = {k: keywords.pop(k) for k in list(keywords) if k.startswith(("assistant", "prompt_", "max_match"))}
    plain, ours = both(model, batch(LENGTHS), guessing, **keywords)
    assert torch.equal(plain, ours)
    assert ours.sooner_stats.total.drafted > 0


def test_an_id_that_no_token_has_ends_nothing() -> None:
    plain, ours = both(tiny("llama", "sdpa"), batch([6]), {}, max_new_tokens=9, do_sample=False, eos_token_id=-1)
    assert torch.equal(plain, ours)


def test_what_the_assistant_says_of_itself_counts_where_the_call_says_nothing() -> None:
    """transformers reads these from the assistant's generation config; ours are bound by the call's, too."""
    model, inputs = tiny("llama", "sdpa"), batch([6, 9])
    assistant = copy.deepcopy(model)
    assistant.generation_config.update(num_assistant_tokens=3, assistant_confidence_threshold=0.0)
    keywords = {"assistant_model": assistant, "max_new_tokens": 21, "do_sample": False, "eos_token_id": None}
    ours = sooner.generate(model, **inputs, **keywords)
    assert ours.sooner_stats.total.drafted == ours.sooner_stats.total.accepted
    assert ours.sooner_stats.total.tokens_per_step > 3
    assert (
        sooner.generate(model, **inputs, **keywords, num_assistant_tokens=1).sooner_stats.passes
        > ours.sooner_stats.passes
    )
    assert ours.sooner_stats.total.drafted <= 3 * ours.sooner_stats.total.steps


def test_a_processor_sees_the_ids_of_its_own_row_with_its_padding() -> None:
    """What a processor sees in plain generate, row by row, is what it sees here, and nothing else."""
    model, inputs = tiny("llama", "sdpa"), batch([2, 6, 4])
    keywords = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    seen: list[set[tuple[int, ...]]] = [set(), set()]

    def spy(rows: set[tuple[int, ...]]) -> LogitsProcessorList:
        def see(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            rows.update(map(tuple, ids.tolist()))
            return scores

        return LogitsProcessorList([see])

    model.generate(**inputs, **keywords, logits_processor=spy(seen[0]))
    sooner.generate(model, **inputs, **keywords, draft="none", logits_processor=spy(seen[1]))
    assert seen[0] == seen[1]
    sooner.generate(model, **inputs, **keywords, assistant_model=model, logits_processor=spy(seen[1]))
    assert seen[0] == seen[1], "guesses that are right bring no other ids"


def test_a_prefix_function_is_asked_by_the_place_of_its_prompt() -> None:
    model, inputs = tiny("llama", "sdpa"), batch([2, 6, 4])

    def allowed(prompt: int, ids: torch.Tensor) -> list[int]:
        return [10 + prompt * 20 + (len(ids) + i) % 7 for i in range(3)]

    plain, ours = both(model, inputs, {}, max_new_tokens=12, do_sample=False, prefix_allowed_tokens_fn=allowed)
    assert torch.equal(plain, ours)


def test_a_criterion_ends_a_row_in_the_middle_of_an_accepted_run() -> None:
    """The assistant is always right, so runs are 11 tokens long; the criterion must end one inside."""
    model, inputs = tiny("llama", "sdpa"), batch([2, 6, 4])
    wishes = {"assistant_model": model, "assistant_confidence_threshold": 0.0, "num_assistant_tokens": 10}

    def much(ids: torch.Tensor, scores: Any) -> torch.Tensor:
        return ids[:, 6:].sum(-1) > 400

    criteria = StoppingCriteriaList([much])
    plain, ours = both(model, inputs, wishes, max_new_tokens=40, do_sample=False, stopping_criteria=criteria)
    assert torch.equal(plain, ours)
    assert ours.shape[1] < 46


def test_without_an_end_of_text_id_rows_go_on_until_all_have_met_a_criterion() -> None:
    model, inputs = tiny("llama", "sdpa"), batch([2, 6, 4, 9])

    def meets(ids: torch.Tensor, scores: Any) -> torch.Tensor:
        return ids.sum(-1) % 5 == 0

    criteria = StoppingCriteriaList([meets])
    keywords = {"do_sample": False, "eos_token_id": None, "stopping_criteria": criteria}
    plain, ours = both(model, inputs, {"assistant_model": model}, max_new_tokens=50, **keywords)
    assert torch.equal(plain, ours)
    assert ours.shape[1] < 59


def test_a_criterion_is_given_the_scores_if_they_are_asked_for() -> None:
    model, inputs = tiny("llama", "sdpa"), batch([6])
    seen: list[list[tuple[int, ...]]] = [[], []]

    def note(into: list[tuple[int, ...]]) -> StoppingCriteriaList:
        return StoppingCriteriaList(
            [lambda ids, scores: (into.append((len(scores), *scores[-1].shape)), False)[1]]
        )

    keywords = {"max_new_tokens": 9, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    # A criterion may answer with a bool here; transformers itself wants a tensor.
    plain = StoppingCriteriaList([lambda ids, scores: torch.tensor([note(seen[0])[0](ids, scores)])])
    model.generate(**inputs, **keywords, stopping_criteria=plain)
    sooner.generate(model, **inputs, **keywords, stopping_criteria=note(seen[1]))
    assert seen[0] == seen[1]


def test_stop_strings_end_where_transformers_ends(tmp_path: Path) -> None:
    """As custom_generate transformers forgets the tokenizer that stop strings need; it is handed on."""
    model = AutoModelForCausalLM.from_pretrained(make_tiny(tmp_path, seed=5)).eval()
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    inputs = tokenizer(
        ["the same text", "once upon a time"], return_tensors="pt", padding=True, padding_side="left"
    )
    keywords = {"max_new_tokens": 60, "do_sample": False, "eos_token_id": 0, "pad_token_id": 0}
    text = tokenizer.batch_decode(model.generate(**inputs, **keywords)[:, inputs["input_ids"].shape[1] :])
    stops = [re.findall(r"[ -~]{2}", part)[4] for part in text]
    plain, ours = both(model, dict(inputs), {}, **keywords, stop_strings=stops, tokenizer=tokenizer)
    assert torch.equal(plain, ours)
    assert ours.shape[1] < inputs["input_ids"].shape[1] + 60


def test_a_configuration_of_the_model_and_one_from_a_file_are_obeyed(tmp_path: Path) -> None:
    model, inputs = tiny("llama", "sdpa"), batch([2, 6, 4])
    wanted = GenerationConfig(
        max_new_tokens=11, repetition_penalty=1.5, do_sample=False, pad_token_id=0, eos_token_id=9
    )
    wanted.save_pretrained(tmp_path)
    read = GenerationConfig.from_pretrained(tmp_path)
    plain = model.generate(**inputs, generation_config=wanted)
    assert torch.equal(plain, model.generate(**inputs, generation_config=read, custom_generate=sooner.generate))
    assert torch.equal(plain, sooner.generate(model, **inputs, generation_config=read))
    model.generation_config = read
    assert torch.equal(plain, sooner.generate(model, **inputs))


def test_the_heuristic_schedule_grows_and_shrinks_and_is_forgotten() -> None:
    model, inputs = tiny("llama", "sdpa"), batch([6])
    keywords = {
        "assistant_model": model,
        "assistant_confidence_threshold": 0.0,
        "num_assistant_tokens": 2,
        "num_assistant_tokens_schedule": "heuristic",
        "max_new_tokens": 30,
        "do_sample": False,
    }
    first, second = (sooner.generate(model, **inputs, **keywords).sooner_stats for _ in range(2))
    # 2, 4, 6 and 8 guesses, each with its bonus, are 24 tokens; the fifth pass brings the last 6.
    assert first.passes == second.passes == 5
    assert not hasattr(model.generation_config, "num_assistant_tokens_now")


@pytest.mark.parametrize("draft", ["lookup", "none"])
def test_a_seed_fixes_the_text_whatever_guesses(draft: str) -> None:
    model, inputs = tiny("llama", "sdpa"), batch(LENGTHS)
    keywords = {"max_new_tokens": 24, "do_sample": True, "temperature": 0.7, "top_k": 20, "seed": 11}
    first = sooner.generate(model, **inputs, **keywords, assistant_model=model)
    assert torch.equal(first, model.generate(**inputs, **keywords, draft=draft, custom_generate=sooner.generate))
    other = sooner.generate(model, **inputs, **(keywords | {"seed": 12}))
    assert first.shape != other.shape or not torch.equal(first, other)


def test_without_a_seed_the_generator_of_torch_decides_as_in_transformers() -> None:
    model, inputs = tiny("llama", "sdpa"), batch([2, 6, 4])
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(sooner.generate(model, **inputs, do_sample=True, max_new_tokens=12, eos_token_id=None))
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])


def test_rows_of_one_prompt_are_drawn_apart() -> None:
    model = tiny("llama", "sdpa")
    keywords = {
        "do_sample": True,
        "max_new_tokens": 12,
        "eos_token_id": None,
        "seed": 3,
        "num_return_sequences": 4,
    }
    ours = model.generate(**batch([2, 6]), **keywords, custom_generate=sooner.generate)
    assert ours.shape == (8, 18)
    assert len({tuple(row) for row in ours.tolist()}) == 8
    assert all(torch.equal(ours[0, :6], row[:6]) for row in ours[:4])


def test_a_processor_given_twice_is_the_callers_own() -> None:
    """transformers lets a caller's own warper replace the one its keyword makes; so does this."""
    model, inputs = tiny("llama", "sdpa"), batch([2, 6, 4])
    own = LogitsProcessorList([TopKLogitsWarper(top_k=1)])
    ours = sooner.generate(model, **inputs, do_sample=True, max_new_tokens=9, logits_processor=own)
    assert torch.equal(ours, model.generate(**inputs, do_sample=False, max_new_tokens=9))
