"""Who is worth asking: the best first, if together they make up for what asking takes."""

from __future__ import annotations

import pytest

from sooner.control.price import worth_asking
from sooner.control.state import Nodes, Weighed

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
