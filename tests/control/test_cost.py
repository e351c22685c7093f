"""The cost of a pass is learnt from passes: shape, drift, outliers, and what is kept between runs."""

from __future__ import annotations

import json
import math
from random import Random

import pytest

from sooner.control.cost import KNOTS, Asked, DraftCost, Load, PassCost
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


def tiles(load: Load) -> float:
    """A machine that computes eight rows in the time of two, and begins anew with the ninth."""
    return 0.006 + 0.001 * (load.rows > 1) + 0.004 * ((load.rows - 1) // 8) + 0.0001 * load.requests


def test_costs_that_rise_in_steps_are_learnt_as_steps() -> None:
    random, cost = Random(0), PassCost()
    for _ in range(300):
        load = Load(random.choice((1, 2, 3, 5, 6, 8, 9, 12, 16)), 1, 300)
        cost.observe(load, tiles(load) * math.exp(random.gauss(0, 0.06)))
    further = [cost.pace * row for row in cost.further(Load(1, 1, 300), 11)]
    assert further[0] == pytest.approx(0.001, abs=0.0004)
    assert sum(further[1:7]) < 0.0006
    assert further[7] == pytest.approx(0.004, abs=0.0012)


def test_slow_minutes_do_not_make_the_rows_look_dear_that_ran_in_them() -> None:
    """Half the passes run at two thirds of the speed, and those with five rows mostly then."""
    random, cost = Random(0), PassCost()
    for turn in range(400):
        slow = turn // 50 % 2
        load = Load(5 if random.random() < (0.9 if slow else 0.1) else 1, 1, 300)
        cost.observe(load, tiles(load) * (1.5 if slow else 1.0) * math.exp(random.gauss(0, 0.06)))
    assert sum(cost.further(Load(1, 1, 300), 4)[:4]) * cost.pace < 0.25 * cost.seconds(Load(1, 1, 300))


def test_further_rows_cost_what_whole_passes_differ_by() -> None:
    cost, load = learnt(), Load(4, 4, 1200)
    whole = cost.seconds(Load(9, 4, 1200)) - cost.seconds(load)
    assert sum(cost.further(load, 5)[:5]) * cost.pace == pytest.approx(whole, rel=0.05)


def test_costs_are_never_negative() -> None:
    random, cost = Random(1), PassCost()
    for _ in range(500):
        load = Load(random.randint(1, 600), random.randint(1, 32), random.randint(1, 9000))
        cost.observe(load, random.expovariate(1 / 0.03))
        assert all(row >= 0 for row in cost.further(load, 40))
        assert cost.seconds(load) >= 0


def test_saved_costs_are_read_again_through_json() -> None:
    cost, again = learnt(), PassCost()
    again.restore(json.loads(json.dumps(cost.saved())))
    assert [again.seconds(load) for load in LOADS] == pytest.approx(
        [cost.seconds(load) for load in LOADS], rel=0.01
    )


def test_saved_costs_of_a_faster_day_are_corrected_soon() -> None:
    again = PassCost()
    again.restore(learnt().saved())
    slow = Machine(1.6 * MACHINE.base, 1.6 * MACHINE.row)
    learnt(passes=10, machine=slow, cost=again)
    assert again.seconds(LOADS[0]) == pytest.approx(slow.seconds(LOADS[0]), rel=0.2)


@pytest.mark.parametrize(
    "saved",
    [
        None,
        [],
        {},
        {"knots": [1]},
        {"knots": list(KNOTS), "scale": [1.0], "mean": [1.0]},
    ],
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
