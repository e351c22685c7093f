"""Counting a warm table: what counts, what is held out, what is refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from sooner.draft.combine import CombineDrafter
from sooner.draft.protocol import Tops
from sooner.draft.sources import LookupSource
from sooner.draft.table import TableSource
from sooner.errors import ConfigError
from sooner.train import shards
from sooner.train.shards import Text
from sooner.train.table import Counts, make, try_out

SURE = (20.0, 0.0, 0.0)


def cycle(start: int, length: int, period: int = 7, prompt: int = 2) -> Text:
    """Counts up modulo `period`; the target was sure of every token."""
    tokens = tuple((start + i) % period for i in range(length))
    ids = tuple((token, 8, 9) for token in tokens[prompt:])
    return Text(tokens, prompt, "answer", Tops(ids, (SURE,) * len(ids)))


def test_rows_count_with_their_probabilities() -> None:
    counts = Counts()
    half = (1.0, 1.0, -50.0)
    counts.add(Text((1, 2, 3, 4), 2, "answer", Tops(((3, 5, 6), (4, 5, 6)), (half, SURE))))
    assert counts.rows == 2
    assert counts.after[1, 2] == pytest.approx({3: 0.5, 5: 0.5})
    assert counts.after[2, 3] == pytest.approx({4: 1.0})
    assert counts.after[2,] == pytest.approx({3: 0.5, 5: 0.5})
    assert counts.after.keys() == {(2,), (3,), (1, 2), (2, 3), (1, 2, 3)}


def test_rows_that_are_not_finite_and_prompts_do_not_count() -> None:
    counts = Counts()
    counts.add(Text((1, 2, 3), 2, "answer", Tops(((3, 5),), ((math.nan, 0.0),))))
    assert (counts.rows, dict(counts.after)) == (0, {})
    counts.add(Text((1, 2), 1, "turn", Tops(((2, 5),), ((9.0, 0.0),))))
    assert counts.after.keys() == {(1,)}


def test_triples_seen_once_are_left_out_and_no_shorter_run() -> None:
    counts = Counts()
    counts.add(Text((1, 2, 3, 4), 3, "answer", Tops(((4, 5, 6),), (SURE,))))
    assert counts.worth_keeping().keys() == {(3,), (2, 3)}
    counts.add(Text((1, 2, 3, 7), 3, "answer", Tops(((7, 5, 6),), (SURE,))))
    assert counts.worth_keeping()[1, 2, 3] == pytest.approx({4: 1.0, 7: 1.0})


def test_a_table_of_what_is_written_guesses_it(tmp_path: Path) -> None:
    for number in range(4):
        shards.save(tmp_path, number, [cycle(start, 40) for start in range(5)], 0)
    made, score = make(shards.paths(tmp_path), 10, {"model": "toy"})
    assert [token for token, _ in made.row((3, 4))] == [5]
    assert (made.about["model"], made.about["rows"]) == ("toy", 4 * 5 * 38)
    assert score.tokens == 5 * 37  # one shard was held out; the first token comes with the prompt
    assert score.tokens_per_step > 5
    assert set(made.chances) == {"lookup", "recycle", "table"}
    assert max(made.chances["table"]) > 0.9


def test_what_is_held_out_is_not_in_the_table_that_is_tried(tmp_path: Path) -> None:
    """A table tried on its own text would call every guess of it good."""
    for number, period in enumerate((5, 7, 5)):
        texts = [cycle(start, 12, period) for start in range(4)]
        shards.save(tmp_path, number, texts, 0)
    whole = [tmp_path / f"shard-0000{i}.safetensors" for i in (0, 1, 2)]
    _, other = make(whole, 10, {})
    _, same = make([whole[0], whole[2]], 10, {})
    assert other.tokens_per_step < same.tokens_per_step
    counted, _ = make(whole, 10, {})
    assert [token for token, _ in counted.row((5, 6))] == [0]  # in the end all of it counts


def test_drafts_are_tried_as_an_engine_would() -> None:
    text = cycle(0, 30)
    plain = try_out(CombineDrafter("l", [LookupSource()], floor=0.99), [text])
    assert (plain.tokens, plain.steps, plain.tokens_per_step) == (27, 27, 1.0)
    counts = Counts()
    counts.add(text)
    from sooner.draft.table import build

    table = build(10, counts.after, {})
    drafted = try_out(CombineDrafter("t", [TableSource(table)]), [text])
    assert drafted.tokens == 27
    assert drafted.steps < 10


def test_one_shard_gives_a_table_without_chances(tmp_path: Path) -> None:
    shards.save(tmp_path, 0, [cycle(0, 40)], 0)
    made, score = make(shards.paths(tmp_path), 10, {})
    assert (made.chances, score.steps, score.tokens_per_step) == ({}, 0, 0.0)


def test_nothing_to_count_and_text_of_another_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no shards to count"):
        make([], 10, {})
    shards.save(tmp_path, 0, [cycle(0, 40)], 0)
    with pytest.raises(ConfigError, match="another model's"):
        make(shards.paths(tmp_path), 9, {})
