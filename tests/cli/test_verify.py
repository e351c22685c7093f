"""`sooner verify`: a verdict for people, an object for programs, and a status for scripts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Ended, Sooner


@pytest.fixture
def verify(sooner: Sooner, tiny: Path, tmp_path: Path) -> Sooner:
    texts = ("the library, the library", "several tokens, several", "the end of the text ends")
    lines = [json.dumps({"question_id": i, "category": "qa", "turns": [text]}) for i, text in enumerate(texts)]
    (tmp_path / "trace.jsonl").write_text("\n".join(lines))

    def call(*arguments: object) -> Ended:
        given = ("--model", tiny, "--trace", tmp_path / "trace.jsonl", "--dtype", "float32", "--max-tokens", 24)
        return sooner("verify", *given, *arguments)

    return call


def values(ended: Ended) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ended.out)
    return found


def test_identical_texts_pass_and_the_status_says_so(verify: Sooner) -> None:
    ended = verify()
    assert (ended.status, ended.err) == (0, "")
    last = ended.out.splitlines()[-1]
    assert last == "PASS  all 6 texts are, token by token, those of plain decoding."
    assert "3 of 3" in ended.out
    assert "\x1b[" not in ended.out


def test_an_injected_fault_is_called_a_bug_with_status_1(verify: Sooner, tiny: Path) -> None:
    ended = verify("--draft", f"model:{tiny}", "--inject-fault")
    assert ended.status == 1
    assert "Traceback" not in ended.err
    assert "where texts part from plain decoding" in ended.out
    assert any(line.startswith("BUG  ") for line in ended.out.splitlines())
    assert "the injected fault is found" in " ".join(ended.out.split())


def test_json_is_the_whole_verdict_in_one_line(verify: Sooner, tiny: Path) -> None:
    ended = verify("--draft", "lookup", "--draft", f"model:{tiny}", "--prompts", 2, "--json", "--width", 2)
    assert len(ended.out.splitlines()) == 1
    found = values(ended)
    assert (found["verdict"], found["prompts"], found["dtype"], found["device"]) == ("PASS", 2, "float32", "cpu")
    assert [(one["draft"], one["mode"], one["identical"], one["texts"]) for one in found["outcomes"]] == [
        ("lookup", "greedy", 2, 2),
        ("lookup", "sampled", 2, 2),
        (f"model:{tiny}", "greedy", 2, 2),
        (f"model:{tiny}", "sampled", 2, 2),
    ]
    assert set(found["rows"]) == {"chain", "tree", "scale", "bound"}
    broken = values(verify("--draft", f"model:{tiny}", "--inject-fault", "--json"))
    assert broken["verdict"] == "BUG"
    [first, *_] = [one for outcome in broken["outcomes"] for one in outcome["divergences"]]
    assert set(first) == {"question_id", "verdict", "position", "expected", "got", "margin", "bound"}


def test_prompts_of_our_own_serve_those_who_bring_none(sooner: Sooner, tiny: Path) -> None:
    ended = sooner("verify", "--model", tiny, "--prompts", 1, "--max-tokens", 4, "--raw", "--json")
    assert ended.status == 0, ended.err
    assert values(ended)["prompts"] == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--draft", "lokup"), "unknown draft 'lokup'. Did you mean 'lookup'?"),
        (("--draft", "none"), "draft 'none' is plain decoding itself"),
        (("--prompts", 0), "--prompts must be at least 1, got 0."),
        (("--batch", 0), "--batch must be at least 1, got 0."),
        (("--temperature", 0), "--temperature must be above 0"),
        (("--max-tokens", 0), "--max-tokens must be at least 1, got 0."),
        (("--max-tokens", 250), "question 0 has"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line(verify: Sooner, arguments: tuple[object, ...], expected: str) -> None:
    assert verify(*arguments).complaint.startswith(expected)
