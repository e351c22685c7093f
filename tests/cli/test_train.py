"""`sooner train`: from text to a drafter, and what is told to whoever leaves something out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sooner.heads import checkpoint, medusa
from tests.cli.conftest import Sooner
from tests.tiny import make_tiny

SMALL = ("--steps", 4, "--vocab", 32, "--window", 16, "--batch", 2, "--every", 2, "--dtype", "float32")


def test_text_becomes_a_head(sooner: Sooner, tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "model", seed=1, layers=4)
    text, out = tmp_path / "text.jsonl", tmp_path / "head"
    text.write_text(
        '{"prompt": "the same text, ", "response": "sooner. the end of the text ends the text."}\n' * 20
    )
    ended = sooner("train", "eagle", "--model", model, "--data", text, "--out", out, *SMALL)
    assert ended.status == 0, ended.err
    assert "128 tokens in" in ended.out
    assert "tokens a step" in ended.out
    assert checkpoint.load(out).head.config.draft_vocab == 32


def test_a_model_writes_what_its_medusa_heads_learn_from(
    sooner: Sooner, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sooner.train.text.AT_ONCE", 8)
    ended = sooner(
        "train", "medusa", "--model", tiny, "--self-generate", 900, "--heads", 2, "--out", tmp_path, *SMALL
    )
    assert ended.status == 0, ended.err
    assert "128 tokens in" in ended.out
    assert len(medusa.load(tmp_path).heads) == 2
    drafted = sooner(
        "generate", "the end", "--model", tiny, "--draft", f"medusa:{tmp_path}", "--dtype", "float32", "--json"
    )
    assert drafted.status == 0, drafted.err


def test_layers_of_a_model_become_a_draft_model(sooner: Sooner, tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "model", seed=1, layers=4)
    text, out = tmp_path / "text.jsonl", tmp_path / "draft"
    text.write_text('{"text": "the same text, sooner. the end of the text ends the text."}\n' * 20)
    small = [option for i in range(0, len(SMALL), 2) if SMALL[i] != "--vocab" for option in SMALL[i : i + 2]]
    ended = sooner("train", "draft", "--model", model, "--data", text, "--layers", 2, "--out", out, *small)
    assert ended.status == 0, ended.err
    drafted = sooner(
        "generate",
        "the end",
        "--model",
        model,
        "--draft",
        f"model:{out}",
        "--dtype",
        "float32",
        "--k",
        2,
        "--json",
    )
    assert drafted.status == 0, drafted.err
    assert json.loads(drafted.out)["stats"]["drafted"] > 0


def test_missing_text_is_named(sooner: Sooner, tiny: Path, tmp_path: Path) -> None:
    missing = sooner("train", "eagle", "--model", tiny, "--out", tmp_path / "x")
    assert missing.complaint.startswith("data is missing")
    nowhere = sooner("train", "eagle", "--model", tiny, "--out", tmp_path / "x", "--data", tmp_path / "nowhere")
    assert "is not there" in nowhere.complaint


def test_a_model_writes_its_own_warm_table(sooner: Sooner, tiny: Path, tmp_path: Path) -> None:
    wanted = ("train", "table", "--model", tiny, "--out", tmp_path, "--dtype", "float32")
    ended = sooner(*wanted, "--self-generate", 600)
    assert ended.status == 0, ended.err
    assert "tokens per step" in ended.out
    again = sooner(*wanted)  # counts what is there
    assert (again.status, again.out.split(" pairs")[0]) == (0, ended.out.split(" pairs")[0])
    drafted = sooner(
        "generate",
        "the end of",
        "--model",
        tiny,
        "--draft",
        f"lookup+recycle:{tmp_path / 'table.safetensors'}",
        "--k",
        8,
        "--json",
    )
    assert drafted.status == 0, drafted.err
    assert json.loads(drafted.out)["stats"]["accepted"] > 0


def test_a_table_needs_text(sooner: Sooner, tiny: Path, tmp_path: Path) -> None:
    ended = sooner("train", "table", "--model", tiny, "--out", tmp_path)
    assert "give --self-generate N" in ended.complaint
    assert "--self-generate" in sooner("train", "table", "--out", tmp_path, "--self-generate", -1).complaint
