"""Who is worth asking, the best first, if together they make up for it; which guesses are worth their rows."""

from __future__ import annotations

from array import array

import pytest

from sooner.control.price import DOUBT, NEAR, worth_asking, worth_their_rows
from sooner.control.state import Nodes, Weighed
from sooner.native.belief import Prices

FOUR = ((0.3, "a"), (0.05, "b"), (0.4, "c"), (-0.1, "d"))


@pytest.mark.parametrize(
    ("one", "two", "asked"),
    [
        (0.2, 0.22, ["c", "a", "b"]),  # waking up takes 0.18, each 0.02
        (0.2, 0.3, ["c", "a"]),
        (0.68, 0.7, ["c", "a", "b"]),  # 0.66 for waking up: only three together pay for it
        (0.72, 0.74, []),
        (0.5, 1.0, []),
    ],
)
def test_they_pay_together_for_waking_up_and_each_for_itself(one: float, two: float, asked: list[str]) -> None:
    assert worth_asking(FOUR, one, two) == asked


def test_who_is_new_is_asked_and_wakes_up_for_the_others() -> None:
    assert worth_asking((*FOUR, (None, "new")), 0.9, 0.98) == ["new", "c", "a"]


@pytest.mark.parametrize(
    ("chances", "accepted", "so"),
    [([0.9] * 20, 18, False), ([0.9] * 20, 14, False), ([0.9] * 20, 12, True), ([0.5] * 4, 0, False)],
)
def test_guesses_disappoint_when_too_many_fail_for_bad_luck(chances: list[float], accepted: int, so: bool) -> None:
    count = len(chances)
    weighed = Weighed((), Nodes([-chance for chance in chances], [0] * count, range(count)), 1.0)
    assert weighed.disappointed(accepted) == so
    assert not Weighed((), Nodes((), (), ()), 1.0).disappointed(0)


def prices(costs: list[float], rate: float) -> Prices:
    """One request, 10 ms a pass; rate: tokens that a second is worth."""
    return Prices(array("d", costs), array("d", costs), 1, 0.010, rate, rate, DOUBT, NEAR)


def test_a_chain_that_is_nearly_sure_is_followed_where_rows_cost_what_they_bring() -> None:
    """A margin of six percent for every node left it at once."""
    sure = [-(0.999**n) for n in range(1, 17)]
    assert worth_their_rows(sure, prices([0.0098] * 16, 100)).nodes == 16
    assert worth_their_rows([-0.5] * 4, prices([0.0049] * 4, 100)).nodes == 0  # overrated as likely as not


def test_as_few_and_as_many_are_told_as_lose_next_to_nothing() -> None:
    flat = worth_their_rows([-0.9, -0.5, -0.5, -0.5, -0.1], prices([0.001, 0.005, 0.005, 0.005, 0.01], 100))
    assert (flat.few, flat.nodes, flat.far) == (1, 1, 4)
    steep = worth_their_rows([-0.9, -0.8, -0.1], prices([0.001, 0.001, 0.04], 100))
    assert (steep.few, steep.nodes, steep.far) == (2, 2, 2)
    nothing = worth_their_rows([-0.1], prices([0.02], 100))
    assert (nothing.few, nothing.nodes, nothing.far) == (0, 0, 0)
