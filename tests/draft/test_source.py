"""Grades of evidence and what they turn out to be worth."""

from __future__ import annotations

import math

import pytest

from sooner.draft.source import GRADES, RANKS, Chances, grade, grade_of_log, graded, graded_priors


def test_a_likelier_guess_never_has_a_worse_grade() -> None:
    grades = [grade(i / 1000) for i in range(1001)]
    assert grades == sorted(grades, reverse=True)
    assert (grades[0], grades[-1]) == (GRADES - 1, 0)
    assert set(grades) == set(range(GRADES))


def test_the_grade_of_a_logarithm_is_that_of_the_probability() -> None:
    assert [grade_of_log(math.log(i / 1000)) for i in range(1, 1000)] == [grade(i / 1000) for i in range(1, 1000)]
    assert grade_of_log(-math.inf) == GRADES - 1  # an id that a mask has struck out
    assert grade_of_log(0.0) == 0


def test_rank_and_grade_are_both_in_the_code() -> None:
    assert graded([0.9, 0.05, 0.04, 0.01, 0.01]) == [
        grade(0.9) * RANKS,
        *(grade(p) * RANKS + r for p, r in ((0.05, 1), (0.04, 2), (0.01, 3), (0.01, 3))),
    ]
    assert len(graded_priors(0.5)) == GRADES * RANKS
    assert max(graded_priors(1.0)) <= 1


def test_chances_begin_at_the_prior_and_end_at_what_was_seen() -> None:
    chances = Chances([0.5, 0.5])
    assert chances.value == [0.5, 0.5]
    for i in range(400):
        chances.learn(0, i % 10 == 0)
    assert chances.value[0] == pytest.approx(0.1, abs=0.01)
    assert chances.value[1] == 0.5


def test_what_was_long_ago_is_forgotten() -> None:
    chances = Chances([0.5])
    for _ in range(5000):
        chances.learn(0, True)
    for _ in range(2500):
        chances.learn(0, False)
    assert chances.value[0] < 0.2
