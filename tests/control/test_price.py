"""Who is worth asking: the best first, if together they make up for what asking takes."""

from __future__ import annotations

import math
from random import Random

import pytest

from sooner.control import price
from sooner.control.passes import Load, PassCost
from sooner.control.price import worth_asking, worth_their_rows
from sooner.control.state import Nodes, Now, Weighed

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


def test_in_c_and_in_python_as_many_nodes_are_worth_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts beside and not, prices that fall, costs with departures and knots: the same count and price."""
    random, passes = Random(1), PassCost()
    for _ in range(400):
        load = Load(random.randint(1, 90), random.randint(1, 8), random.randint(1, 4000))
        tile = 1.3 if load.rows % 8 == 1 else 1.0
        passes.observe(load, (0.008 + 0.0004 * load.rows) * tile * math.exp(random.gauss(0, 0.03)))
    rows, some = passes._rows, 0
    for _ in range(300):
        ready, beside = random.randint(1, 8), random.choice((0, 40))
        decode = Load(ready, ready, 300 * ready)
        load = Load(ready + beside, ready + (beside > 0), decode.context)
        seconds = passes.seconds(decode)
        rate = ready / seconds
        now = Now(load, ready, passes.seconds(load), decode, seconds, rate, rate * random.uniform(1, 3))
        values = sorted(-(random.random() ** random.choice((1, 3))) for _ in range(random.randint(0, 90)))
        fixed, found = random.randint(0, 3), []
        for native in (True, False):
            monkeypatch.setattr(price, "serves", lambda native=native: native)
            monkeypatch.setattr(passes, "_rows", rows if native else None)
            passes._further.clear()
            found.append(worth_their_rows(values, now, fixed, passes))
        assert found[0] == pytest.approx(found[1], rel=1e-9)
        some += 0 < found[0].nodes < len(values)
    assert some > 100
