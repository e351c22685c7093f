"""Who runs in a pass and with how many rows: order of service, chunks, and budgets cut to what fits."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import pytest

from sooner.config import Budget, EngineConfig
from sooner.engine.scheduler import Scheduler, Share
from sooner.params import SamplingParams

WIDE = Budget(8, 2, 16)


@dataclass
class Lengths:
    """What a scheduler knows of a request."""

    id: str
    tokens: list[int]
    held: int
    written: int
    params: SamplingParams

    @property
    def missing(self) -> int:
        return len(self.tokens) - self.held


def waiting(name: str, prompt: int, *, written: int = 0, max_tokens: int | None = None) -> Any:
    """A request with a prompt of that length; with `written` tokens of text its lane lacks only the last."""
    length = prompt + written
    return Lengths(
        name, [0] * length, length - 1 if written else 0, written, SamplingParams(max_tokens=max_tokens)
    )


def scheduler(*requests: Any, requests_at_once: int = 4, step_rows: int = 32, chunk_rows: int = 8) -> Scheduler:
    made = Scheduler(EngineConfig(requests_at_once, step_rows, chunk_rows))
    for request in requests:
        made.add(request)
    return made


def nodes(budget: Budget) -> int:
    return 0 if budget.empty else budget.nodes


def planned(made: Scheduler) -> dict[str, int]:
    return {share.request.id: share.certain for share in made.plan()}


def test_first_come_first_served_up_to_the_limit_of_requests() -> None:
    made = scheduler(*(waiting(f"r{i}", 1) for i in range(6)))
    assert list(planned(made)) == ["r0", "r1", "r2", "r3"]
    made.remove(made.running[1])
    assert list(planned(made)) == ["r0", "r2", "r3", "r4"]


def test_roots_go_before_prompt_chunks() -> None:
    made = scheduler(waiting("prompt", 100), waiting("root", 3, written=2), step_rows=6)
    assert list(planned(made).items()) == [("root", 1), ("prompt", 5)]


def test_a_prompt_comes_in_chunks() -> None:
    request = waiting("r", 20)
    made = scheduler(request)
    seen = []
    while request.held < 20:
        [share] = made.plan()
        seen.append((share.certain, share.whole))
        request.held += share.certain
    assert seen == [(8, False), (8, False), (4, True)]


def test_no_request_waits_for_ever_when_rows_are_scarce() -> None:
    """As many rows as requests: every root gets one, and what is left goes to the first prompt."""
    roots = [waiting(f"root{i}", 1, written=1) for i in range(3)]
    made = scheduler(waiting("long", 50), *roots, step_rows=4)
    assert planned(made) == {"root0": 1, "root1": 1, "root2": 1, "long": 1}


def test_a_pass_never_has_more_rows_than_it_may() -> None:
    random = Random(0)
    for _ in range(300):
        step_rows = random.randint(4, 40)
        made = scheduler(
            *(waiting(f"r{i}", random.randint(1, 60), written=random.choice([0, 0, 1, 5])) for i in range(5)),
            step_rows=step_rows,
            chunk_rows=random.randint(1, 50),
        )
        shares = made.plan()
        budgets = made.trim(shares, [WIDE] * len(shares), None)
        rows = sum(share.certain + nodes(budget) for share, budget in zip(shares, budgets, strict=True))
        assert rows <= step_rows
        assert shares


def test_a_preempted_request_comes_back_first_with_everything_missing() -> None:
    first, second = waiting("first", 3, written=2), waiting("second", 1)
    made = scheduler(first, second, requests_at_once=1, step_rows=8)
    made.plan()
    first.held = 0
    made.preempt(first)
    assert [r.id for r in made.waiting] == ["first", "second"]
    assert planned(made) == {"first": 5}


def test_a_request_is_found_and_removed_wherever_it_is() -> None:
    running, queued = waiting("running", 1), waiting("queued", 1)
    made = scheduler(running, queued, requests_at_once=1)
    made.plan()
    assert made.find("running") is running
    assert made.find("queued") is queued
    made.remove(queued)
    made.remove(running)
    assert made.find("queued") is made.find("running") is None
    assert made.plan() == []


def trimmed(request: Any, budget: Budget, limit: int | None = None, step_rows: int = 1000) -> Budget:
    made = scheduler(step_rows=step_rows)
    [one] = made.trim([Share(request, request.missing)], [budget], limit)
    return one


@pytest.mark.parametrize(("left", "depth"), [(1, 0), (2, 1), (3, 2), (9, 8), (10, 8)])
def test_a_request_with_n_tokens_to_go_guesses_n_minus_one(left: int, depth: int) -> None:
    request = waiting("r", 3, written=5, max_tokens=5 + left)
    assert trimmed(request, WIDE).depth == depth


@pytest.mark.parametrize(("left", "depth"), [(1, 0), (2, 1), (5, 4), (9, 8), (20, 8)])
def test_no_guess_has_a_position_outside_the_context(left: int, depth: int) -> None:
    request = waiting("r", 3, written=5)
    assert trimmed(request, WIDE, limit=8 + left).depth == depth


def test_without_limits_the_wish_is_granted() -> None:
    assert trimmed(waiting("r", 3, written=5), WIDE) == WIDE


def test_a_chunk_that_does_not_reach_the_root_drafts_nothing() -> None:
    made = scheduler()
    [budget] = made.trim([Share(waiting("r", 20), 8)], [WIDE], None)
    assert budget.empty


def test_the_rows_left_are_shared_between_the_roots() -> None:
    made = scheduler(step_rows=20)
    shares = [
        Share(waiting("a", 1, written=1), 1),
        Share(waiting("b", 1, written=1), 1),
        Share(waiting("c", 20), 8),
    ]
    assert [nodes(budget) for budget in made.trim(shares, [WIDE] * 3, None)] == [5, 5, 0]


def test_no_rows_left_no_draft() -> None:
    assert trimmed(waiting("r", 1, written=1), WIDE, step_rows=4).nodes == 3
    made = scheduler(step_rows=4)
    shares = [Share(waiting(f"r{i}", 1, written=1), 1) for i in range(4)]
    assert all(budget.empty for budget in made.trim(shares, [WIDE] * 4, None))
