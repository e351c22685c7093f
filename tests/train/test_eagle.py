"""Training a head from text to checkpoint on a tiny target: it learns, it can be killed, its files are whole."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sooner.errors import ConfigError, ModelError
from sooner.heads import checkpoint
from sooner.model.load import Loaded, load
from sooner.train import eagle
from sooner.train.features import Document, Store, digest, frequent, shards
from sooner.train.loop import Plan, Progress
from sooner.train.recipe import Recipe, split
from tests.tiny import VOCAB, make_tiny

RECIPE = Recipe(vocab=64, window=16, batch=2, unroll=3, share=0.5, held_out=60)
PLAN = Plan(30, 3e-3, every=10, save_s=0.0)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    folder = make_tiny(tmp_path_factory.mktemp("target"), seed=3, layers=4)
    return load(str(folder), dtype="float32", device="cpu")


def documents(count: int = 40, length: int = 24) -> list[Document]:
    """Texts that repeat themselves with a period of four."""
    generator = torch.Generator().manual_seed(0)
    texts = []
    for _ in range(count):
        start = int(torch.randint(3, 40, (), generator=generator))
        texts.append(Document(tuple(start + i % 4 for i in range(length)), answer=4))
    return texts


def go(target: Loaded, out: Path, plan: Plan = PLAN, kill_at: int | None = None) -> list[Progress]:
    told: list[Progress] = []

    def report(stage: str, now: Progress) -> None:
        told.append(now)
        if stage == "training" and now.step == kill_at:
            raise KeyboardInterrupt

    out.mkdir(exist_ok=True)
    ends = target.model.ends()  # type: ignore[attr-defined]  # tiny Llamas have them
    eagle.train(target.model, ends, "tiny", documents(), out, RECIPE, plan, report)
    return told


def test_it_learns_and_leaves_a_whole_checkpoint(target: Loaded, tmp_path: Path) -> None:
    told = go(target, tmp_path, Plan(200, 3e-3, every=40))
    entries = json.loads((tmp_path / "history.json").read_text())
    assert entries[-1]["held_out_loss"] < 0.8 * entries[0]["held_out_loss"]
    assert 1.0 <= entries[-1]["chain"] <= entries[-1]["tree"] <= 4.0
    assert told[-1].step == 200
    read = checkpoint.load(tmp_path)
    assert read.taps == (1, 2, 3)
    assert read.ids is not None
    assert len(read.ids) == 64
    notes = read.settings["sooner"]
    assert (notes["target"], notes["steps"], notes["data_tokens"]) == ("tiny", 200, 960)
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_killed_half_way_ends_with_the_same_weights(target: Loaded, tmp_path: Path) -> None:
    go(target, tmp_path / "a")
    with pytest.raises(KeyboardInterrupt):
        go(target, tmp_path / "b", kill_at=17)
    go(target, tmp_path / "b")
    a, b = (checkpoint.load(tmp_path / x).head.state_dict() for x in "ab")
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_features_are_those_of_the_document_alone_and_not_made_twice(target: Loaded, tmp_path: Path) -> None:
    ends = target.model.ends()  # type: ignore[attr-defined]  # tiny Llamas have them
    texts = documents(5, 9)
    store = Store(tmp_path, (1, 2, 3), torch.arange(VOCAB), "tiny", "text")
    store.fill(target.model, ends, 0, texts)
    made = store.path(0).stat().st_mtime_ns
    store.fill(target.model, ends, 0, texts)
    assert store.path(0).stat().st_mtime_ns == made
    store.fill(target.model, ends, 1, texts[2:3])
    whole, alone = store.window(0, 18, 9), store.window(1, 0, 9)
    assert whole.tokens.tolist() == list(texts[2].tokens)
    assert torch.allclose(whole.features, alone.features, atol=1e-5)
    assert whole.first.tolist() == [True] + [False] * 8
    assert whole.answer.tolist() == [False] * 4 + [True] * 5
    assert torch.allclose(whole.probs.float().sum(-1), torch.ones(9), atol=1e-2)
    assert target.model.lanes.in_use == 0


def test_the_law_kept_is_the_targets_own(target: Loaded, tmp_path: Path) -> None:
    """Over the whole vocabulary the first id kept is the target's likeliest next token."""
    from sooner.core.step import Segment, pack

    text = documents(1, 12)[0]
    store = Store(tmp_path, (1, 2, 3), torch.arange(VOCAB), "tiny", "text")
    store.fill(target.model, target.model.ends(), 0, [text])  # type: ignore[attr-defined]
    lane = target.model.lanes.open()
    step = pack([Segment(lane, 0, text.tokens)])
    logits = target.model.forward(step, rows=torch.arange(12)).logits
    target.model.lanes.close(lane)
    assert store.window(0, 0, 12).ids[:, 0].tolist() == logits.argmax(-1).tolist()


def test_a_document_longer_than_a_pass_goes_through_in_pieces(
    target: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = target.model.ends()  # type: ignore[attr-defined]  # tiny Llamas have them
    long = [Document(tuple(3 + i % 50 for i in range(100)))]
    whole = Store(tmp_path / "a", (1, 2, 3), torch.arange(VOCAB), "tiny", "text")
    whole.fill(target.model, ends, 0, long)
    monkeypatch.setattr("sooner.train.features._ROWS", 32)
    pieces = Store(tmp_path / "b", (1, 2, 3), torch.arange(VOCAB), "tiny", "text")
    pieces.fill(target.model, ends, 0, long)
    assert torch.allclose(whole.window(0, 0, 100).features, pieces.window(0, 0, 100).features, atol=1e-4)


def test_features_of_another_run_are_not_mixed_in(tmp_path: Path) -> None:
    Store(tmp_path, (1, 2, 3), torch.arange(8), "tiny", digest(documents()))
    others = (((1, 2, 3), 9, documents()), ((0, 2, 3), 8, documents()), ((1, 2, 3), 8, documents(39)))
    for taps, vocab, text in others:
        with pytest.raises(ModelError, match="another run"):
            Store(tmp_path, taps, torch.arange(vocab), "tiny", digest(text))


def test_the_vocabulary_is_what_the_target_wrote_most() -> None:
    texts = [Document((9, 9, 9, 1, 2, 2), answer=3), Document((5, 2, 5), answer=0)]
    ids, covered = frequent(texts, 2, 10)
    assert ids.tolist() == [2, 5]
    assert covered == pytest.approx(5 / 6)


def test_shards_and_the_held_out_part_leave_nothing_out() -> None:
    texts = documents(40, 24)
    learn, held_out = split(texts, 100)
    assert len(learn) + len(held_out) == 40
    assert 72 <= sum(len(d.tokens) for d in held_out) <= 120
    assert [d for group in shards(learn, 100) for d in group] == learn
    assert all(sum(len(d.tokens) for d in group) < 100 + 24 for group in shards(learn, 100))


def test_too_little_text_is_named(target: Loaded, tmp_path: Path) -> None:
    few = [Document((3, 4, 5))] * 4
    with pytest.raises(ConfigError, match="too little text"):
        eagle.train(
            target.model, target.model.ends(), "tiny", few, tmp_path, RECIPE, PLAN, lambda *_: None  # type: ignore[attr-defined]
        )  # fmt: skip


@pytest.mark.parametrize("bad", [{"vocab": 0}, {"window": 4}, {"share": 0.0}, {"share": 1.5}])
def test_a_recipe_without_sense_is_named(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        replace(RECIPE, **bad)
