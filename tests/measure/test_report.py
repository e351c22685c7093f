"""The figures are the ratios of sums that their formulas say, worked out by hand here."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from sooner.measure.bench import Comparison, Measured, Run
from sooner.measure.report import machine, rows, tables, total
from sooner.measure.workload import Question

QUESTIONS = (Question(1, "writing", ("a",)), Question(2, "math", ("b",)), Question(3, "qa", ("c",)))


def measured(run: Run, equal: bool | None = True) -> Measured:
    return Measured(run, equal)


@pytest.fixture
def comparison() -> Comparison:
    ten, five = tuple(range(10)), tuple(range(5))
    plain = (
        measured(Run(ten, 1, 10, 0, 0, 0.5, 9.0)),
        measured(Run(ten, 1, 10, 0, 0, 0.5, 9.0)),
        measured(Run(five, 1, 5, 0, 0, 0.5, 4.0)),
    )
    fast = (
        measured(Run(ten, 4, 4, 12, 6, 0.5, 2.0)),
        measured(Run(ten, 1, 6, 8, 4, 0.5, 3.0), equal=False),
        measured(Run(five, 1, 5, 0, 0, 0.5, 5.0)),
    )
    outside = tuple(measured(Run(m.run.tokens, 1, len(m.run.tokens), None, None, 0.5, 2.0), None) for m in plain)
    return Comparison(QUESTIONS, {"none": plain, "fast": fast, "outside": outside}, "float32", "cpu")


def test_figures_are_ratios_of_sums(comparison: Comparison) -> None:
    found = {name: row.whole for name, row in rows(comparison).items()}
    assert found["none"].own.tok_s == pytest.approx((25 - 3) / 22)
    assert found["none"].ratio == 1.0
    fast = found["fast"]
    # Four tokens came with a prompt's pass: they have no decode time, so they are not counted against it.
    assert fast.own.tok_s == pytest.approx((25 - 6) / 10)
    assert fast.ratio == pytest.approx(1.9)
    assert fast.own.tokens_per_step == pytest.approx(25 / 15)
    assert fast.own.acceptance == pytest.approx(10 / 20)
    assert (fast.equal, fast.prompts) == (2, 3)


def test_categories_are_compared_with_the_same_prompts_of_the_baseline(comparison: Comparison) -> None:
    parts = rows(comparison)["fast"].by_category
    assert list(parts) == ["mt_bench", "qa"]
    mt_bench, qa = parts["mt_bench"], parts["qa"]
    assert mt_bench.ratio == pytest.approx((20 - 5) / 5 / ((20 - 2) / 18))
    assert (mt_bench.prompts, mt_bench.equal, qa.prompts, qa.equal) == (2, 1, 1, 1)
    assert qa.ratio == pytest.approx(0.8)
    assert qa.own.acceptance is None  # nothing was drafted


def test_what_nobody_counted_is_null_and_not_zero(comparison: Comparison) -> None:
    found = rows(comparison)["outside"].as_dict()
    assert (found["acceptance"], found["equal"]) == (None, None)


def test_a_text_of_one_token_has_no_speed() -> None:
    one = total([Run((1,), 1, 1, 0, 0, 0.5, 0.0)])
    assert one.tok_s is None
    assert one.tokens_per_step == 1.0


def test_tables_show_every_draft_and_category_and_the_formulas(comparison: Comparison) -> None:
    screen = io.StringIO()
    for table in tables(rows(comparison)):
        Console(file=screen, width=120).print(table)
    shown = " ".join(screen.getvalue().split())
    for part in ("fast", "2 of 3", "1.90", "1.67", "50%", "mt_bench", "0.80, 1.00", "accepted / drafted"):
        assert part in shown, part


def test_the_machine_is_named() -> None:
    found = machine()
    assert isinstance(found["cores"], int)
    assert found["cores"] >= 1
    assert isinstance(found["torch"], str)
