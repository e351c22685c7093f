"""benchmarks/equality.py: silent when texts agree, exact about where they part."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from sooner.model.plain import PlainModel, PlainRun

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "equality.py"


@pytest.fixture(scope="module")
def equality() -> ModuleType:
    spec = importlib.util.spec_from_file_location("equality", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "equality", module)  # dataclasses look their module up
        spec.loader.exec_module(module)
    return module


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    texts = ("the library, the library", "several tokens, several", "the end of the text ends")
    lines = [{"question_id": i, "category": "qa", "turns": [text]} for i, text in enumerate(texts)]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return tmp_path / "trace.jsonl"


def arguments(tiny: Path, trace: Path, *others: str) -> list[str]:
    return ["--model", str(tiny), "--trace", str(trace), "--max-tokens", "30", *others]


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_in_float32_every_drafter_writes_what_transformers_writes(
    equality: ModuleType, tiny: Path, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert equality.main(arguments(tiny, trace)) == 0
    found = last_line(capsys)
    assert found["prompts"] == 3
    assert found["equal"] == {"transformers": 3, "none": 3, "lookup": 3, f"model:{tiny}": 3}
    assert found["divergences"] == []


def test_a_divergence_is_shown_with_place_tokens_and_margin(
    equality: ModuleType,
    tiny: Path,
    trace: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    true_generate = PlainModel.generate

    def lying(self: PlainModel, prompt: list[int], *others: Any) -> PlainRun:
        run = true_generate(self, prompt, *others)
        truth.append((self, prompt, run.tokens))
        wrong = (*run.tokens[:5], (run.tokens[5] + 1) % 320, *run.tokens[6:])
        return replace(run, tokens=wrong if len(truth) == 2 else run.tokens)

    truth: list[tuple[PlainModel, list[int], tuple[int, ...]]] = []
    monkeypatch.setattr(PlainModel, "generate", lying)
    assert equality.main(arguments(tiny, trace, "--drafts", "lookup")) == 1
    found = last_line(capsys)
    assert found["equal"] == {"transformers": 3, "none": 2, "lookup": 2}
    plain, prompt, tokens = truth[1]
    logits = plain.logits([*prompt, *tokens[:5]])
    assert int(logits.argmax()) == tokens[5]
    for divergence in found["divergences"]:
        assert (divergence["question_id"], divergence["position"]) == (1, 5)
        assert (divergence["expected"], divergence["got"]) == ((tokens[5] + 1) % 320, tokens[5])
        margin = float(logits[divergence["expected"]] - logits[divergence["got"]])
        assert divergence["margin"] == pytest.approx(margin)
        assert margin < 0


def test_a_text_that_only_ends_early_has_a_place_but_no_margin(equality: ModuleType) -> None:
    question = equality.Question(7, "qa", ("x",))
    texts = {"none": (1, 2, 3), "lookup": (1, 2)}
    [found] = equality.compare(question, [0], texts, "none", None)
    assert (found.position, found.expected, found.got, found.margin) == (2, 3, None, None)


def test_in_a_narrower_type_transformers_is_reported_but_not_held(
    equality: ModuleType,
    tiny: Path,
    trace: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    true_generate = PlainModel.generate

    def other_rounding(self: PlainModel, *others: Any) -> PlainRun:
        run = true_generate(self, *others)
        return replace(run, tokens=(*run.tokens[:-1], (run.tokens[-1] + 1) % 320))

    monkeypatch.setattr(PlainModel, "generate", other_rounding)
    assert equality.main(arguments(tiny, trace, "--dtype", "bfloat16", "--drafts", "lookup")) == 0
    found = last_line(capsys)
    assert found["held_to"] == "none"
    assert found["equal"]["none"] == found["equal"]["lookup"] == 3
    assert found["equal"]["transformers"] == 0
    assert {divergence["draft"] for divergence in found["divergences"]} == {"transformers"}


def test_a_mistake_is_one_line(
    equality: ModuleType, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert equality.main(arguments(tiny, tmp_path / "nowhere")) == 2
    assert capsys.readouterr().err == f"error: trace {tmp_path / 'nowhere'} does not exist.\n"


def test_the_plain_pass_agrees_with_the_tokens_transformers_chose(tiny: Path) -> None:
    from sooner.model.load import load
    from sooner.params import SamplingParams

    loaded = load(str(tiny), dtype="float32")
    plain = PlainModel(loaded)
    prompt = loaded.encode("the library")
    run = plain.generate(prompt, SamplingParams(max_tokens=8))
    for place, token in enumerate(run.tokens):
        logits = plain.logits([*prompt, *run.tokens[:place]])
        assert logits.dtype == torch.float32
        assert int(logits.argmax()) == token
