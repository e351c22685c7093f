"""The harness's model type, on a stand-in for the harness: what it asks of sooner.generate, where texts end."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.integrations.prompts import batch
from tests.model.test_hf import tiny


class Letters:
    """A tokenizer whose token i is one letter."""

    pad_token_id = 0

    def batch_decode(self, rows: Any) -> list[str]:
        return ["".join(chr(33 + int(token)) for token in row) for row in rows]


class FakeHFLM:
    """What ours uses of the harness's class."""

    def __init__(self, *, model: Any, mixed: torch.dtype | None = None) -> None:
        self.model, self.tokenizer, self.device = model, Letters(), torch.device("cpu")
        self.mixed_precision_dtype = mixed


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    registered: dict[str, type] = {}

    def register_model(name: str) -> Callable[[type], type]:
        return lambda kind: registered.setdefault(name, kind)

    for name, content in {
        "lm_eval": {},
        "lm_eval.__main__": {"cli_evaluate": None},
        "lm_eval.api": {},
        "lm_eval.api.registry": {"register_model": register_model},
        "lm_eval.models": {},
        "lm_eval.models.huggingface": {"HFLM": FakeHFLM},
    }.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "sooner.integrations.lm_eval", raising=False)
    module = importlib.import_module("sooner.integrations.lm_eval")
    assert registered["sooner"] is module.SoonerLM
    yield module
    sys.modules.pop("sooner.integrations.lm_eval", None)


def kept(row: list[int], stop: str) -> str:
    """What the harness keeps of a text."""
    return Letters().batch_decode([row])[0].split(stop)[0]


def test_rows_of_one_batch_end_each_at_its_own_stop_string(adapter: ModuleType) -> None:
    """The harness's criterion would have to see all rows at once; here a row's text is whole up to its stop."""
    model, inputs = tiny("llama", "sdpa"), batch([5, 12, 3])
    model.generation_config.eos_token_id = 2
    plain = model.generate(**inputs, max_new_tokens=30, do_sample=False, pad_token_id=0)[:, 12:].tolist()
    stop = "".join(chr(33 + token) for token in plain[1][4:6])
    for draft in ("none", "lookup"):
        ours = adapter.SoonerLM(model=model, draft=draft, k=8)
        out = ours._model_generate(
            inputs["input_ids"], 42, [stop], attention_mask=inputs["attention_mask"], use_cache=True
        )
        rows = out[:, 12:].tolist()
        assert [kept(row, stop) for row in rows] == [kept(row, stop) for row in plain]
        assert rows[1][6:] == [0] * len(rows[1][6:]), "ended where its stop string did"
        assert out.shape[1] > 12 + 6, "and the others went on"
        assert [one.draft for one in ours.stats] == [draft]


def test_a_stop_string_that_began_in_the_prompt_does_not_count(adapter: ModuleType) -> None:
    """transformers' stop_strings would end the text there, and the harness would score another one."""
    stops = adapter.Stops(Letters(), ["ab"], prompt=2)
    a, b = ord("a") - 33, ord("b") - 33
    assert not stops(torch.tensor([[5, a, b]]), None).any()
    assert stops(torch.tensor([[5, a, a, b], [5, a, b, a]]), None).tolist() == [True, False]


def test_sampling_is_asked_for_only_where_there_is_a_temperature(adapter: ModuleType) -> None:
    seen: list[dict[str, Any]] = []

    def generate(context: Any, **asked: Any) -> Any:
        seen.append(asked)
        return SimpleNamespace(sooner_stats=None)

    ours = adapter.SoonerLM(model=SimpleNamespace(generate=generate), seed=5)
    ids = torch.tensor([[1, 2]])
    ours._model_generate(ids, 9, [], temperature=0.0)
    ours._model_generate(ids, 9, [], temperature=0.7, do_sample=True)
    assert [one.get("temperature") for one in seen] == [None, 0.7]
    assert [one["do_sample"] for one in seen] == [False, True]
    assert {(one["draft"], one["runtime"], one["seed"], one["max_length"]) for one in seen} == {
        ("auto", "auto", 5, 9)
    }


def test_mixed_precision_is_on_while_a_text_is_written(adapter: ModuleType) -> None:
    seen: list[bool] = []

    def generate(context: Any, **asked: Any) -> Any:
        seen.append(torch.is_autocast_enabled("cpu"))
        return SimpleNamespace(sooner_stats=None)

    for mixed in (None, torch.bfloat16):
        ours = adapter.SoonerLM(model=SimpleNamespace(generate=generate), mixed=mixed)
        ours._model_generate(torch.tensor([[1, 2]]), 9, [])
    assert seen == [False, True]
