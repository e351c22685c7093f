"""The cost of a pass is learnt from passes: shape, drift, outliers, and what is kept between runs."""

from __future__ import annotations

import json
import math
from random import Random

import numpy as np
import pytest

from sooner.control.passes import KNOTS, Load, PassCost
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


@pytest.mark.parametrize("seed", range(3))
def test_a_machine_that_halves_its_speed_is_another_one_after_a_few_surprises(seed: int) -> None:
    slow = Machine(2 * MACHINE.base, 2 * MACHINE.row, MACHINE.flat, 2 * MACHINE.request, 2 * MACHINE.context)
    cost = learnt(seed + 1, passes=12, machine=slow, cost=learnt(seed))
    assert [cost.seconds(load) for load in LOADS] == pytest.approx(
        [slow.seconds(load) for load in LOADS], rel=0.22
    )


def test_a_row_that_was_seen_to_cost_nothing_still_costs_a_quarter_of_what_the_line_says() -> None:
    """Passes of nine rows were unlucky, those of ten lucky: the tenth row looked free."""
    random, cost = Random(0), learnt()
    for turn in range(60):
        load, luck = Load(9 + turn % 2, 1, 300), 0.97 if turn % 2 else 1.06
        cost.observe(load, MACHINE.seconds(load) * luck * math.exp(random.gauss(0, 0.03)))
    assert cost.seconds(Load(10, 1, 300)) < cost.seconds(Load(9, 1, 300))
    assert cost.further(Load(9, 1, 300), 1)[0] >= 0.2 * MACHINE.row


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
    further = [row for row in cost.further(Load(1, 1, 300), 11)]
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
    assert sum(cost.further(Load(1, 1, 300), 4)[:4]) < 0.25 * cost.seconds(Load(1, 1, 300))


@pytest.mark.parametrize("seed", range(4))
def test_sizes_that_run_one_after_the_other_are_told_apart(seed: int) -> None:
    """A hundred passes of 34 rows, a few of 32, and so on, on a machine that gets faster and slower: what the two
    rows cost was taken for the machine's pace, so a guess looked free that cost a fifteenth of a pass."""
    random, cost, passes = Random(seed), PassCost(), 0
    for turn in range(10):
        rows, whole, times = (34, 0.029, 100) if turn % 2 else (32, 0.027, 8)
        for _ in range(times):
            passes += 1
            pace = 1 + 0.1 * math.sin(passes / 60)
            cost.observe(Load(rows, 32, 9600), whole * pace * math.exp(random.gauss(0, 0.04)))
    assert sum(cost.further(Load(32, 32, 9600), 2)[:2]) == pytest.approx(0.002, abs=0.00035)


@pytest.mark.parametrize("seed", range(4))
def test_memory_that_gets_faster_makes_no_row_look_cheaper(seed: int) -> None:
    """Everything a pass does before its first row takes 6.3 ms instead of 9; a row costs what it did."""
    random, cost = Random(seed), PassCost()
    for base, times in ((0.009, 400), (0.0063, 60)):
        for _ in range(times):
            load = Load(random.choice((8, 8, 8, 12, 14)), 8, 2400)
            cost.observe(load, (base + 0.0005 * load.rows) * math.exp(random.gauss(0, 0.04)))
    assert sum(cost.further(Load(8, 8, 2400), 6)[:6]) == pytest.approx(0.003, rel=0.1)
    assert cost.seconds(Load(8, 8, 2400)) == pytest.approx(0.0103, rel=0.05)


def test_what_a_cost_that_would_be_negative_gives_up_the_others_take_over() -> None:
    """Else passes of 272 rows were believed a quarter dearer the more of them were seen."""
    random, cost, off = Random(0), PassCost(), []
    rows = [48] * 4 + [80] * 3 + [144] * 2 + [16] + [272] * 9 + [16] + [272] * 10
    for turn, count in enumerate(rows):
        load = Load(count, 16, 16 * (200 + 14 * turn))
        cost.observe(load, MACHINE.seconds(load) * math.exp(random.gauss(0, 0.06)))
        if turn > 20:
            off.append(abs(math.log(cost.seconds(load) / MACHINE.seconds(load))))
    assert max(off) < 0.1


def test_a_number_of_rows_is_little_known_until_eight_passes_had_it() -> None:
    cost = PassCost()
    for _ in range(7):
        cost.observe(Load(3, 1, 300), 0.01)
    assert cost.little(3)
    cost.observe(Load(3, 1, 300), 0.01)
    assert [cost.little(rows) for rows in (2, 3, 4, 200)] == [True, False, True, False]


def test_further_rows_cost_what_whole_passes_differ_by() -> None:
    cost, load = learnt(), Load(4, 4, 1200)
    whole = cost.seconds(Load(9, 4, 1200)) - cost.seconds(load)
    assert sum(cost.further(load, 5)[:5]) == pytest.approx(whole, rel=0.05)


def test_costs_are_never_negative() -> None:
    random, cost = Random(1), PassCost()
    for _ in range(500):
        load = Load(random.randint(1, 600), random.randint(1, 32), random.randint(1, 9000))
        cost.observe(load, random.expovariate(1 / 0.03))
        assert all(row >= 0 for row in cost.further(load, 40))
        assert cost.seconds(load) >= 0


def test_the_doubt_stays_a_doubt_for_long() -> None:
    """Twenty thousand passes of all sizes on a machine that jumps: no variance becomes negative."""
    random, cost = Random(3), PassCost()
    for turn in range(20_000):
        load = Load(random.randint(1, 80), random.randint(1, 8), random.randint(1, 4000))
        pace = 2.0 if turn // 900 % 2 else 1.0
        cost.observe(load, MACHINE.seconds(load) * pace * math.exp(random.gauss(0, 0.06)))
    assert float(np.linalg.eigvalsh(cost._filter.doubt).min()) > -1e-12
    assert cost.seconds(Load(8, 4, 1200)) == pytest.approx(MACHINE.seconds(Load(8, 4, 1200)), rel=0.1)


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


def test_saved_costs_of_a_row_are_learnt_anew_where_rows_have_become_dear() -> None:
    again, dear = PassCost(), Machine(row=3 * MACHINE.row)
    again.restore(learnt().saved())
    learnt(passes=60, machine=dear, cost=again)
    right = [dear.seconds(load) for load in LOADS]
    assert [again.seconds(load) for load in LOADS] == pytest.approx(right, rel=0.1)


@pytest.mark.parametrize(
    "saved",
    [
        None,
        [],
        {},
        {"knots": [1]},
        {"knots": list(KNOTS), "line": [1.0]},
    ],
    ids=["nothing", "list", "empty", "other knots", "too short"],
)
def test_a_file_that_is_something_else_is_refused(saved: object) -> None:
    with pytest.raises(ConfigError):
        PassCost().restore(saved)


@pytest.mark.parametrize(("name", "value"), [("line", -1.0), ("room", 0.0), ("apart", [99.0, 0.0, 1.0])])
def test_what_no_measurement_gives_is_refused(name: str, value: object) -> None:
    saved = json.loads(json.dumps(learnt().saved()))
    saved[name][0] = value
    with pytest.raises(ConfigError, match="no measurement"):
        PassCost().restore(saved)


def test_a_nan_in_a_saved_cost_is_refused() -> None:
    saved = json.loads(json.dumps(learnt().saved()))
    saved["line"][0] = float("nan")
    with pytest.raises(ConfigError, match="finite"):
        PassCost().restore(saved)
