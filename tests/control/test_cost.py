"""The cost of a pass is learnt from passes: shape, drift, outliers, and what is kept between runs."""

from __future__ import annotations

import json
import math
from random import Random

import pytest

from sooner.control.cost import Asked, DraftCost, Load, PassCost
from sooner.errors import ConfigError
from tests.control.machine import Machine

MACHINE = Machine()
LOADS = [Load(rows, requests, 300 * requests) for requests in (1, 4, 16) for rows in (1, 2, 3, 5, 9, 17, 33)]


def learnt(seed: int = 0, passes: int = 300, machine: Machine = MACHINE, cost: PassCost | None = None) -> PassCost:
    random, cost = Random(seed), cost or PassCost()
    for _ in range(passes):
        load = random.choice(LOADS)
        cost.observe(load, machine.seconds(load) * math.exp(random.gauss(0, 0.06)))
    return cost


@pytest.mark.parametrize("load", LOADS, ids=str)
def test_a_pass_costs_what_passes_like_it_have_cost(load: Load) -> None:
    assert learnt().seconds(load) == pytest.approx(MACHINE.seconds(load), rel=0.12)


def test_what_a_row_adds_is_known_not_only_what_a_pass_costs() -> None:
    """The decision hangs on differences: 16 more rows here cost 60 % more."""
    cost = learnt()
    for requests in (1, 4):
        few, many = Load(requests, requests, 300), Load(16 + requests, requests, 300)
        ratio = MACHINE.seconds(many) / MACHINE.seconds(few)
        assert cost.seconds(many) / cost.seconds(few) == pytest.approx(ratio, rel=0.12)


def test_a_machine_that_halves_its_speed_is_followed_within_forty_passes() -> None:
    slow = Machine(2 * MACHINE.base, 2 * MACHINE.row, MACHINE.flat, 2 * MACHINE.request, 2 * MACHINE.context)
    cost = learnt(passes=40, machine=slow, cost=learnt())
    assert cost.seconds(LOADS[0]) == pytest.approx(slow.seconds(LOADS[0]), rel=0.2)


def test_one_pass_that_took_a_second_changes_little() -> None:
    cost = learnt()
    before = cost.seconds(LOADS[0])
    cost.observe(LOADS[0], 1.0)
    assert cost.seconds(LOADS[0]) == pytest.approx(before, rel=0.35)
    cost = learnt(passes=20, cost=cost)
    assert cost.seconds(LOADS[0]) == pytest.approx(before, rel=0.15)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_a_clock_that_lies_teaches_nothing(seconds: float) -> None:
    cost = learnt()
    before = [cost.seconds(load) for load in LOADS]
    cost.observe(LOADS[0], seconds)
    assert [cost.seconds(load) for load in LOADS] == before


def test_costs_are_never_negative() -> None:
    random, cost = Random(1), PassCost()
    for _ in range(500):
        load = Load(random.randint(1, 600), random.randint(1, 32), random.randint(1, 9000))
        cost.observe(load, random.expovariate(1 / 0.03))
        assert all(slope >= 0 for _, slope in cost.slopes())
        assert cost.seconds(load) >= 0


def test_saved_costs_are_read_again_through_json() -> None:
    cost, again = learnt(), PassCost()
    again.restore(json.loads(json.dumps(cost.saved())))
    assert [again.seconds(load) for load in LOADS] == [cost.seconds(load) for load in LOADS]


def test_saved_costs_of_a_faster_day_are_corrected_soon() -> None:
    again = PassCost()
    again.restore(learnt().saved())
    slow = Machine(1.6 * MACHINE.base, 1.6 * MACHINE.row)
    learnt(passes=10, machine=slow, cost=again)
    assert again.seconds(LOADS[0]) == pytest.approx(slow.seconds(LOADS[0]), rel=0.2)


@pytest.mark.parametrize(
    "saved",
    [None, [], {}, {"knots": [1]}, {"knots": list((0, 4, 8, 16, 32, 64, 128, 512)), "mean": [1.0]}],
    ids=["nothing", "list", "empty", "other knots", "too short"],
)
def test_a_file_that_is_something_else_is_refused(saved: object) -> None:
    with pytest.raises(ConfigError):
        PassCost().restore(saved)


def test_a_nan_in_a_saved_cost_is_refused() -> None:
    saved = json.loads(json.dumps(learnt().saved()))
    saved["mean"][0] = float("nan")
    with pytest.raises(ConfigError, match="finite"):
        PassCost().restore(saved)


def test_the_cost_of_drafting_is_learnt_by_depth_and_requests() -> None:
    random, cost = Random(0), DraftCost()
    for _ in range(200):
        asked = Asked(random.randint(1, 8), random.randint(1, 6))
        cost.observe(asked, asked.depth * (0.006 + 0.0003 * asked.requests))
    assert cost.seconds(Asked(4, 5)) == pytest.approx(5 * (0.006 + 0.0012), rel=0.1)
    assert cost.seconds(Asked(0, 5)) == 0
