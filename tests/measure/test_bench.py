"""Comparing: everybody takes turns, warming up does not count, and a changed text is noticed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from sooner.errors import ConfigError
from sooner.measure.bench import WARM_UP, Contender, Run, Setup, bench, compare
from sooner.measure.workload import Question
from sooner.params import SamplingParams

GREEDY = SamplingParams(max_tokens=40)
PROMPTS = [[1], [2], [3]]

Calls = list[tuple[str, int, int | None]]


def racer(name: str, calls: Calls, seconds: Sequence[float] = (1.0,), text: Sequence[int] = (7, 8)) -> Contender:
    """Writes `text` and takes `seconds`, one after the other, once it is warm."""
    times = iter([0.0, *seconds * 9])

    def run(prompt: Sequence[int], params: SamplingParams) -> Run:
        calls.append((name, prompt[0], params.max_tokens))
        return Run(tuple(text), 1, 2, 0, 0, 0.1, next(times))

    return run


def test_contenders_take_turns_in_an_order_that_rotates() -> None:
    calls: Calls = []
    compare({name: racer(name, calls) for name in ("none", "a", "b")}, PROMPTS, GREEDY)
    assert [(name, prompt) for name, prompt, _ in calls[3:]] == [
        *(("none", 1), ("a", 1), ("b", 1)),
        *(("a", 2), ("b", 2), ("none", 2)),
        *(("b", 3), ("none", 3), ("a", 3)),
    ]


def test_everybody_warms_up_first_and_briefly_and_it_does_not_count() -> None:
    calls: Calls = []
    found = compare({name: racer(name, calls) for name in ("none", "a")}, PROMPTS, GREEDY)
    assert calls[:2] == [("none", 1, WARM_UP), ("a", 1, WARM_UP)]
    assert all(limit == 40 for _, _, limit in calls[2:])
    assert [measured.run.decode_s for measured in found["a"]] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("seconds", "median"), [((3.0, 1.0, 2.0), 2.0), ((9.0, 1.0, 2.0, 3.0), 2.0), ((5.0,), 5.0), ((4.0, 2.0), 2.0)]
)
def test_of_repeats_the_median_counts(seconds: tuple[float, ...], median: float) -> None:
    found = compare({"none": racer("none", [], seconds)}, [[1]], GREEDY, repeat=len(seconds))
    assert [measured.run.decode_s for measured in found["none"]] == [median]


def test_progress_is_told_of_every_text() -> None:
    told: list[None] = []
    racing = {name: racer(name, []) for name in ("none", "a")}
    compare(racing, PROMPTS, GREEDY, repeat=2, progress=lambda: told.append(None))
    assert len(told) == 2 * 3 * 2


def test_a_draft_that_changed_the_text_once_is_caught() -> None:
    def forgetful(prompt: Sequence[int], params: SamplingParams) -> Run:
        count.append(prompt[0])
        return Run((7, 9 if len(count) == 4 else 8), 1, 2, 0, 0, 0.1, 1.0)

    count: list[int] = []
    found = compare({"none": racer("none", []), "forgetful": forgetful}, PROMPTS, GREEDY, repeat=2)
    # Call 1 warms up, calls 2 to 4 are the first repeat: the third prompt came out wrong once.
    assert [measured.equal for measured in found["forgetful"]] == [True, True, False]


def test_sampled_texts_of_transformers_are_not_compared() -> None:
    racing = {"none": racer("none", []), "a": racer("a", []), "transformers": racer("t", [], text=(1, 2))}
    sampled = compare(racing, [[1]], SamplingParams(max_tokens=2, temperature=1.0, seed=1))
    assert [measured[0].equal for measured in sampled.values()] == [True, True, None]
    greedy = compare({**racing, "transformers": racer("t", [], text=(1, 2))}, [[1]], GREEDY)
    assert [measured[0].equal for measured in greedy.values()] == [True, True, False]


def test_all_of_ours_share_one_target_and_write_one_text(tiny: Path) -> None:
    setup = Setup(str(tiny), ("lookup", f"model:{tiny}", "transformers"), dtype="float32")
    questions = [
        Question(i, "qa", (text,)) for i, text in enumerate(("the library, the", "several tokens, several"))
    ]
    told: list[None] = []
    found = bench(setup, questions, SamplingParams(max_tokens=30), lambda: told.append(None))
    assert list(found.runs) == ["none", "lookup", f"model:{tiny}", "transformers"]
    assert (found.dtype, found.device, len(told)) == ("float32", "cpu", 8)
    for name, measured in found.runs.items():
        for one, base in zip(measured, found.runs["none"], strict=True):
            assert one.equal, name
            assert one.run.tokens == base.run.tokens
            assert 1 <= one.run.first < len(one.run.tokens) == 30
            assert one.run.steps <= 30
    assert all(one.run.steps == 30 and one.run.first == 1 for one in found.runs["none"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"repeat": 0}, "repeat must be at least 1, got 0"),
        ({"drafts": ("transformers:lookup10",)}, "unknown draft 'transformers:lookup10'. Did you mean"),
        ({"drafts": ("none", "none")}, "draft 'none' is named 2 times"),
    ],
)
def test_a_setup_that_makes_no_sense_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Setup(**{"model": "m", "drafts": ("none",), **changes})  # type: ignore[arg-type]
