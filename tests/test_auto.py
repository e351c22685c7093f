"""`draft="auto"`: which table it takes, and when it guesses trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from sooner import shipped
from sooner.config import Budget
from sooner.control.protocol import View
from sooner.draft.table import build, load, save
from sooner.errors import ConfigError
from sooner.heads import checkpoint as eagle_files
from sooner.heads import medusa as medusa_files
from sooner.llm import LLM
from sooner.model import load as loading
from sooner.params import SamplingParams
from sooner.train import eagle, medusa
from sooner.train.loop import Plan
from sooner.train.recipe import Recipe
from tests.tiny import VOCAB, make_tiny
from tests.train.test_eagle import documents, target

__all__ = ["target"]  # a fixture


def budget(llm: LLM) -> Budget:
    [one] = llm.engine.controller.budgets([View("r0", 1, 1)])
    return one


@pytest.mark.parametrize("draft", ["auto", "recycle", "lookup+recycle"])
def test_trees_are_guessed_only_where_their_rows_are_exact(tiny: Path, draft: str) -> None:
    half = loading.load(str(tiny), dtype="bfloat16", device="cpu", runtime="fused")
    assert budget(LLM(half, draft, k=8)) == Budget.chain(8)
    assert budget(LLM(half, draft, k=8, width=3)).width == 3
    half.model.even_trees = True  # type: ignore[attr-defined]  # as a runtime does that promises it
    assert budget(LLM(half, draft, k=8)) == Budget(8, 8, 15)
    assert budget(LLM(str(tiny), draft, k=8, dtype="float32", device="cpu")) == Budget(8, 8, 15)
    assert budget(LLM(str(tiny), "lookup", k=8, dtype="float32", device="cpu")) == Budget.chain(8)


def test_a_table_is_found_by_fingerprint(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = loading.load(str(tiny), dtype="float32", device="cpu")
    assert shipped.find("table", loading.fingerprint(target)) is None
    monkeypatch.setattr(shipped, "DATA", tmp_path / "data")
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / f"table-{loading.fingerprint(target)}.safetensors"
    save(build(VOCAB, {(5, 6): {7: 1.0}}, {}), path)
    assert shipped.find("table", loading.fingerprint(target)) == str(path)
    assert LLM(target).generate("the end", SamplingParams(max_tokens=12)).stats.draft_failures == 0
    other = loading.load(str(make_tiny(tmp_path / "other", seed=1, layers=3)), dtype="float32", device="cpu")
    assert shipped.find("table", loading.fingerprint(other)) is None


@pytest.mark.parametrize("path", sorted(shipped.DATA.glob("table-*")), ids=lambda p: p.stem)
def test_a_shipped_table_is_whole_and_small(path: Path) -> None:
    table = load(path, 1 << 20)
    assert path.stem == f"table-{table.about['fingerprint']}"
    assert path.stat().st_size < 5e6
    assert len(table.keys[1]) > 10_000
    assert load(path, table.vocab).row(divmod(next(iter(table.keys[1])), 1 << 21))


def test_auto_writes_what_none_writes(tiny: Path) -> None:
    for params in (SamplingParams(max_tokens=60), SamplingParams(max_tokens=60, temperature=0.8, seed=2)):
        texts = {
            draft: LLM(str(tiny), draft, k=8, dtype="float32", device="cpu").generate("once upon", params)
            for draft in ("none", "auto")
        }
        assert texts["auto"].token_ids == texts["none"].token_ids
        assert texts["auto"].stats.accepted > 0


@pytest.fixture
def heads_along(target: loading.Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of things that come along, with heads for the target that have been trained for a moment."""
    monkeypatch.setattr(shipped, "DATA", tmp_path)
    plan, recipe = Plan(2), Recipe(vocab=64, window=16, unroll=2, held_out=60)
    ends = target.model.ends()  # type: ignore[attr-defined]  # tiny Llamas have them
    for trained in (eagle, medusa):
        out = tmp_path / f"{trained.__name__.rpartition('.')[2]}-{loading.fingerprint(target)}"
        trained.train(target.model, ends, "tiny", documents(), out, recipe, plan, lambda *_: None)
    return tmp_path


@pytest.mark.usefixtures("heads_along")
@pytest.mark.parametrize("draft", ["eagle", "medusa", "lookup+eagle"])
def test_heads_that_come_along_are_found_without_a_folder(target: loading.Loaded, draft: str) -> None:
    params = SamplingParams(max_tokens=24)
    plain = LLM(target, "none").generate("once upon", params)
    drafted = LLM(target, draft, k=3).generate("once upon", params)
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.drafted > 0


@pytest.mark.parametrize("draft", ["eagle", "medusa", "lookup+eagle"])
def test_a_target_without_heads_is_named(tiny: Path, draft: str) -> None:
    with pytest.raises(ConfigError, match=r"no head comes with the package.*FOLDER"):
        LLM(str(tiny), draft, dtype="float32", device="cpu")


@pytest.mark.parametrize("path", sorted(shipped.DATA.glob("medusa-*")), ids=lambda p: p.name)
def test_shipped_medusa_heads_are_whole_and_small(path: Path) -> None:
    found = medusa_files.load(path)
    assert found.ids is not None
    assert not found.own_lm_heads


@pytest.mark.parametrize("path", sorted(shipped.DATA.glob("eagle-*")), ids=lambda p: p.name)
def test_a_shipped_eagle_head_is_whole_and_says_how_it_was_made(path: Path) -> None:
    found = eagle_files.load(path)
    assert found.ids is not None
    assert {"target", "data_tokens", "steps", "scores"} <= found.settings["sooner"].keys()


def test_what_comes_along_is_small() -> None:
    assert sum(file.stat().st_size for file in shipped.DATA.rglob("*") if file.is_file()) < 30e6
