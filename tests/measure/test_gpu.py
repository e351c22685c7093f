"""benchmarks/gpu.py without a GPU: everything that does not depend on the device, on a tiny model."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
TRIED = ["--device", "cpu", "--tiny", "--dtype", "float32", "--tokens", "12", "--batches", "2", "--contexts", "64"]


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu", ROOT / "benchmarks" / "gpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        patch.setitem(sys.modules, "gpu", module)
        spec.loader.exec_module(module)
    return module


def run(gpu: ModuleType, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, dict[str, Any]]:
    status = gpu.main([*TRIED, *more])
    lines = capsys.readouterr().out.splitlines()
    texts = [line.split("│") for line in lines if line.startswith("│ ") and "_2 " in line]
    assert all(cells[-2].strip() in ("right", "NO") for cells in texts)  # every column has its heading
    return status, json.loads(lines[-1])


def test_a_right_device_passes_and_every_cell_is_there(
    gpu: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = run(gpu, capsys, "--acceptance", "0.5,1.0")
    assert (status, found["equal"], found["right"], found["skipped"]) == (0, True, True, [])
    assert list(found["texts"]) == [
        "transformers_2",
        *(f"{what}_2{law}" for what in ("plain", "0.5", "1.0") for law in ("", "_sampled")),
    ]
    assert found["texts"]["plain_2"]["tokens_a_step"] == 1
    assert found["texts"]["1.0_2"]["tokens_a_step"] == 6  # 12 tokens in two steps of 8 and 4
    assert 1 < found["texts"]["0.5_2"]["tokens_a_step"] < 4
    assert found["rows"]["chain_8"] <= found["rows"]["bound"]
    assert found["passes"]["64_recorded_8"] > 0


def test_a_device_that_computes_otherwise_fails(
    gpu: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    true_walk, calls = gpu.walk, []

    def walk(model: Any) -> list[torch.Tensor]:
        calls.append(model)
        found = true_walk(model)
        return found if len(calls) == 1 else [logits + 0.01 * (i == 7) for i, logits in enumerate(found)]

    monkeypatch.setattr(gpu, "walk", walk)
    status, found = run(gpu, capsys)
    assert (status, found["equal"]) == (1, False)


def test_a_wrong_text_fails(
    gpu: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = gpu._counted
    monkeypatch.setattr(
        gpu, "_counted", lambda *arguments: counted(*arguments).index_fill(1, torch.tensor([3]), 0)
    )
    status, found = run(gpu, capsys)
    assert (status, found["right"]) == (1, False)


def test_what_there_was_no_time_for_is_said(gpu: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = run(gpu, capsys, "--minutes", "0")
    assert status == 0
    assert "passes at 64" in found["skipped"]
    assert "plain_2" in found["skipped"]


def test_without_a_gpu_the_script_says_how_it_can_be_tried() -> None:
    environment = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [ROOT / "scripts" / "gpu_check"], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2
    assert "sees no GPU here; --device cpu --tiny" in done.stderr
