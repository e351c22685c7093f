"""The adaptive controller against fixed drafts on machines made of formulas, all from seeds."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from statistics import median, mode

import pytest

from sooner.config import Budget
from sooner.control.adaptive import AdaptiveController
from sooner.control.cost import Asked, Costs, DraftCost
from sooner.control.fixed import FixedController
from sooner.control.passes import Load
from sooner.control.protocol import Controller, Guess, StepRecord, View
from tests.control.machine import PROMPT, Job, Machine, Simulation

COPYING = Machine()
MODEL = Machine(drafting=lambda asked, depth: depth * (0.006 + 0.0003 * asked))
STEPS = 300
Make = Callable[[int], Job]


def always(chance: float, fill: float = 1.0) -> Make:
    return lambda i: Job(f"r{i}", lambda written: chance, fill=fill)


def mixed(i: int) -> Job:
    return Job(f"r{i}", lambda written: 0.9 if i % 2 else 0.1)


def changing(i: int) -> Job:
    """Prose, then code that the prompt holds already."""
    return Job(f"r{i}", lambda written: 0.02 if written < 300 else 0.95)


def simulate(controller: Controller, make: Make, jobs: int, machine: Machine, steps: int = STEPS) -> Simulation:
    return Simulation(controller, machine, [make(i) for i in range(jobs)]).run(steps)


def adaptive(make: Make, jobs: int, machine: Machine = COPYING, steps: int = STEPS) -> Simulation:
    return simulate(AdaptiveController(Budget.chain(16)), make, jobs, machine, steps)


def fixed(k: int, make: Make, jobs: int, machine: Machine = COPYING, steps: int = STEPS) -> float:
    return simulate(FixedController(Budget.chain(k)), make, jobs, machine, steps).rate


@pytest.mark.parametrize("machine", [COPYING, MODEL], ids=["cheap drafter", "draft model"])
@pytest.mark.parametrize("jobs", [1, 4, 16, 32])
@pytest.mark.parametrize(
    "make", [always(0.0), always(0.3), always(0.8, fill=0.15), mixed], ids=["wrong", "poor", "rare", "mixed"]
)
def test_never_slower_than_plain(machine: Machine, jobs: int, make: Make) -> None:
    assert adaptive(make, jobs, machine).rate >= 0.97 * fixed(0, make, jobs, machine)


@pytest.mark.parametrize("jobs", [1, 4, 16, 32])
@pytest.mark.parametrize(
    "make", [always(1.0), always(0.8), always(0.5), mixed], ids=["right", "good", "fair", "mixed"]
)
def test_close_to_the_best_fixed_draft_or_better(jobs: int, make: Make) -> None:
    assert adaptive(make, jobs).rate >= 0.95 * max(fixed(k, make, jobs) for k in (0, 2, 4, 8))


@pytest.mark.parametrize("jobs", [1, 16])
def test_a_draft_model_gets_the_depth_that_pays(jobs: int) -> None:
    best = max(fixed(k, always(0.8), jobs, MODEL, 600) for k in (0, 2, 4, 8))
    assert adaptive(always(0.8), jobs, MODEL, 600).rate >= 0.95 * best


def test_requests_of_different_luck_are_told_apart() -> None:
    """No fixed draft can: half the requests are worth deep drafts, the others none."""
    done = adaptive(mixed, 16)
    assert done.rate > 1.1 * max(fixed(k, mixed, 16) for k in (0, 2, 4, 8))
    nodes = [sum(job.kept / job.steps for job in done.jobs[luck::2]) / 8 for luck in (0, 1)]
    assert nodes[1] > 4 * nodes[0]


def steps_until_drafting(machine: Machine, seed: int = 0) -> int:
    """After the text has changed: passes until half of ten in a row carry guesses."""
    run = Simulation(AdaptiveController(Budget.chain(16)), machine, [changing(0)], seed=seed)
    while run.jobs[0].written < 300:
        run.step()
    for count in range(200):
        run.step()
        if sum(rows > 2 for rows in run.rows[-10:]) >= 5:
            return count
    return 200


def test_a_text_that_changes_character_is_noticed_within_twelve_steps() -> None:
    assert max(steps_until_drafting(COPYING, seed) for seed in range(9)) <= 12


def test_a_right_answer_pays_for_the_next_question_where_thinking_is_dear() -> None:
    machine = Machine(thinking=0.001)
    assert median(steps_until_drafting(machine, seed) for seed in range(6)) <= 20


def test_answers_that_are_right_as_often_as_ever_earn_no_further_questions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A third of the guesses come true and none is worth its row: each right one paid for the next question."""
    controller, earned = AdaptiveController(Budget.chain(16)), list[int]()
    monkeypatch.setattr(controller.questions, "reward", earned.append)
    machine = Machine(flat=0, row=0.004, thinking=0.0001, drafting=lambda asked, depth: 1e-4 * asked)
    run = simulate(controller, always(0.3), 16, machine, 200)
    earned.clear()
    run.run(400)
    assert sum(run.asked[200:]) > 400
    assert sum(right > 0 for right in earned) < 20


