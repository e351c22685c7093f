"""A draft model made of the target's own layers: it learns, it can be killed, and drafts like any other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from sooner.errors import ConfigError
from sooner.llm import LLM
from sooner.model.load import Loaded, load
from sooner.model.pruned import Pruned, spread
from sooner.params import SamplingParams
from sooner.train import draft
from sooner.train.features import Document
from sooner.train.loop import Plan, Progress
from sooner.train.recipe import Recipe
from tests.tiny import make_tiny
from tests.train.test_eagle import documents

RECIPE = Recipe(window=16, batch=2, unroll=3, share=0.5, held_out=60)
PLAN = Plan(30, 3e-3, every=10, save_s=0.0)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load(str(make_tiny(tmp_path_factory.mktemp("target"), seed=3, layers=4)), dtype="float32", device="cpu")


def written(target: Loaded) -> list[Document]:
    """Texts of the target's own."""
    prompts = [list(d.tokens[:6]) for d in documents()]
    results = LLM(target, "none").generate(prompts, SamplingParams(max_tokens=26))
    return [Document((*prompt, *r.token_ids), 6) for prompt, r in zip(prompts, results, strict=True)]


def accepted(target: Loaded, folder: Path) -> int:
    """Guesses that were right on prompts trained with, once the texts are seen to be the target's own."""
    prompts = [list(d.tokens[:6]) for d in documents(12)]
    params = SamplingParams(max_tokens=24)
    plain = LLM(target, "none").generate(prompts, params)
    drafted = LLM(target, f"model:{folder}", k=3, dtype="float32", device="cpu").generate(prompts, params)
    assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
    return sum(r.stats.accepted for r in drafted)


def go(target: Loaded, out: Path, plan: Plan = PLAN, kill_at: int | None = None) -> None:
    def report(stage: str, now: Progress) -> None:
        if stage == "training" and now.step == kill_at:
            raise KeyboardInterrupt

    out.mkdir(exist_ok=True)
    ends = target.model.ends()  # type: ignore[attr-defined]  # tiny Llamas have them
    draft.train(target.model, ends, target.name, written(target), out, RECIPE, plan, report, layers=2)


def test_it_learns_and_drafts_as_an_ordinary_model(target: Loaded, tmp_path: Path) -> None:
    go(target, tmp_path, Plan(200, 1e-2, every=40))
    entries = json.loads((tmp_path / "history.json").read_text())
    assert entries[-1]["loss"] < 0.8 * entries[0]["loss"]
    notes = json.loads((tmp_path / "config.json").read_text())["sooner"]
    assert (notes["layers"], notes["steps"]) == ([0, 3], 200)
    go(target, tmp_path / "raw", Plan(1))
    assert accepted(target, tmp_path) > 2 * accepted(target, tmp_path / "raw")


def test_a_run_killed_half_way_ends_with_the_same_weights(target: Loaded, tmp_path: Path) -> None:
    go(target, tmp_path / "a")
    with pytest.raises(KeyboardInterrupt):
        go(target, tmp_path / "b", kill_at=17)
    go(target, tmp_path / "b")
    a, b = (AutoModelForCausalLM.from_pretrained(tmp_path / x).state_dict() for x in "ab")
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_the_layers_kept_are_the_targets_and_embedding_and_head_stay(target: Loaded, tmp_path: Path) -> None:
    go(target, tmp_path)
    whole = AutoModelForCausalLM.from_pretrained(target.name).state_dict()
    fresh = Pruned(target.name, 2, torch.zeros(1)).module.state_dict()
    for name in ("self_attn.q_proj.weight", "mlp.down_proj.weight", "input_layernorm.weight"):
        assert torch.equal(fresh[f"model.layers.0.{name}"], whole[f"model.layers.0.{name}"])
        assert torch.equal(fresh[f"model.layers.1.{name}"], whole[f"model.layers.3.{name}"])
    trained = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(trained[name], whole[name])
    assert not torch.equal(
        trained["model.layers.0.mlp.down_proj.weight"], whole["model.layers.0.mlp.down_proj.weight"]
    )


@pytest.mark.parametrize(
    ("total", "count", "kept"), [(30, 4, [0, 10, 19, 29]), (4, 1, [0]), (6, 5, [0, 1, 2, 4, 5])]
)
def test_layers_are_kept_at_even_distances(total: int, count: int, kept: list[int]) -> None:
    assert spread(total, count) == kept


@pytest.mark.parametrize("count", [0, 4, 9])
def test_a_number_of_layers_without_sense_is_named(count: int) -> None:
    with pytest.raises(ConfigError, match="layers must be from 1 to 3"):
        spread(4, count)
