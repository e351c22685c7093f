"""`sooner bench`: figures for people and a last line for programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Ended, Sooner

QUESTIONS = [
    (81, "writing", "the library opened at nine, the library closed"),
    (82, "coding", "the end of the text ends the text"),
    (400, "qa", "what comes out is what"),
    (500, "rag", "once upon a time there was a library that was"),
]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    lines = [json.dumps({"question_id": i, "category": c, "turns": [text, "again"]}) for i, c, text in QUESTIONS]
    (tmp_path / "trace.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path / "trace.jsonl"


@pytest.fixture
def bench(sooner: Sooner, tiny: Path, trace: Path) -> Sooner:
    def call(*arguments: object) -> Ended:
        return sooner("bench", "--model", tiny, "--trace", trace, "--max-tokens", 24, *arguments)

    return call


def values(ended: Ended) -> dict[str, Any]:
    """The JSON object of the last line."""
    assert ended.status == 0, ended.err
    found: dict[str, Any] = json.loads(ended.out.splitlines()[-1])
    return found


FIGURES = {
    "tok_s",
    "ratio",
    "tokens_per_step",
    "acceptance",
    "prompts",
    "equal",
    "tokens",
    "prompt_s",
    "decode_s",
}


def test_the_last_line_has_every_figure_of_every_draft(bench: Sooner, tiny: Path) -> None:
    names = ["none", "lookup", f"model:{tiny}"]
    found = values(bench("--drafts", ",".join(names), "--dtype", "float32", "--k", 5))
    assert set(found) == {"drafts", "prompts", "model", "dtype", "device", "settings", "machine"}
    assert (found["prompts"], found["model"], found["dtype"], found["device"]) == (4, str(tiny), "float32", "cpu")
    assert set(found["machine"]) == {"cpu", "cores", "threads", "gpu", "torch", "python", "system"}
    assert list(found["drafts"]) == names
    for name, row in found["drafts"].items():
        assert set(row) == FIGURES | {"by_category"}
        assert row["equal"] == row["prompts"] == 4, name
        assert row["tok_s"] > 0
        assert {group: part["prompts"] for group, part in row["by_category"].items()} == {
            "mt_bench": 2,
            "qa": 1,
            "rag": 1,
        }
        assert all(set(part) == FIGURES for part in row["by_category"].values())
        assert sum(part["tokens"] for part in row["by_category"].values()) == row["tokens"] == 4 * 24
    plain, lookup, model = found["drafts"].values()
    assert (plain["ratio"], plain["tokens_per_step"], plain["acceptance"]) == (1.0, 1.0, None)
    assert lookup["tokens_per_step"] > 1
    assert model["acceptance"] == 1.0  # the target drafting for itself is always right
    assert model["tokens_per_step"] > 2


def test_tables_are_for_people_and_can_be_left_out(bench: Sooner) -> None:
    ended = bench("--limit", 1)
    assert "tokens per step" in ended.out
    assert "accepted / drafted" in ended.out
    assert "mt_bench" in ended.out
    assert "\x1b[" not in ended.out
    assert len(bench("--limit", 1, "--json").out.splitlines()) == 1


def test_plain_decoding_is_always_there_to_compare_with(bench: Sooner) -> None:
    assert list(values(bench("--limit", 1, "--drafts", "lookup"))["drafts"]) == ["none", "lookup"]


def test_transformers_own_generate_takes_its_turn(bench: Sooner) -> None:
    names = ["none", "transformers", "transformers:lookup"]
    found = values(bench("--limit", 2, "--drafts", ",".join(names), "--dtype", "float32"))["drafts"]
    assert list(found) == names
    assert [row["equal"] for row in found.values()] == [2, 2, 2]
    assert [row["tokens"] for row in found.values()] == [48, 48, 48]
    assert found["transformers"]["tokens_per_step"] == 1.0
    assert found["transformers"]["tok_s"] > 0


def test_sampled_texts_are_the_same_for_all_of_ours_and_not_claimed_for_transformers(bench: Sooner) -> None:
    sampling = ("--temperature", 1.0, "--seed", 4, "--dtype", "float32")
    found = values(bench("--limit", 2, "--drafts", "none,lookup,transformers", *sampling))["drafts"]
    assert [row["equal"] for row in found.values()] == [2, 2, None]


def test_a_limit_spreads_over_the_categories_and_a_category_chooses(bench: Sooner) -> None:
    found = values(bench("--limit", 3))
    assert {g: p["prompts"] for g, p in found["drafts"]["none"]["by_category"].items()} == {
        "mt_bench": 1,
        "qa": 1,
        "rag": 1,
    }
    found = values(bench("--category", "coding,qa"))
    assert {g: p["prompts"] for g, p in found["drafts"]["none"]["by_category"].items()} == {"mt_bench": 1, "qa": 1}


def test_raw_and_chat_prompts_are_told_apart(bench: Sooner) -> None:
    raw, chat = values(bench("--limit", 1, "--raw")), values(bench("--limit", 1))
    assert raw["settings"]["raw"] is True
    assert chat["settings"]["raw"] is False


def test_the_profile_says_where_the_time_goes_of_all_that_are_ours(bench: Sooner) -> None:
    names = ("--drafts", "none,lookup,transformers", "--limit", 2, "--profile")
    ended = bench(*names)
    assert "outside the pass" in ended.out
    found = values(ended)
    assert list(found["profile"]) == ["none", "lookup"]
    for parts in found["profile"].values():
        assert 0 < parts["outside"] < 1
        assert parts["pass_s"] < parts["step_s"] < parts["wall_s"]
    assert "profile" not in values(bench("--limit", 1))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--drafts", "none,lokup"), "unknown draft 'lokup'. Did you mean 'lookup'?"),
        (("--drafts", "transformers:x"), "unknown draft 'transformers:x'. Did you mean 'transformers'?"),
        (("--drafts", "lookup,none,lookup"), "draft 'lookup' is named 2 times; name it once."),
        (("--drafts", ""), "unknown draft ''."),
        (("--category", "cooking"), "unknown category 'cooking'. Did you mean 'coding'?"),
        (("--limit", 0), "--limit must be at least 1, got 0."),
        (("--repeat", 0), "--repeat must be at least 1, got 0."),
        (("--k", 65), "--k must be a whole number from 0 to 64, got 65."),
        (("--max-tokens", 0), "--max-tokens must be at least 1, got 0."),
        (("--temperature", "nan"), "--temperature must be a finite number, 0 or more; got nan."),
        (
            ("--max-tokens", 250),
            "question 81 has 27 tokens; with 250 more it does not fit into the model's context of 256.",
        ),
    ],
    ids=str,
)
def test_a_mistake_is_one_line(bench: Sooner, arguments: tuple[object, ...], expected: str) -> None:
    assert bench(*arguments).complaint.startswith(expected)


def test_a_trace_that_is_not_there_is_named(sooner: Sooner, tiny: Path, tmp_path: Path) -> None:
    missing = tmp_path / "nowhere.jsonl"
    assert sooner("bench", "--model", tiny, "--trace", missing).complaint == f"trace {missing} does not exist."


def test_a_broken_line_of_a_trace_is_named(sooner: Sooner, tiny: Path, trace: Path) -> None:
    trace.write_text(trace.read_text() + '{"question_id": 1, "category": "qa"}\n')
    said = sooner("bench", "--model", tiny, "--trace", trace).complaint
    assert said == f"{trace} line 5 has no 'turns'."


def test_a_memory_limit_under_load_is_stated_and_goes_with_concurrency(bench: Sooner) -> None:
    error = bench("--kv-memory", "4MiB").complaint
    assert error == "--kv-memory limits many requests at once; give --concurrency too."
    ended = bench("--kv-memory", "4MiB", "--concurrency", "2", "--limit", 2, "--dtype", "float32")
    assert "at most 4194304 bytes" in ended.err
    assert all(row["failed"] == 0 for row in values(ended)["results"])