def test_passes_of_a_size_that_was_hardly_seen_are_all_learnt_from() -> None:
    """Of the others one in eight is, once costs are known: what a new size takes would be guessed for long."""
    controller = AdaptiveController(Budget.chain(16))
    run = simulate(controller, always(0.0), 4, COPYING)
    run.jobs += [always(0.0)(i) for i in range(4, 7)]
    run.run(20)
    assert not controller.costs.passes.little(7)


@pytest.mark.parametrize(("later", "least", "most"), [(1.0, 10, 12), (0.0, 0, 6)])
def test_a_request_is_thought_to_be_like_the_others_until_it_shows(later: float, least: int, most: int) -> None:
    """Texts that began without a guess and then copied themselves were left alone for six steps each time."""
    controller = AdaptiveController(Budget.chain(16))
    for turn in range(30):
        text = Job(f"r{turn}", lambda written: 0.95, fill=0.0)
        run = Simulation(controller, COPYING, [text], seed=turn).run(12)
        text.fill = later
        run.run(18)
        controller.leave(text.id)
    new = Simulation(controller, COPYING, [Job("new", lambda written: 0.95, fill=0.0)]).run(12)
    assert least <= sum(new.asked) <= most


def test_after_a_draft_that_was_right_to_its_end_the_next_may_be_twice_as_long() -> None:
    controller = AdaptiveController(Budget.chain(16))
    simulate(controller, always(1.0), 1, COPYING)
    controller.leave("r0")
    run = Simulation(controller, COPYING, [always(1.0)(1)])
    run.run(1)
    first = run.rows[-1] - 1
    run.run(1)
    assert 4 <= first < 8
    assert run.rows[-1] - 1 >= 2 * first


@pytest.mark.parametrize(("jobs", "share"), [(8, 0.84), (32, 0.85)])
def test_when_right_texts_are_followed_by_wrong_ones_few_passes_are_wasted(jobs: int, share: float) -> None:
    """32 new requests had 512 guesses verified in one pass, none right, after 448 and 320: what was wrong was
    learnt from four passes later, and a node at a time. A third of the next forty passes was lost."""
    controller, machine = AdaptiveController(Budget.chain(16)), Machine(noise=0.03)
    simulate(controller, always(1.0), jobs, machine, 100)
    for i in range(jobs):
        controller.leave(f"r{i}")
    new = Simulation(controller, machine, [Job(f"n{i}", lambda written: 0.0) for i in range(jobs)]).run(40)
    assert new.rate >= share * fixed(0, always(0.0), jobs, machine, 40)


def test_with_an_expensive_drafter_it_takes_longer_but_off_is_not_for_ever() -> None:
    assert median(steps_until_drafting(MODEL, seed) for seed in range(9)) <= 60


@pytest.mark.parametrize("jobs", [1, 8])
def test_a_drafter_that_takes_longer_than_it_saves_is_left_alone(jobs: int) -> None:
    """Always right, but a call takes twenty passes: asked twice until that is known, then once in 2,000 passes."""
    calls: list[int] = []

    def slow(asked: int, depth: int) -> float:
        calls.append(asked)
        return 0.5

    run = adaptive(always(1.0), jobs, Machine(drafting=slow), 1000)
    assert len(calls) <= 4
    assert run.rate >= 0.9 * fixed(0, always(1.0), jobs, steps=1000)


def test_a_drafter_that_was_slow_for_a_while_gets_another_chance() -> None:
    calls: list[int] = []

    def warming(asked: int, depth: int) -> float:
        calls.append(asked)
        return 0.05 if len(calls) < 5 else 1e-4

    run = adaptive(always(0.9), 1, Machine(drafting=warming), 1500)
    assert run.rate > 1.5 * fixed(0, always(0.9), 1, steps=1500)


def test_what_new_tokens_take_is_no_cost_of_rows() -> None:
    """Wide passes bring more tokens, each of which is written and read; the rows are not dearer for it."""
    machine = Machine(token=0.003)
    controller = AdaptiveController(Budget.chain(16))
    run = simulate(controller, always(0.9), 1, machine)
    load = Load(mode(run.rows), 1, PROMPT + run.written)
    assert load.rows > 8
    assert controller.costs.passes.seconds(load) == pytest.approx(machine.seconds(load), rel=0.1)


