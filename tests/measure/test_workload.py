"""Reading and choosing prompts: what is wrong with a trace is said by line, and a choice is even."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sooner.errors import ConfigError
from sooner.measure.workload import MT_BENCH_CATEGORIES, Question, choose, read


def write(folder: Path, *lines: object) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def some(*categories: str) -> list[Question]:
    return [Question(number, category, (f"prompt {number}",)) for number, category in enumerate(categories)]


def test_fields_are_read_and_others_left_alone(tmp_path: Path) -> None:
    first = {"question_id": 81, "category": "writing", "turns": ["one", "two"], "reference": ["x"]}
    second = {"question_id": "b", "category": "qa", "turns": ["three\u2028four"]}
    path = write(tmp_path, first, "", json.dumps(second, ensure_ascii=False), "")
    assert read(path) == [Question(81, "writing", ("one", "two")), Question("b", "qa", ("three\u2028four",))]


def test_windows_line_ends_are_no_part_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b'{"question_id": 1, "category": "qa", "turns": ["a"]}\r\n' * 2)
    assert [q.turns for q in read(path)] == [("a",), ("a",)]


GOOD = {"question_id": 1, "category": "qa", "turns": ["a"]}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "is not JSON"),
        ("[1]", "is not a JSON object"),
        ({"category": "qa", "turns": ["a"]}, "has no 'question_id'"),
        ({"question_id": 1, "turns": ["a"]}, "has no 'category'"),
        ({"question_id": 1, "category": "qa"}, "has no 'turns'"),
        ({**GOOD, "question_id": True}, "question_id must be a number or a string, got True"),
        ({**GOOD, "question_id": None}, "question_id must be a number or a string, got None"),
        ({**GOOD, "category": ""}, "category must be a string"),
        ({**GOOD, "category": 3}, "category must be a string"),
        ({**GOOD, "turns": "a"}, "turns must be one or more strings"),
        ({**GOOD, "turns": []}, "turns must be one or more strings"),
        ({**GOOD, "turns": ["a", ""]}, "turns must be one or more strings"),
        (
            {**GOOD, "turns": ["half \ud800"]},
            "strings, none empty, all of valid Unicode",
        ),
    ],
    ids=str,
)
def test_a_bad_line_is_named(tmp_path: Path, line: object, problem: str) -> None:
    path = write(tmp_path, GOOD, "", line)
    with pytest.raises(ConfigError) as error:
        read(path)
    assert f"{path} line 3" in str(error.value)
    assert problem in str(error.value)


def test_a_trace_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere does not exist"):
        read(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"cannot be read: Is a directory"):
        read(tmp_path)
    with pytest.raises(ConfigError, match=r"is empty"):
        read(write(tmp_path, "", ""))
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match=r"latin is not UTF-8 text: .* at byte 3"):
        read(tmp_path / "latin")


def test_the_eight_categories_of_mt_bench_are_one_group() -> None:
    assert len(MT_BENCH_CATEGORIES) == 8
    questions = some(*sorted(MT_BENCH_CATEGORIES), "math_reasoning")
    assert [q.group for q in questions] == ["mt_bench"] * 8 + ["math_reasoning"]


def test_a_limit_takes_groups_in_turn_and_categories_in_turn_within_mt_bench() -> None:
    questions = some("writing", "writing", "math", "qa", "qa", "qa", "rag")
    ids = [q.question_id for q in choose(questions)]
    assert ids == [0, 3, 6, 2, 4, 1, 5]
    assert sorted(ids) == list(range(7))
    for limit in range(1, 9):
        assert [q.question_id for q in choose(questions, limit=limit)] == ids[:limit]


def test_categories_choose_by_category_or_group() -> None:
    questions = some("writing", "math", "qa", "rag")
    assert [q.question_id for q in choose(questions, categories=["mt_bench"])] == [0, 1]
    assert [q.question_id for q in choose(questions, categories=["math", "rag"])] == [1, 3]


def test_a_category_that_does_not_occur_is_refused_with_those_that_do() -> None:
    with pytest.raises(ConfigError, match=r"unknown category 'mth'. Did you mean 'math'\? Allowed: math"):
        choose(some("math"), categories=["mth"])


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"limit must be at least 1, got 0"):
        choose(some("math"), limit=0)
