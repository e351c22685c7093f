"""How often something else is verified than seems best, and what."""

from __future__ import annotations

import pytest

from sooner.control.passes import Load, PassCost
from sooner.control.probes import Probes
from sooner.control.state import Worth


def counts(worth: Worth, passes: int, *, gain: float = 2.0, offered: int = 40, drawn: bool = False) -> list[int]:
    known = PassCost()
    for _ in range(10):
        known.observe(Load(1, 1, 100), 0.01)
    probes, found = Probes(known), list[int]()
    for _ in range(passes):
        found.append(probes.count(worth, offered, 2, gain, drawn))
        probes.saw(guesses=found[-1] > 0)
    return found


def test_every_eighth_pass_has_more_or_fewer_guesses_in_turn_where_both_seem_nearly_as_good() -> None:
    some = 7 * [10]
    assert counts(Worth(10, 100.0, 0.01, 2, 30), 32) == [*some, 30, *some, 2, *some, 30, *some, 2]


@pytest.mark.parametrize(("few", "far", "other"), [(10, 30, 30), (2, 10, 2), (7, 15, 10)])
def test_only_what_is_another_size_of_pass_and_nearly_as_good(few: int, far: int, other: int) -> None:
    assert set(counts(Worth(10, 100.0, 0.01, few, far), 40)) == {10, other}


@pytest.mark.parametrize(("gain", "every"), [(1.1, 50), (2.0, 200)])
def test_a_pass_goes_without_guesses_more_seldom_when_they_clearly_pay(gain: float, every: int) -> None:
    found = counts(Worth(10, 100.0, 0.01, 10, 10), 2 * every, gain=gain)
    assert [i for i, count in enumerate(found, 1) if not count] == [every, 2 * every]


@pytest.mark.parametrize(("drawn", "every"), [(False, 40), (True, 12)])
def test_a_few_are_verified_at_times_though_none_is_worth_its_row(drawn: bool, every: int) -> None:
    found = counts(Worth(0, 100.0, 0.0, 0, 0), 2 * every, drawn=drawn)
    assert [(i, count) for i, count in enumerate(found, 1) if count] == [(every, 3), (2 * every, 3)]
    assert set(counts(Worth(0, 100.0, 0.0, 0, 0), 2 * every, offered=0)) == {0}
