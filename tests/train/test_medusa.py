"""Training Medusa heads from text to files on a tiny target: they learn, they can be killed, they draft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sooner.core.tree import Draft
from sooner.draft.medusa import MedusaDrafter
from sooner.errors import ConfigError, ModelError
from sooner.heads import medusa as files
from sooner.llm import LLM
from sooner.model.load import Loaded
from sooner.params import SamplingParams
from sooner.train import medusa
from sooner.train.loop import Plan, Progress
from sooner.train.recipe import Recipe
from tests.train.test_eagle import documents, target

__all__ = ["target"]  # a fixture

RECIPE = Recipe(vocab=64, window=16, batch=2, unroll=3, share=0.5, held_out=60)
PLAN = Plan(30, 1e-2, every=10, save_s=0.0)


def go(target: Loaded, out: Path, plan: Plan = PLAN, kill_at: int | None = None, blocks: int = 1) -> None:
    def report(stage: str, now: Progress) -> None:
        if stage == "training" and now.step == kill_at:
            raise KeyboardInterrupt

    out.mkdir(exist_ok=True)
    ends = target.model.ends()  # type: ignore[attr-defined]  # tiny Llamas have them
    medusa.train(target.model, ends, "tiny", documents(), out, RECIPE, plan, report, blocks=blocks)


@pytest.mark.parametrize("blocks", [1, 2])
def test_the_heads_learn_and_leave_whole_files(target: Loaded, tmp_path: Path, blocks: int) -> None:
    go(target, tmp_path, Plan(200, 1e-2, every=40), blocks=blocks)
    entries = json.loads((tmp_path / "history.json").read_text())
    assert entries[-1]["held_out_loss"] < 0.9 * entries[0]["held_out_loss"]
    assert entries[-1]["tree"] > 1.0
    read = files.load(tmp_path)
    assert [len(head.blocks) for head in read.heads] == [blocks] * 3
    assert read.ids is not None
    assert len(read.ids) == 64
    notes = json.loads((tmp_path / "config.json").read_text())["sooner"]
    assert (notes["target"], notes["steps"], notes["data_tokens"]) == ("tiny", 200, 960)
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_killed_half_way_ends_with_the_same_weights(target: Loaded, tmp_path: Path) -> None:
    go(target, tmp_path / "a")
    with pytest.raises(KeyboardInterrupt):
        go(target, tmp_path / "b", kill_at=17)
    go(target, tmp_path / "b")
    a, b = (files.load(tmp_path / x) for x in "ab")
    for one, other in zip(a.heads, b.heads, strict=True):
        assert torch.equal(one.blocks[0].weight, other.blocks[0].weight)


def test_trained_heads_draft_and_the_text_is_the_targets_own(target: Loaded, tmp_path: Path) -> None:
    go(target, tmp_path)
    prompts = [list(d.tokens[:8]) for d in documents(6)]
    params = SamplingParams(max_tokens=24)
    plain = LLM(target, "none").generate(prompts, params)
    drafted = LLM(target, f"medusa:{tmp_path}", k=3).generate(prompts, params)
    assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
    assert sum(r.stats.drafted for r in drafted) > 0


def test_untrained_heads_pass_the_targets_state_on() -> None:
    blocks = medusa.Blocks(2, 2, 8)
    x = torch.randn(5, 8)
    assert all(torch.equal(seen, x) for seen in blocks(x))


def test_heads_of_no_block_are_named(target: Loaded, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="blocks"):
        go(target, tmp_path, blocks=0)


@pytest.mark.parametrize("ids", [[3, 3], [-1, 2]])
def test_a_token_map_without_sense_is_named(target: Loaded, tmp_path: Path, ids: list[int]) -> None:
    heads = medusa.Blocks(1, 1, 8).exported(torch.tensor(ids))
    files.save(tmp_path, heads, notes={})
    with pytest.raises(ModelError, match="token map"):
        files.load(tmp_path)


def test_heads_with_a_token_map_guess_no_other_ids(
    target: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go(target, tmp_path)
    read = files.load(tmp_path)
    assert read.ids is not None
    allowed = set(read.ids.tolist())
    guessed: set[int] = set()
    propose = MedusaDrafter.propose

    def watched(*args: Any) -> list[Draft]:
        drafts = propose(*args)
        guessed.update(token for draft in drafts for token in draft.tokens)
        return drafts

    monkeypatch.setattr(MedusaDrafter, "propose", watched)
    prompts = [list(d.tokens[:8]) for d in documents(6)]
    LLM(target, f"medusa:{tmp_path}", k=3).generate(prompts, SamplingParams(max_tokens=24))
    assert guessed
    assert guessed <= allowed
