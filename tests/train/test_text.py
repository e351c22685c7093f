"""Text a target writes itself: what is in the shards, and that a run goes on where another stopped."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest

from sooner.errors import ConfigError
from sooner.llm import LLM
from sooner.model.lanes import common_prefix
from sooner.params import SamplingParams
from sooner.train import shards, text
from sooner.train.styles import STYLES, TOPICS


def writer(folder: Path) -> tuple[LLM, text.Recorder]:
    recorder = text.Recorder()
    llm = LLM(str(folder), recorder, k=0, dtype="float32", device="cpu", config=text.engine_config())
    return llm, recorder


def write(model: Path, out: Path, wanted: int) -> int:
    llm, recorder = writer(model)
    return text.write(llm, recorder, out, wanted, seed=3, progress=lambda done, fresh: None)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "SHARD", 400)
    monkeypatch.setattr(text, "AT_ONCE", 8)


@pytest.mark.usefixtures("small")
def test_every_written_token_has_its_row_and_greedy_answers_are_the_targets_own(
    tiny: Path, tmp_path: Path
) -> None:
    held = write(tiny, tmp_path, 1500)
    texts = [one for path in shards.paths(tmp_path) for one in shards.read(path)]
    assert held == sum(one.written for one in texts) >= 1500
    assert {one.kind for one in texts} == set(shards.KINDS)
    plain = LLM(str(tiny), "none", dtype="float32", device="cpu")
    greedy = 0
    for one in texts:
        assert len(one.tops.ids) == len(one.tops.logits) == one.written
        assert all(len(row) == text.TOPS for row in one.tops.ids)
        assert all(row == tuple(sorted(row, reverse=True)) for row in one.tops.logits)
        best = tuple(ids[0] for ids in one.tops.ids)
        if one.kind == "answer" and best == one.tokens[one.prompt :] and greedy < 3:
            greedy += 1
            again = plain.generate(list(one.tokens[: one.prompt]), SamplingParams(max_tokens=one.written))
            assert again.token_ids == one.tokens[one.prompt :]
    assert greedy == 3


@pytest.mark.usefixtures("small")
def test_a_run_goes_on_where_another_stopped(tiny: Path, tmp_path: Path) -> None:
    first = write(tiny, tmp_path, 500)
    before = {path: path.read_bytes() for path in shards.paths(tmp_path)}
    (tmp_path / "shard-00009.unfinished").write_bytes(b"half a shard")
    held = write(tiny, tmp_path, first + 300)
    after = shards.paths(tmp_path)
    assert held >= first + 300
    assert all(path.read_bytes() == content for path, content in before.items())
    assert len(after) > len(before)
    following = [shards.following(path) for path in after]
    assert following == sorted(following)
    assert following[0] > 0
    assert write(tiny, tmp_path, held) >= held  # nothing is missing; what was there stays


@pytest.mark.usefixtures("small")
def test_a_run_that_goes_on_with_enough_text_adds_none(tiny: Path, tmp_path: Path) -> None:
    """It added one text more each time, so a head's features were those of another text and it was refused."""
    held = write(tiny, tmp_path, 500)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert write(tiny, tmp_path, 500) == held
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_an_answer_to_a_long_turn_goes_on_from_the_turn(tiny: Path) -> None:
    """The turn was written under another system prompt, so pasted documents were computed twice."""
    llm, _ = writer(tiny)
    reply, long = llm.encode(" the quick brown fox jumps over the lazy dog" * 4), 0
    for number in range(60):
        conversation, asks = text._conversation(llm, 3, number, set()), []
        with suppress(StopIteration):
            asks.append(next(conversation))
            while True:
                asks.append(conversation.send(reply))
        for turn, answer in pairwise(asks):
            if turn.kind == "turn" and len(turn.prompt) > 100:
                assert common_prefix(turn.prompt, answer.prompt) > len(turn.prompt) - 5
                long += 1
    assert long > 20


def test_a_target_without_a_chat_template_cannot_write_user_turns(tiny: Path, tmp_path: Path) -> None:
    llm, recorder = writer(tiny)
    llm.target.tokenizer.chat_template = None
    with pytest.raises(Exception, match="no chat template"):
        text.write(llm, recorder, tmp_path, 100, seed=0, progress=lambda done, fresh: None)


def test_a_file_that_is_no_shard_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "shard-00000.safetensors"
    path.write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match="not a shard of text"):
        list(shards.read(path))


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.name)
def test_openings_hold_what_their_style_says(style: object) -> None:
    assert isinstance(style, type(STYLES[0]))
    for opening in style.openings:
        assert ("{document}" in opening) == bool(style.document)
        left = opening.replace("{document}", "").replace("{topic}", "")
        assert "{" not in left
        assert style.turn or left or style.document
    assert all(topic == topic.strip() and topic for topic in TOPICS)
