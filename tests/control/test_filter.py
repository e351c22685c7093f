"""The filter: in C it learns what it learns in numpy."""

from __future__ import annotations

import math
from random import Random

import numpy as np
import pytest

from sooner.control.filter import PlainFilter, Prior, begin

LINE = slice(1, 4)


def prior() -> Prior:
    cov = np.diag([0.01, 4.0, 0.04, 0.04]) + 0.001
    return Prior((0.0, 8.0, 0.2, 0.3), cov, (1e-5, 1e-4, 1e-6, 1e-6), 3, (0.2, 0.3, 0.0, 0.1))


def test_both_learn_the_same_from_noise_jumps_and_outliers() -> None:
    """Estimates are added on the way, those of the line touch 0, and the truth changes in the middle."""
    random, plain, other = Random(5), PlainFilter(prior()), begin(prior())
    added: list[int] = []
    touched = False
    for turn in range(400):
        if turn % 80 == 40:
            places = {one.add(0.01 * turn, 0.02, 1e-6) for one in (plain, other)}
            assert len(places) == 1
            added += places
        at = [0, 1, 2, 3, *random.sample(added, min(1, len(added)))]
        weights = [1.0, *(random.random() for _ in at[1:])]
        off = random.gauss(-0.3 if turn < 200 else 0.6, 0.1) * (20 if turn % 61 == 0 else 1)
        off -= sum(weight * plain.mean[place] for place, weight in zip(at, weights, strict=True)) - 3.0
        for one in (plain, other):
            one.learn(at, weights, off, 0.003)
        touched |= min(plain.mean[LINE]) == 0.0
        assert list(other.mean) == pytest.approx(plain.mean, rel=1e-9, abs=1e-9)
    assert touched
    assert other.doubt == pytest.approx(plain.doubt, rel=1e-6, abs=1e-9)


def test_a_pace_that_wandered_off_goes_into_the_line_and_what_is_expected_stays() -> None:
    """A server that runs for weeks: in the end the pace was nothing and the line infinite."""
    plain, other = PlainFilter(prior()), begin(prior())
    folded, expected = False, plain.mean[1]
    for _ in range(60):
        for one in (plain, other):
            one.learn([0], [1.0], 0.15, 0.003)
        folded |= plain.mean[0] == 0.0
        assert abs(plain.mean[0]) <= 1.0
        expected, before = math.exp(plain.mean[0]) * plain.mean[1], expected
        assert before < expected < 1.2 * before
        assert list(other.mean) == pytest.approx(plain.mean, rel=1e-9)
    assert folded
    assert plain.mean[1] > 8.0 * math.e
    assert other.doubt == pytest.approx(plain.doubt, rel=1e-6)
