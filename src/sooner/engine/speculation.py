"""Whom to ask for a draft, and which nodes of it are verified. Knows no model and no pass."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from sooner.config import Budget
from sooner.control.protocol import NO_GUESS, Controller, Guess, StepRecord, Tried, View
from sooner.core.rules import Verdict
from sooner.core.step import Step
from sooner.core.tree import EMPTY, Draft, keep
from sooner.draft.protocol import Context, Outcome
from sooner.engine.constraint import FORCED, with_forced
from sooner.engine.guard import Guard
from sooner.engine.request import Request
from sooner.engine.scheduler import Scheduler, Share


@dataclass(frozen=True, slots=True)
class Drafted:
    """One draft for every share. guesses: as the drafter made them; kept: the nodes of those that are in the
    draft, () where a grammar's forced tokens took their place. control_s: seconds in the controller."""

    drafts: tuple[Draft, ...]
    guesses: tuple[Guess, ...]
    kept: tuple[tuple[int, ...], ...]
    control_s: float = 0.0


class Clock:
    """Where the time of one step goes, in seconds."""

    def __init__(self) -> None:
        self.began = self._last = time.perf_counter()
        self.draft_s = self.pass_s = self.judge_s = self.write_s = self.settle_s = self.control_s = 0.0

    def lap(self) -> float:
        """Seconds since the last lap, or the beginning."""
        last, self._last = self._last, time.perf_counter()
        return self._last - last


class Speculation:
    """limit: context length of the target, None = no limit."""

    def __init__(self, guard: Guard, controller: Controller, scheduler: Scheduler, limit: int | None) -> None:
        self._guard, self._controller, self._scheduler, self._limit = guard, controller, scheduler, limit

    def draft(self, shares: Sequence[Share]) -> Drafted:
        """A draft for every share, empty for those that may not, cannot or should not draft."""
        clock, views = Clock(), [_view(share) for share in shares]
        wished = self._controller.budgets(views)
        clock.control_s = clock.lap()
        budgets = self._scheduler.trim(shares, wished, self._limit)
        offered = self._ask(shares, budgets)
        guesses = [_guess(draft, share.request) for draft, share in zip(offered, shares, strict=True)]
        clock.lap()
        chosen = self._controller.keep(views, guesses)
        clock.control_s += clock.lap()
        drafts, kept = [], []
        for draft, nodes in zip(offered, chosen, strict=True):
            kept.append(tuple(range(len(draft))) if nodes is None else nodes)
            drafts.append(keep(draft, kept[-1]))
        if any(share.request.constraint is not None for share in shares):
            self._force(shares, drafts, guesses, kept)
        return Drafted(tuple(drafts), tuple(guesses), tuple(kept), clock.control_s)

    def _force(
        self,
        shares: Sequence[Share],
        drafts: list[Draft],
        guesses: list[Guess],
        kept: list[tuple[int, ...]],
    ) -> None:
        """Put the tokens that a grammar leaves no choice about before the guesses."""
        room = self._scheduler.trim(shares, [Budget.chain(FORCED)] * len(shares), self._limit)
        for i, share in enumerate(shares):
            if share.request.constraint is not None:
                forced = with_forced(drafts[i], share.request.constraint, min(room[i].depth, room[i].nodes))
                if forced is not drafts[i]:
                    drafts[i], guesses[i], kept[i] = forced, Guess(), ()

    def _ask(self, shares: Sequence[Share], budgets: Sequence[Budget]) -> list[Draft]:
        asked = [i for i, budget in enumerate(budgets) if not budget.empty]
        drafts = [EMPTY] * len(shares)
        contexts = [_context(shares[i].request) for i in asked]
        made, problems = self._guard.propose(contexts, [budgets[i] for i in asked]) if asked else ([], [])
        for i, draft, found in zip(asked, made, problems, strict=True):
            drafts[i] = draft
            shares[i].request.tally.draft_failures += found is not None
        return drafts


def tried(drafted: Drafted, outcomes: Sequence[Outcome], verdicts: Sequence[Verdict | None]) -> tuple[Tried, ...]:
    """What became of the guesses, in the numbering of the drafts as they were offered."""
    found = []
    for outcome, verdict, guess, kept in zip(outcomes, verdicts, drafted.guesses, drafted.kept, strict=True):
        path = () if verdict is None or not kept else tuple(kept[node] for node in verdict.path)
        found.append(Tried(outcome.request_id, outcome.tokens, guess, kept, path))
    return tuple(found)


def record(step: Step, outcomes: Sequence[Outcome], clock: Clock, what: tuple[Tried, ...]) -> StepRecord:
    """The pass that just ended, for the controller and whoever watches."""
    return StepRecord(
        rows=step.offsets[-1],
        requests=len(outcomes),
        draft_s=clock.draft_s,
        pass_s=clock.pass_s,
        judge_s=clock.judge_s,
        write_s=clock.write_s,
        settle_s=clock.settle_s,
        step_s=time.perf_counter() - clock.began,
        drafted=sum(o.drafted for o in outcomes),
        accepted=sum(o.accepted for o in outcomes),
        emitted=sum(len(o.tokens) for o in outcomes),
        context=sum(segment.root + 1 for segment in step.segments),
        tried=what,
        control_s=clock.control_s,
    )


def _view(share: Share) -> View:
    request = share.request
    return View(
        request.id,
        len(request.prompt),
        request.written,
        share.certain,
        request.held,
        share.whole,
        request.params.speculation,
    )


def _context(request: Request) -> Context:
    # A copy: whatever a drafter does to it, the text is not changed.
    past = None if request.history is None else request.history.past()
    return Context(
        request.id,
        list(request.tokens),
        request.law,
        request.seed,
        request.rule,
        past,
        prompt=len(request.prompt),
        prediction=request.prediction,
        scope=request.params.cache_salt,
    )


def _guess(draft: Draft, request: Request) -> Guess:
    if draft is EMPTY:
        return NO_GUESS
    drawn = draft.probs is not None and request.rule != "match" and not request.law.greedy
    return Guess(draft.tokens, draft.parents, draft.scores, drawn)
