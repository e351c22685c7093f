"""Questions to those who seem not worth asking: as rare as they are dear, many at once, more after a right one."""

from __future__ import annotations

from random import Random

import pytest

from sooner.control.cost import Asked, Costs
from sooner.control.questions import Questions
from sooner.control.state import State, Worths

PASS = 0.01


def questions(fixed: float, each: float) -> Questions:
    """Asking n takes fixed + n * each seconds."""
    costs = Costs()
    for _ in range(300):
        for requests in (1, 2, 5, 9):
            costs.drafts.observe(Asked(requests, 1.0), fixed + each * requests)
    return Questions(costs)


def asked(found: Questions, waiting: int, passes: int) -> list[int]:
    counts = []
    for _ in range(passes):
        found.earn(PASS, 1, 1.0)
        counts.append(found.ask(waiting, 0, 1.0))
    return counts


@pytest.mark.parametrize(
    ("fixed", "each", "share"), [(2e-4, 2e-5, 0.005), (2e-5, 2e-5, 0.005), (0.002, 1e-4, 0.01), (0.0, 0.05, 0.01)]
)
def test_they_take_a_small_share_of_the_time(fixed: float, each: float, share: float) -> None:
    """Twice as much where they would be too rare for a text that changes."""
    spent = sum(fixed + each * count for count in asked(questions(fixed, each), 8, 4000) if count)
    assert 0.8 * share <= spent / (4000 * PASS) <= 1.1 * share


def test_waking_up_for_it_costs_the_most_so_all_are_asked_at_once() -> None:
    assert set(asked(questions(3e-4, 2e-5), 8, 200)) == {0, 8}


def test_as_many_as_the_savings_pay_for() -> None:
    """Twelve passes save up 0.6 ms, which pays for a dear question of two, never for eight."""
    assert set(asked(questions(1e-4, 2.3e-4), 8, 200)) == {0, 2}


def test_with_others_who_are_asked_anyhow_only_what_it_takes_more_is_paid() -> None:
    found = questions(4e-4, 1e-5)
    found.earn(PASS, 1, 1.0)
    assert found.ask(4, 0, 1.0) == 0
    assert found.ask(4, 3, 1.0) == 4


def test_an_answer_that_was_right_pays_for_the_next_question() -> None:
    found = questions(4e-4, 2e-5)
    counts = []
    for _ in range(40):
        found.earn(PASS, 1, 1.0)
        counts.append(found.ask(1, 0, 1.0))
        if counts[-1]:
            found.reward(2)
    assert sum(counts) >= 1.8 * sum(asked(questions(4e-4, 2e-5), 1, 40))


def test_wait_says_how_long_nobody_can_be_asked() -> None:
    found = questions(4e-4, 2e-5)
    found.earn(PASS, 1, 1.0)
    found.skip(found.wait())
    assert found.wait() == 0
    found.earn(PASS, 1, 1.0)
    assert found.ask(1, 0, 1.0) == 1


def test_what_is_right_as_often_as_ever_is_no_news_and_earns_nothing() -> None:
    """Chat at 32 requests: a third of the guesses that nobody verified were right, and paid for one question after
    another though none was worth its row."""
    random, worths = Random(0), Worths()
    state = worths.begin(State("auto", 0, 0.0, 0.0))
    told = [worths.is_news(state, random.random() < 0.3) for _ in range(300)]
    assert sum(told[100:]) < 10
    assert worths.begin(State("auto", 0, 0.0, 0.0)).right == pytest.approx(0.3, abs=0.1)  # of the next one too


def test_what_is_right_after_long_being_wrong_is_news() -> None:
    worths = Worths()
    state = worths.begin(State("auto", 0, 0.0, 0.0))
    assert not any(worths.is_news(state, 0) for _ in range(100))
    assert all(worths.is_news(state, 1) for _ in range(2))


def test_what_is_expected_of_a_new_request_counts_as_one_answer() -> None:
    """Chat at 32 requests: all were asked for sixteen steps, since guesses had paid at fewer requests."""
    worths = Worths(usual=1.0)
    state = worths.begin(State("auto", 0, 0.0, 0.0))
    for _ in range(4):
        worths.add(state, 0.0)
    assert state.worth == pytest.approx(1 / 5)


def test_what_is_known_of_a_request_by_many_answers_is_not_upset_by_one() -> None:
    worths = Worths()
    state = worths.begin(State("auto", 0, 0.0, 0.0))
    for _ in range(50):
        worths.add(state, 1.0)
    worths.add(state, 0.0)
    assert state.worth == pytest.approx(0.88)
