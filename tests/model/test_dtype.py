"""What `dtype="auto"` chooses on a CPU: the smallest weights that are computed with quickly. Knows no speed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sooner.model import hf, native
from sooner.model.load import load
from sooner.model.native import NativeModel
from tests.model.test_stored import saved


@pytest.fixture(autouse=True)
def _an_older_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    hf.register()
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(tmp_path / "model", "llama")


def kind(folder: Path, runtime: str = "auto", dtype: str = "auto") -> torch.dtype:
    return load(str(folder), device="cpu", runtime=runtime, dtype=dtype).model.lanes.store.dtype


def test_a_processor_without_bfloat16_reads_half_as_much_where_our_kernels_compute(folder: Path) -> None:
    loaded = load(str(folder), device="cpu")
    assert isinstance(loaded.model, NativeModel)
    assert loaded.model.lanes.store.dtype == torch.bfloat16


@pytest.mark.parametrize("runtime", ["fused", "hf"])
def test_torch_computes_in_float32_there(runtime: str, folder: Path) -> None:
    assert kind(folder, runtime=runtime) == torch.float32


def test_what_our_kernels_serve_in_float32_alone_is_read_so(tmp_path: Path) -> None:
    narrow = saved(tmp_path / "narrow", "llama", head_dim=16)
    loaded = load(str(narrow), device="cpu")
    assert isinstance(loaded.model, NativeModel)
    assert loaded.model.lanes.store.dtype == torch.float32


def test_without_a_compiler_it_is_float32(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "serves", lambda source: False)
    assert kind(folder) == torch.float32


def test_a_dtype_that_is_named_is_kept(folder: Path) -> None:
    assert kind(folder, dtype="float32") == torch.float32
