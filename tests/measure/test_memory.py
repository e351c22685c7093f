"""benchmarks/memory.py: it sees what is taken, and says when that is too much."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.tiny import make_tiny

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "memory.py"


@pytest.fixture(scope="module")
def memory() -> ModuleType:
    spec = importlib.util.spec_from_file_location("memory", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "memory", module)
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with room for our own prompts, which are long in its few tokens."""
    return make_tiny(tmp_path_factory.mktemp("roomy"), seed=3, context=2048)


def run(memory: ModuleType, model: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    status = memory.main(["--model", str(model), "--dtype", "float32", "--tokens", "500", "--batch", "2"])
    return status, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_peak_within_its_limit_passes_and_one_above_it_does_not(
    memory: ModuleType, roomy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "GROWTH", 1.0)
    monkeypatch.setattr(memory, "REST_MB", 10_000)  # whatever else this test process holds
    status, found = run(memory, roomy, capsys)
    assert (status, found["passed"]) == (0, {"peak": True, "growth": True})
    assert found["tokens"] == 500
    assert found["peak_mb"] >= found["loaded_mb"] - 5
    assert found["limit_mb"] == pytest.approx(1.15 * found["weights_mb"] + found["lanes_mb"] + 10_000, abs=0.2)
    monkeypatch.setattr(memory, "REST_MB", 1)
    status, found = run(memory, roomy, capsys)
    assert (status, found["passed"]["peak"]) == (1, False)


def test_memory_that_is_kept_is_growth(
    memory: ModuleType, roomy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    true_decode, kept = memory.decode, []

    def leaking(*arguments: Any) -> float:
        true_decode(*arguments)
        kept.append(torch.ones(5_000_000))  # 19 MB
        size: float = memory.resident() - memory.touched_mb(arguments[0])
        return size

    monkeypatch.setattr(memory, "decode", leaking)
    monkeypatch.setattr(memory, "REST_MB", 1_000)
    status, found = run(memory, roomy, capsys)
    assert (status, found["passed"]["growth"]) == (1, False)
    assert found["growth_mb"] == pytest.approx(19.1, abs=8)


def test_the_sampler_sees_what_was_taken_and_given_back(memory: ModuleType) -> None:
    before = memory.resident()
    with memory.Sampler() as sampler:
        held = torch.ones(25_000_000)  # 95 MB
        pause = torch.ones(2000, 2000)
        while sampler.peak < before + 80:
            pause = pause @ pause * 0  # some time for the sampling thread
        del held
    assert sampler.peak >= before + 80


def test_of_the_lanes_what_was_written_counts(memory: ModuleType, roomy: Path) -> None:
    llm = memory.LLM(str(roomy), "none", dtype="float32")
    lanes = llm.target.model.lanes
    lane = lanes.open()
    lanes.reserve(lane, 0, 1 << 16)
    lanes.store[:, :, lane] = 1
    taken = memory.lanes_mb(llm) / lanes.store.shape[2]
    assert memory.touched_mb(llm) == pytest.approx(taken, rel=0.05)


def test_weights_that_are_shared_count_once(memory: ModuleType, roomy: Path) -> None:
    from transformers import AutoModelForCausalLM

    parameters = AutoModelForCausalLM.from_pretrained(roomy).parameters()
    assert memory.weights_mb(str(roomy), 2) == pytest.approx(sum(p.numel() for p in parameters) * 2 / 2**20)


def test_a_mistake_is_one_line(memory: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert memory.main(["--model", "./nowhere"]) == 2
    assert capsys.readouterr().err.startswith("error: unknown model './nowhere'")
