"""The warm table: what is kept of counts, and which files are refused."""

from __future__ import annotations

import tracemalloc
from array import array
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sooner.draft.source import grade
from sooner.draft.table import LEVEL, RANKS, TRUSTS, WIDTH, Keys, Table, TableSource, build, load, save
from sooner.errors import DraftError

Runs = dict[tuple[int, ...], dict[int, float]]
PAIRS: Runs = {(1, 2): {3: 6.0, 4: 3.0, 5: 1.0}, (7, 8): {9: 1.0}}
SINGLES: Runs = {(2,): {3: 6.0, 6: 6.0}, (8,): {9: 1.0}, (11,): {i: 1.0 for i in range(12)}}
TRIPLES: Runs = {(0, 1, 2): {8: 2.0}, (2, 2, 2): {2: 5.0, 1: 5.0}}


def table(vocab: int = 100) -> Table:
    return build(vocab, PAIRS | SINGLES | TRIPLES, {"model": "toy", "tokens": 9})


def test_a_pair_has_its_continuations_best_first() -> None:
    row = table().row((1, 2))
    assert [token for token, _ in row] == [3, 4, 5]
    expected = [(grade(share) * RANKS + rank) * TRUSTS + 2 for rank, share in enumerate((0.6, 0.3, 0.1))]
    assert [code - LEVEL for _, code in row] == expected  # ten rows: the third grade of trust


def test_ids_beyond_the_tables_own_find_no_other_pair() -> None:
    """The target's vocabulary may be the larger one; a pair's number must not run into its neighbour's."""
    made = build(10, {(1, 2): {3: 1.0}, (2, 0): {4: 1.0}}, {})
    assert made.row((1, 10)) == made.row((0, 12)) == made.row((1, 1 << 20)) == made.row((0, (1 << 21) + 2)) == ()


def test_a_vocabulary_that_keys_cannot_hold_is_refused() -> None:
    with pytest.raises(DraftError, match="at most 2097152 ids"):
        build((1 << 21) + 1, PAIRS, {})


def test_a_table_takes_no_object_for_each_of_its_numbers() -> None:
    """As dicts of pairs the shipped table took 47 MB beside every caller's model."""
    counts: Runs = {(i, i + 1): {i: 1.0, i + 2: 1.0} for i in range(20_000)}
    made = build(30_000, counts, {})
    tracemalloc.start()
    keys = tuple(Keys(keys) for keys in made.keys)
    kept = Table(made.vocab, keys, array("i", made.ends), made.ids, made.codes)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size < 30 * sum(map(len, kept.keys))
    assert all(kept.row((i, i + 1)) == made.row((i, i + 1)) != () for i in range(0, 20_000, 999))


def test_an_unknown_pair_falls_back_to_its_last_token() -> None:
    made = table()
    assert [token for token, _ in made.row((5, 2))] == [token for token, _ in made.row((2,))] == [3, 6]
    assert all(code >= 2 * LEVEL for _, code in made.row((5, 2)))
    assert made.row((1, 99)) == ()


def test_the_longest_key_counts() -> None:
    made = table()
    assert [token for token, _ in made.row((0, 1, 2))] == [8]
    assert all(code < LEVEL for _, code in made.row((0, 1, 2)))
    assert made.row((9, 0, 1, 2)) == made.row((0, 1, 2))
    assert made.row((5, 1, 2)) == made.row((1, 2))


def test_only_the_likeliest_are_kept_and_none_that_is_rare() -> None:
    assert len(table().row((11,))) == WIDTH
    rare = build(100, {(1, 2): {3: 1000.0, 4: 1.0}}, {})
    assert [token for token, _ in rare.row((1, 2))] == [3]


def test_more_counts_are_trusted_more() -> None:
    codes = [build(10, {(1, 2): {3: count}}, {}).row((1, 2))[0][1] - LEVEL for count in (0.3, 2.0, 8.0, 32.0, 1e9)]
    assert codes == [0, 1, 2, 3, 3]


@pytest.mark.parametrize("vocab", [100, 70_000])
def test_what_is_saved_is_read_back(tmp_path: Path, vocab: int) -> None:
    made = table(vocab)
    save(made, tmp_path / "t.safetensors")
    read = load(tmp_path / "t.safetensors", vocab + 5)
    tails = [(*before, last) for before in ((), (1,), (7,), (0, 1), (2, 2)) for last in range(12)]
    assert all(read.row(tail) == made.row(tail) for tail in tails)
    assert read.about == {"model": "toy", "tokens": 9}


def test_a_table_for_more_ids_than_the_target_has_is_refused(tmp_path: Path) -> None:
    save(table(100), tmp_path / "t.safetensors")
    with pytest.raises(DraftError, match="100 ids, but this target has 99"):
        load(tmp_path / "t.safetensors", 99)


def test_a_file_that_is_no_table_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    with pytest.raises(DraftError, match="cannot be read"):
        load(path, 100)
    path.write_bytes(b"nonsense")
    with pytest.raises(DraftError, match="cannot be read"):
        load(path, 100)
    save_file(load_file_of(table(), tmp_path), path)
    with pytest.raises(DraftError, match="not a table of format"):
        load(path, 100)


@pytest.mark.parametrize("part", ["triples", "pairs", "lengths", "ids", "codes"])
def test_a_damaged_table_is_refused(tmp_path: Path, part: str) -> None:
    path = tmp_path / "t.safetensors"
    save(table(), path)
    with safe_open(path, "pt") as file:
        about = file.metadata()
    tensors = load_file(path)
    if part in ("ids", "codes"):
        tensors[part] = tensors[part].clone().fill_(250)
    else:
        tensors[part] = tensors[part][:-1].clone()
    save_file(tensors, path, metadata=about)
    with pytest.raises(DraftError, match="damaged"):
        load(path, 100)


def load_file_of(made: Table, folder: Path) -> dict[str, object]:
    save(made, folder / "other.safetensors")
    found: dict[str, object] = dict(load_file(folder / "other.safetensors"))
    return found


def test_a_source_offers_the_row_of_the_last_two_tokens() -> None:
    source = TableSource(table())
    source.begin([], [])
    assert source.after("r", (), (4, 0, 1, 2)) == table().row((0, 1, 2))
    assert source.after("r", (), (2,)) == table().row((2,))
    codes = [code for last in range(12) for _, code in (*table().row((last,)), *table().row((1, last)))]
    assert max(codes) < len(source.priors)
