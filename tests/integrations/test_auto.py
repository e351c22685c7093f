"""Who guesses where nobody is named: the warm table by the model's files; translation; costs from call to call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import sooner
from sooner import shipped
from sooner.config import Budget
from sooner.draft.table import build, save
from sooner.integrations.auto import adaptive
from sooner.model import load as loading
from sooner.model.borrowed import borrow
from tests.draft.test_translate import other_tokenizer
from tests.integrations.prompts import batch
from tests.model.test_hf import tiny
from tests.tiny import VOCAB, make_tiny, tiny_tokenizer


def test_a_model_is_known_by_the_files_it_was_loaded_from(tmp_path: Path) -> None:
    """The drop-in is given no tokenizer; the mark must be that of sooner.LLM, or no table would ever be found."""
    folder = make_tiny(tmp_path / "m", seed=1)
    module = AutoModelForCausalLM.from_pretrained(folder).eval()
    loaded = loading.load(str(folder), dtype="float32", runtime="hf")
    assert loading.fingerprint_at(str(folder), borrow(module)) == loading.fingerprint(loaded)
    assert loading.fingerprint_at("", borrow(module)) is None
    assert loading.fingerprint_at("no-such/model", borrow(module)) is None


def test_auto_guesses_from_the_table_that_comes_for_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts written once are the table; written again every guess of it is right, from the first pass on."""
    folder = make_tiny(tmp_path / "m", seed=3)
    module = AutoModelForCausalLM.from_pretrained(folder).eval()
    inputs = {"input_ids": torch.tensor([[5, 9, 14]]), "max_new_tokens": 30, "do_sample": False}
    plain = sooner.generate(module, **inputs, draft="none")
    cold = sooner.generate(module, **inputs, k=4)
    written = plain[0].tolist()
    pairs: dict[tuple[int, int], Any] = {}
    for one, two, three in zip(written, written[1:], written[2:], strict=False):
        pairs.setdefault((one, two), {})[three] = 40.0
    monkeypatch.setattr(shipped, "DATA", tmp_path)
    mark = loading.fingerprint_at(str(folder), borrow(module))
    save(build(VOCAB, pairs, {}), tmp_path / f"table-{mark}.safetensors")
    warm = sooner.generate(module, **inputs, k=4)
    assert torch.equal(plain, cold)
    assert torch.equal(plain, warm)
    assert warm.sooner_stats.passes < cold.sooner_stats.passes


def test_an_assistant_with_another_tokenizer_is_translated(tmp_path: Path) -> None:
    target = AutoModelForCausalLM.from_pretrained(make_tiny(tmp_path / "target", seed=5)).eval()
    other = other_tokenizer("bpe")
    assistant = tiny("llama", "sdpa", vocab_size=len(other))
    tokenizer = tiny_tokenizer()
    inputs = tokenizer(["once upon a time there was"], return_tensors="pt")
    keywords = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    plain = target.generate(**inputs, **keywords)
    ours = target.generate(
        **inputs,
        **keywords,
        assistant_model=assistant,
        tokenizer=tokenizer,
        assistant_tokenizer=other,
        assistant_confidence_threshold=0.0,
        custom_generate=sooner.generate,
    )
    assert torch.equal(plain, ours)
    assert ours.sooner_stats.total.drafted > 0


def test_costs_of_one_call_are_known_to_the_next_and_nothing_else_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOONER_CACHE", str(tmp_path))
    model = tiny("llama", "sdpa")
    sooner.generate(model, **batch([3, 9]), max_new_tokens=80, do_sample=False, eos_token_id=None)
    assert [path.suffix for path in (tmp_path / "costs").iterdir()] == [".json"]
    controller, _ = adaptive(model, borrow(model), "auto", Budget.chain(4))
    assert controller.costs.passes.seen > 0
