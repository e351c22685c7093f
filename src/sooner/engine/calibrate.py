"""Learns what passes cost before anybody waits for one, from made-up requests. Knows no policy.

Without it a controller knows of wide passes only what long prompts took, and where that says too much it never
tries one, so it never finds out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from sooner.config import Budget, EngineConfig
from sooner.control.fixed import FixedController
from sooner.control.passes import Load, PassCost
from sooner.control.protocol import StepRecord
from sooner.core.tree import Draft, chain
from sooner.draft.protocol import Context, Outcome
from sooner.engine.engine import Engine
from sooner.engine.memory import SLACK
from sooner.model.protocol import Model
from sooner.params import SamplingParams

# Requests and guesses of each, what matters most first: one row, a tile of rows, the next one, in between.
SIZES = ((1, 0), (1, 7), (1, 15), (8, 0), (1, 3), (2, 2), (8, 1), (4, 0), (1, 31), (1, 1), (1, 11), (8, 3))
_PASSES = 3  # of each size; the first of them does not count, what it touches is cold
_PROMPT = 16  # tokens


class Filler:
    """Guesses as much as it may, and does not care what."""

    name = "filler"
    taps: tuple[int, ...] = ()

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        return [chain((0,) * budget.nodes) for budget in budgets]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Nothing is learnt."""

    def forget(self, request_id: str) -> None:
        """Nothing is kept."""


def calibrate(
    model: Model,
    passes: PassCost,
    *,
    room: int | None = None,
    seconds: float = 1.0,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Let `passes` learn from passes of SIZES, as many as begin within `seconds`. No lane stays open.

    room: bytes there are for keys and values, None = no limit; sizes that need more are left out.
    """
    began = clock()
    for requests, guesses in SIZES:
        if room is not None and model.lanes.bytes_for(requests, _tokens(guesses) + SLACK) > room:
            continue
        records = _passes(model, requests, guesses, lambda: clock() - began < seconds)
        for record in records[1:] or records:
            passes.observe(Load(record.rows, record.requests, record.context), record.step_s - record.draft_s)
        if clock() - began >= seconds:
            break
    model.lanes.trim()


def _tokens(guesses: int) -> int:
    """Tokens of the longest text if all guesses were right."""
    return _PROMPT + _PASSES * (1 + guesses) + 1


def _passes(model: Model, requests: int, guesses: int, goes_on: Callable[[], bool]) -> list[StepRecord]:
    """Records of passes in which every request has one certain token and so many guesses."""
    limit, most = model.context_limit, _tokens(guesses)
    if limit is not None and limit <= most:
        return []
    config = EngineConfig(max_requests=requests, step_rows=max(requests * most, EngineConfig().step_rows))
    engine = Engine(model, Filler(), FixedController(Budget.chain(guesses)), config=config)
    params = SamplingParams(max_tokens=most, ignore_eos=True)
    asked = [engine.add([0] * _PROMPT, params) for _ in range(requests)]
    records: list[StepRecord] = []
    engine.step()  # the prompts
    engine.watch = records.append
    while len(records) < _PASSES and (goes_on() or not records) and engine.busy:
        engine.step()
    for request in asked:
        engine.abort(request)
    return [record for record in records if record.rows == requests * (1 + guesses)]