def test_rows_of_prompts_say_nothing_of_what_guesses_cost() -> None:
    """Theirs need no logits, a fifth of the work here: guesses by the hundred were believed a sixth too cheap."""
    controller = AdaptiveController(Budget.chain(16))
    simulate(controller, always(0.0), 4, COPYING, 60)
    controller.leave("nobody")  # what has been put by is learnt
    passes, load = controller.costs.passes, Load(300, 4, 1200)
    before, seen = passes.seconds(load), passes.seen
    for _ in range(20):
        controller.budgets([View(f"p{i}", 400, 0, rows=100, whole=False) for i in range(4)])
        controller.keep([], [])
        record = StepRecord(400, 4, 0.0, 0.1, 0.0, 0.0, 0.0, 0.1, drafted=0, accepted=0, emitted=0, context=1600)
        controller.observe(record)
    assert (passes.seen, passes.seconds(load)) == (seen, before)


def test_questions_are_as_rare_as_thinking_about_the_answers_is_dear() -> None:
    quick = adaptive(always(0.0), 8, steps=600).asked[200:]
    slow = adaptive(always(0.0), 8, Machine(thinking=0.004), 600).asked[200:]
    assert 0 < sum(slow) < sum(quick) / 2
    assert sum(slow) * 0.004 < 0.02 * 400 * Machine().base


class Counted(DraftCost):
    """How often somebody asked what drafting costs: once and more for every decision."""

    calls = 0

    def seconds(self, asked: Asked) -> float:
        self.calls += 1
        return super().seconds(asked)


def test_nobody_is_thought_of_at_every_step_while_none_is_worth_asking() -> None:
    costs = Costs()
    costs.drafts = counted = Counted()
    run = simulate(AdaptiveController(Budget.chain(16), costs), always(0.0), 8, COPYING)
    before = counted.calls
    run.run(400)
    assert 0 < counted.calls - before <= 3 * 400 / 2.5  # three times a decision


def test_a_request_that_asks_for_k_or_for_none_gets_it() -> None:
    jobs = [Job("off", lambda w: 1.0, "off"), Job("two", lambda w: 0.0, 2), Job("auto", lambda w: 1.0)]
    controller = AdaptiveController(Budget.chain(16))
    run = Simulation(controller, COPYING, jobs).run(50)
    off, two, auto = run.jobs
    assert off.kept == 0
    assert two.kept == 2 * two.steps
    assert auto.written > 2 * off.written
    notes = [controller.leave(job.id) for job in jobs]
    assert [(n.used, n.why_off) for n in notes] == [
        ("off", "the request asked for none"),
        ("k=2", ""),
        ("auto", ""),
    ]
    assert all(n.speedup is not None for n in notes)
    assert notes[2].speedup > 2 * notes[0].speedup  # type: ignore[operator]  # not None, see above


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (always(0.0), "the guesses were not worth their rows"),
        (always(0.5, fill=0.0), "the drafter had no guess"),
    ],
    ids=["wrong", "silent"],
)
def test_why_nothing_was_guessed_is_said(make: Make, why: str) -> None:
    controller = AdaptiveController(Budget.chain(8))
    simulate(controller, make, 16, COPYING, 200)
    controller.keep([View("late", 9, 1)], [Guess()])
    late = Job("late", make(0).hits, fill=make(0).fill)
    Simulation(controller, COPYING, [late, *(make(i) for i in range(15))], seed=3).run(20)
    assert controller.leave("late").why_off == why


def test_the_estimated_speedup_is_near_the_true_one() -> None:
    controller = AdaptiveController(Budget.chain(16))
    machine = Machine(context=0.0)  # else a run that writes more has longer texts to read
    run = simulate(controller, always(0.8), 4, machine, 400)
    true = run.rate / fixed(0, always(0.8), 4, machine, 400)
    assert controller.leave("r0").speedup == pytest.approx(true, rel=0.12)


def test_a_limit_of_nothing_drafts_nothing() -> None:
    controller = AdaptiveController(Budget.chain(0))
    assert controller.budgets([View("r", 5, 1)])[0].empty
    assert controller.leave("r").why_off == "k is 0"


def test_prompt_chunks_do_not_draft() -> None:
    controller = AdaptiveController(Budget.chain(8))
    assert [b.empty for b in controller.budgets([View("a", 99, 0, rows=32, whole=False), View("b", 9, 1)])] == [
        True,
        False,
    ]


