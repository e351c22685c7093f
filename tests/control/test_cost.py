"""The cost of a draft is learnt from drafts, and that of thinking about them added."""

from __future__ import annotations

import math
from random import Random

import pytest

from sooner.control.cost import Asked, Costs, DraftCost


def test_the_cost_of_drafting_is_learnt_by_depth_and_requests() -> None:
    random, cost = Random(0), DraftCost()
    for _ in range(200):
        asked = Asked(random.randint(1, 8), random.randint(1, 6))
        cost.observe(asked, asked.depth * (0.006 + 0.0003 * asked.requests))
    assert cost.seconds(Asked(4, 5)) == pytest.approx(5 * (0.006 + 0.0012), rel=0.1)
    assert cost.seconds(Asked(0, 5)) == 0


def test_a_drafter_that_was_slow_at_first_is_believed_quick_after_five_calls() -> None:
    """It took 65 calls: each surprise counted for little, and what fell below nothing raised the rest."""
    cost = DraftCost()
    for seconds in (0.05,) * 4 + (1e-4,) * 5:
        cost.observe(Asked(1, 2), seconds)
    assert cost.seconds(Asked(1, 2)) < 5e-4


def test_asking_costs_the_draft_and_thinking_of_it_before_and_after_the_pass() -> None:
    costs = Costs()
    for _ in range(100):
        for requests in (1, 4, 8):
            costs.drafts.observe(Asked(requests, 3), 0.001 * requests)
            costs.thinking.observe(Asked(requests, 0.0), 0.0002 + 0.00003 * requests)
    assert costs.asking(4, 3) == pytest.approx(0.004 + 2 * 0.00032, rel=0.1)
    assert costs.asking(0, 3) == 0.0


def test_a_server_that_runs_for_weeks_still_knows_what_drafts_cost() -> None:
    """Pace and parts went apart for ever: after so many calls they were e^-4 and e^4, later 0 and inf."""
    random, cost = Random(0), DraftCost()
    for _ in range(30_000):
        asked = Asked(random.randint(1, 8), random.randint(1, 6))
        cost.observe(asked, asked.depth * (0.001 + 0.0003 * asked.requests) * math.exp(random.gauss(0, 0.1)))
    assert cost.seconds(Asked(4, 5)) == pytest.approx(0.011, rel=0.1)
    assert cost._filter is not None
    assert abs(cost._filter.mean[0]) < 1.5
