"""A machine that only exists on paper: passes cost what a formula says, guesses come true by a seed.

Knows no engine. Text is a sequence of numbers, so the right guess after n tokens is n, n + 1, ...
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from sooner.config import Budget
from sooner.control.passes import Load
from sooner.control.protocol import Controller, Guess, StepRecord, Tried, View
from sooner.params import Speculation

WRONG = -1
PROMPT = 200


@dataclass(frozen=True)
class Machine:
    """Seconds of a pass: flat up to `flat` rows, then so much for each. noise: spread of single passes (log).

    token: seconds that each new token takes. thinking: those of the controller for each request it asks."""

    base: float = 0.026
    row: float = 0.0012
    flat: int = 4
    request: float = 0.0002
    context: float = 2e-7
    noise: float = 0.06
    token: float = 0.0
    thinking: float = 0.0
    drafting: Callable[[int, int], float] = lambda asked, depth: 3e-5 * asked

    def seconds(self, load: Load) -> float:
        rows = max(load.rows - self.flat, 0)
        return self.base + self.row * rows + self.request * load.requests + self.context * load.context


@dataclass
class Job:
    """A request. hits(written) -> chance that one more guess is right, given those before it were."""

    id: str
    hits: Callable[[int], float]
    speculation: Speculation = "auto"
    fill: float = 1.0
    branches: int = 1
    written: int = 0
    kept: int = 0
    steps: int = 0


@dataclass
class Simulation:
    """Runs jobs until `steps` passes are over; `written`, `seconds` say how it went."""

    controller: Controller
    machine: Machine
    jobs: list[Job]
    seed: int = 0
    clock: float = 0.0
    written: int = 0
    rows: list[int] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = Random(self.seed)

    @property
    def rate(self) -> float:
        return self.written / self.clock

    def run(self, steps: int) -> Simulation:
        for _ in range(steps):
            self.step()
        return self

    def step(self) -> None:
        views = [
            View(job.id, PROMPT, job.written, 1, PROMPT + job.written - 1, True, job.speculation)
            for job in self.jobs
        ]
        budgets = self.controller.budgets(views)
        guesses = [self._guess(job, budget) for job, budget in zip(self.jobs, budgets, strict=True)]
        asked = [budget for budget in budgets if not budget.empty]
        draft_s = self.machine.drafting(len(asked), max((b.depth for b in asked), default=0)) if asked else 0.0
        kept = [
            tuple(range(len(g))) if nodes is None else nodes
            for g, nodes in zip(guesses, self.controller.keep(views, guesses), strict=True)
        ]
        context = sum(view.held + 1 for view in views)
        load = Load(len(views) + sum(map(len, kept)), len(views), context)
        pass_s = self.machine.seconds(load) * math.exp(self.random.gauss(0, self.machine.noise))
        tried = [self._judge(job, g, nodes) for job, g, nodes in zip(self.jobs, guesses, kept, strict=True)]
        emitted = sum(len(t.tokens) for t in tried)
        drafted, accepted = sum(map(len, kept)), emitted - len(views)
        self.rows.append(load.rows)
        write_s, control_s = self.machine.token * emitted, self.machine.thinking * len(asked)
        step_s = pass_s + draft_s + write_s + control_s
        self.clock += step_s
        self.asked.append(len(asked))
        self.written += emitted
        self.controller.observe(
            StepRecord(
                rows=load.rows,
                requests=len(views),
                draft_s=draft_s,
                pass_s=pass_s,
                judge_s=0.0,
                write_s=write_s,
                settle_s=0.0,
                step_s=step_s,
                control_s=control_s,
                drafted=drafted,
                accepted=accepted,
                emitted=emitted,
                context=context,
                tried=tuple(tried),
            )
        )

    def _guess(self, job: Job, budget: Budget) -> Guess:
        """A chain, right so far as the dice say; with branches a tree whose every level has one right node."""
        if budget.empty or self.random.random() >= job.fill:
            return Guess()
        tokens: list[int] = []
        parents: list[int] = []
        parent, good = -1, True
        for depth in range(budget.depth):
            wide = min(job.branches, budget.width)
            if len(tokens) + wide > budget.nodes:
                break
            good = good and self.random.random() < job.hits(job.written + depth)
            first = len(tokens)
            tokens += [job.written + depth if good else WRONG] + [WRONG - b for b in range(1, wide)]
            parents += [parent] * wide
            parent = first
        return Guess(tuple(tokens), tuple(parents))

    def _judge(self, job: Job, guess: Guess, kept: Sequence[int]) -> Tried:
        path: list[int] = []
        node = -1
        while True:
            wanted = job.written + len(path)
            below = [c for c in kept if guess.parents[c] == node and guess.tokens[c] == wanted]
            if not below:
                break
            node = below[0]
            path.append(node)
        tokens = tuple(range(job.written, job.written + len(path) + 1))
        job.written += len(tokens)
        job.kept += len(kept)
        job.steps += 1
        return Tried(job.id, tokens, guess, tuple(kept), tuple(path))