def test_siblings_and_branches_are_kept_with_their_parents() -> None:
    controller = AdaptiveController(Budget(6, 3, 16))
    run = Simulation(controller, COPYING, [Job(f"r{i}", lambda w: 0.7, branches=3) for i in range(8)])
    run.run(150)  # the simulation looks parents up among the kept
    assert run.rate > 1.2 * fixed(0, always(0.7), 8)


def test_nothing_is_kept_of_requests_that_have_left() -> None:
    controller = AdaptiveController(Budget.chain(4))
    for turn in range(200):
        Simulation(controller, COPYING, [Job(f"r{turn}", lambda w: 0.5)]).run(3)
        controller.leave(f"r{turn}")
    assert not controller._states
    assert not len(controller.beliefs)


@pytest.mark.parametrize("jobs", [1, 8])
def test_what_is_learnt_together_is_learnt_once_and_in_order(jobs: int) -> None:
    """Passes are learnt from several at a time; the last ones when a request leaves."""
    controller = AdaptiveController(Budget.chain(8))
    run = Simulation(controller, COPYING, [always(0.9)(i) for i in range(jobs)])
    seen, learnt, study = [], [], controller._study
    controller._study = lambda lesson: (learnt.append(lesson.record), study(lesson))[1]  # type: ignore[method-assign]  # to look on
    observe = controller.observe
    controller.observe = lambda record: (seen.append(record), observe(record))[1]  # type: ignore[method-assign]  # to look on
    waited = [len(seen) - len(learnt) for _ in range(300) if run.run(1)]
    assert 1 < max(waited) <= 4
    controller.leave("r0")
    assert learnt == seen


def test_a_choice_that_holds_ends_when_somebody_comes() -> None:
    """Whom to ask is chosen anew every few steps, and at once for other requests or a prompt."""
    controller = AdaptiveController(Budget.chain(8))
    run = Simulation(controller, COPYING, [always(0.9)(i) for i in range(2)]).run(303)
    run.jobs.append(always(0.9)(2))
    run.run(1)
    assert run.asked[-1] == 3
    chunk = [View("r0", PROMPT, 9), View("r1", PROMPT, 9), View("r3", 99, 0, rows=32, whole=False)]
    assert [budget.empty for budget in controller.budgets(chunk)] == [False, False, True]


def test_a_choice_that_holds_ends_when_somebody_comes_by_the_name_of_one_who_left() -> None:
    """Several engines may share a controller, and each begins its names anew: nothing was known of the new one."""
    controller = AdaptiveController(Budget.chain(8))
    Simulation(controller, COPYING, [always(0.9)(i) for i in range(2)]).run(301)
    controller.leave("r0")
    again = Simulation(controller, COPYING, [always(0.9)(i) for i in range(2)]).run(1)
    assert again.asked == [2]


def test_a_choice_that_holds_ends_when_one_of_them_reads_its_text_again() -> None:
    """It lost its lane meanwhile; the pass is another one though the requests are the same."""
    controller = AdaptiveController(Budget.chain(8))
    Simulation(controller, COPYING, [always(0.9)(i) for i in range(2)]).run(302)
    for rows in (1, 32):
        again = View("r1", PROMPT, 9, rows=rows, whole=rows == 1)
        controller.budgets([View("r0", PROMPT, 9), again])
        assert controller._now is not None
        assert controller._now.load.rows == 1 + rows


@pytest.mark.parametrize("seed", range(3))
def test_rows_that_have_become_cheap_are_found_where_they_cost_what_they_brought(seed: int) -> None:
    """Passes of eight rows get dearer, rows beyond them cheaper: as where memory is shared with neighbours."""
    controller, machine = AdaptiveController(Budget.chain(16)), Machine(base=0.020, row=0.003, flat=8)
    measured = Random(seed + 100)
    for rows in 4 * (1, 2, 3, 4, 6, 8, 9, 12, 16, 17, 24, 32, 48, 64):
        load = Load(rows, 1, PROMPT)
        controller.costs.passes.observe(load, machine.seconds(load) * math.exp(measured.gauss(0, machine.noise)))
    run = Simulation(controller, machine, [always(1.0)(i) for i in range(2)], seed).run(200)
    assert mode(run.rows[-50:]) <= 12
    run.machine = Machine(base=0.026, row=0.0022, flat=8)
    run.run(100)
    written, clock = run.written, run.clock
    run.run(100)
    best = max(fixed(k, always(1.0), 2, run.machine, 100) for k in (2, 4, 8, 16))
    assert (run.written - written) / (run.clock - clock) >= 0.95 * best
