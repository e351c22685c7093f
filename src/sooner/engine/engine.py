"""The engine: one step serves every request, whatever it needs. Knows no text, no files, no model family.

There is one path. A prompt chunk, plain decoding, a chain, a tree, a request resumed after preemption
differ only in their segments; `Engine.step` is the whole loop.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from sooner.config import Budget, EngineConfig
from sooner.control.protocol import Controller, StepRecord, View
from sooner.core.rules import Verdict
from sooner.core.step import Segment, Step, pack
from sooner.core.tree import Draft, depths
from sooner.draft.protocol import TAIL, Context, Drafter, Outcome
from sooner.engine.constraint import FORCED, Compile, Constraint, with_forced
from sooner.engine.detokenize import MakeDetokenizer, no_text
from sooner.engine.guard import Guard
from sooner.engine.judge import Judged, judge, wants_scores
from sooner.engine.request import Request, law_params, new_request
from sooner.engine.scheduler import Scheduler, Share
from sooner.engine.stop import FinishReason, Piece, Writer
from sooner.engine.tops import MOST, tops
from sooner.engine.watch import Watch
from sooner.errors import ConfigError, DraftError, RequestError
from sooner.model.protocol import Model
from sooner.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Event:
    """What one step brought for one request: new tokens, text that became final, and the end if it came."""

    request: Request
    tokens: tuple[int, ...]
    pieces: tuple[Piece, ...]
    finish: FinishReason | None


class _Clock:
    """Where the time of one step goes, in seconds."""

    def __init__(self) -> None:
        self.began = self._last = time.perf_counter()
        self.draft_s = self.pass_s = self.judge_s = self.write_s = self.settle_s = 0.0

    def lap(self) -> float:
        """Seconds since the last lap, or the beginning."""
        last, self._last = self._last, time.perf_counter()
        return self._last - last


class Engine:
    """Serves requests on one target with one drafter.

    eos_ids: the target's end-of-text ids, none, one or several.
    detokenizer, encode: from tokens to text and, without special tokens, back; needed for stop strings
        and bad words only. compile_grammar: from structured outputs to a constraint.
    context_limit: most tokens of prompt and text together; the target's own limit by default.
    watch: told of every step, when set; it must not raise.
    """

    def __init__(
        self,
        model: Model,
        drafter: Drafter,
        controller: Controller,
        *,
        eos_ids: Sequence[int] = (),
        detokenizer: MakeDetokenizer = no_text,
        encode: Callable[[str], Sequence[int]] | None = None,
        compile_grammar: Compile | None = None,
        context_limit: int | None = None,
        config: EngineConfig | None = None,
    ) -> None:
        layers = model.lanes.store.shape[0]
        if not all(type(tap) is int and 0 <= tap <= layers for tap in drafter.taps):
            raise DraftError(f"drafter {drafter.name!r} taps {drafter.taps}; this target has taps 0 to {layers}.")
        self._tops = getattr(drafter, "tops", 0)
        if type(self._tops) is not int or not 0 <= self._tops <= MOST:
            raise DraftError(f"drafter {drafter.name!r} wants {self._tops!r} tops; from 0 to {MOST} can be had.")
        self.model = model
        self.guard = Guard(drafter, model.vocab_size)
        self.controller = controller
        self.config = config or EngineConfig()
        if context_limit is not None and (type(context_limit) is not int or context_limit < 2):
            raise ConfigError(f"context_limit must be a whole number, at least 2, or None; got {context_limit!r}.")
        limits = [limit for limit in (model.context_limit, context_limit) if limit is not None]
        self.context_limit = min(limits) if limits else None
        self._scheduler = Scheduler(self.config)
        self._eos = frozenset(token for token in eos_ids if 0 <= token < model.vocab_size)
        self._detokenizer, self._encode, self._compile = detokenizer, encode, compile_grammar
        self._ids = itertools.count()
        self.watch: Callable[[StepRecord], None] | None = None

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._scheduler.waiting or self._scheduler.running)

    def add(
        self, prompt: Sequence[int], params: SamplingParams, *, copy: int = 0, watch: Watch | None = None
    ) -> Request:
        """Queue a request. Raises RequestError for a prompt that cannot be served, ConfigError for ids
        outside the vocabulary. copy: which of the `n` texts of one prompt this is. watch: who looks on."""
        self._check_prompt(prompt)
        self._check_params(params)
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)
        writer = Writer(
            self._detokenizer(prompt, params.skip_special_tokens),
            stop_ids=ends,
            stops=params.stop,
            keep_stop=params.include_stop_str_in_output,
            room=self._room(len(prompt), params),
        )
        law = law_params(params, ends, self._bad_words(params))
        constraint = self._constraint(params)
        request = new_request(f"r{next(self._ids)}", prompt, params, writer, law, constraint, copy)
        request.watch = watch
        request.prediction = self._prediction(params)
        request.tally.admitted = time.perf_counter()
        self._scheduler.add(request)
        return request

    def abort(self, request: Request) -> None:
        """End a request now; a request that has ended already is left alone."""
        if request.finish is None:
            request.writer.end("abort")
            self._scheduler.remove(request)
            self._leave(request)

    def preempt(self, request: Request) -> None:
        """Take a running request's lane away; it resumes later with the same text."""
        if request in self._scheduler.running:
            self._scheduler.preempt(request)
            self._leave(request)

    def step(self) -> list[Event]:
        """One pass of the target over everything that is ready; what it brought, request by request.

        If the target raises, no request has moved, and the step can be tried again.
        """
        shares = self._scheduler.plan()
        if not shares:
            return []
        clock = _Clock()
        drafts = self._draft(shares)
        clock.draft_s = clock.lap()
        step = pack([self._segment(share, draft) for share, draft in zip(shares, drafts, strict=True)])
        clock.lap()
        out = self.model.forward(step, rows=step.law_rows, taps=self.guard.drafter.taps)
        clock.pass_s = clock.lap()
        judged = judge([share.request for share in shares], step, out.logits)
        clock.judge_s = clock.lap()
        events, outcomes = self._apply(shares, step, judged, out.features, clock)
        self.guard.observe(outcomes)
        self._retire(events)
        record = _record(step, outcomes, clock)
        self.controller.observe(record)
        if self.watch is not None:
            self.watch(record)
        return events

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken; an idle engine holds no lane."""
        self.model.lanes.check()
        lanes = [r.lane for r in self._scheduler.running if r.lane is not None]
        if len(set(lanes)) != len(lanes) or len(lanes) != self.model.lanes.in_use:
            raise AssertionError(f"{self.model.lanes.in_use} lanes in use, requests hold {sorted(lanes)}")

    def _draft(self, shares: Sequence[Share]) -> list[Draft]:
        """A draft for every share, empty for those that may not or cannot draft."""
        views = [View(s.request.id, len(s.request.prompt), s.request.written) for s in shares]
        budgets = self._scheduler.trim(shares, self.controller.budgets(views), self.context_limit)
        asked = [i for i, budget in enumerate(budgets) if not budget.empty]
        drafts = [Draft()] * len(shares)
        contexts = [_context(shares[i].request) for i in asked]
        made, problems = self.guard.propose(contexts, [budgets[i] for i in asked]) if asked else ([], [])
        for i, draft, found in zip(asked, made, problems, strict=True):
            drafts[i] = draft
            shares[i].request.tally.draft_failures += found is not None
        room = self._scheduler.trim(shares, [Budget.chain(FORCED)] * len(shares), self.context_limit)
        for i, share in enumerate(shares):
            if share.request.constraint is not None:
                drafts[i] = with_forced(drafts[i], share.request.constraint, min(room[i].depth, room[i].nodes))
        return drafts

    def _segment(self, share: Share, draft: Draft) -> Segment:
        request = share.request
        if request.lane is None:
            request.lane = self.model.lanes.open()
            request.held = 0
        certain = tuple(request.tokens[request.held : request.held + share.certain])
        scored = wants_scores(request)
        return Segment(request.lane, request.held, certain, draft, law=share.whole, scored=scored)

    def _apply(
        self, shares: Sequence[Share], step: Step, judged: Judged, features: Tensor | None, clock: _Clock
    ) -> tuple[list[Event], list[Outcome]]:
        """Write the verdicts into the requests and settle their lanes."""
        events, outcomes = [], []
        best = tops(judged.logits, step, self._tops)
        now = time.perf_counter()
        for s, share in enumerate(shares):
            request, segment, verdict = share.request, step.segments[s], judged.verdicts[s]
            request.error = judged.errors.get(request.id)
            if request.watch is not None and request.watch.wants_logits:
                request.watch.logits(judged.chosen(step, s))
            tail = tuple(request.tokens[max(segment.root + 1 - TAIL, 0) : segment.root + 1])
            taken = 0 if verdict is None else _write(request, segment.draft, verdict, now)
            request.logprobs += judged.logprobs(request, step, s, taken)
            request.prompt_logprobs += judged.prompt_logprobs(request, step, s)
            clock.write_s += clock.lap()
            request.held = self.model.lanes.settle(segment.lane, request.tokens[:-1])
            clock.settle_s += clock.lap()
            new = tuple(request.tokens[len(request.tokens) - taken :])
            seen = None if features is None else features[step.offsets[s] : step.offsets[s + 1]]
            accepted = 0 if verdict is None else min(len(verdict.path), taken)
            draft = segment.draft
            outcomes.append(Outcome(request.id, new, accepted, len(draft), seen, draft, tail, best[s]))
            if new or request.finish is not None:
                events.append(Event(request, new, request.writer.take(), request.finish))
        return events, outcomes

    def _retire(self, events: Sequence[Event]) -> None:
        for event in events:
            if event.finish is not None:
                self._scheduler.remove(event.request)
                self._leave(event.request)

    def _leave(self, request: Request) -> None:
        """Give up the request's lane and whatever the drafter keeps for it."""
        if request.lane is not None:
            self.model.lanes.close(request.lane)
            request.lane, request.held = None, 0
        self.guard.forget(request.id)

    def _room(self, prompt: int, params: SamplingParams) -> int | None:
        left = None if self.context_limit is None else self.context_limit - prompt
        wanted = params.max_tokens
        return min(left, wanted) if left is not None and wanted is not None else left or wanted

    def _check_prompt(self, prompt: Sequence[int]) -> None:
        if not prompt:
            raise RequestError("the prompt is empty: it needs at least one token.")
        if not all(type(token) is int and 0 <= token < self.model.vocab_size for token in prompt):
            bad = next(t for t in prompt if type(t) is not int or not 0 <= t < self.model.vocab_size)
            raise RequestError(f"prompt token {bad!r} is not an id from 0 to {self.model.vocab_size - 1}.")
        if self.context_limit is not None and len(prompt) >= self.context_limit:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens; this model's context is {self.context_limit}, "
                f"so a prompt may have at most {self.context_limit - 1}. Shorten it."
            )

    def _check_params(self, params: SamplingParams) -> None:
        named = {
            "stop_token_ids": params.stop_token_ids,
            "allowed_token_ids": params.allowed_token_ids or (),
            "logit_bias": params.logit_bias,
        }
        for name, ids in named.items():
            bad = [i for i in ids if i >= self.model.vocab_size]
            if bad:
                raise ConfigError(f"{name} {bad} are not ids from 0 to {self.model.vocab_size - 1}.")
        if params.stop and self._detokenizer is no_text:
            raise ConfigError("stop strings need a tokenizer, and this model has none; use stop_token_ids.")

    def _constraint(self, params: SamplingParams) -> Constraint | None:
        if params.structured_outputs is None:
            return None
        if self._compile is None:
            raise ConfigError("structured_outputs need a tokenizer, and this model has none.")
        return self._compile(params.structured_outputs)

    def _prediction(self, params: SamplingParams) -> tuple[int, ...]:
        """The expected text as token ids; ids outside the vocabulary are refused."""
        expected = params.prediction or ()
        if isinstance(expected, str):
            if self._encode is None:
                raise ConfigError(
                    "a prediction as text needs a tokenizer, and this model has none; give token ids."
                )
            expected = tuple(self._encode(expected))
        bad = [i for i in expected if i >= self.model.vocab_size]
        if bad:
            raise ConfigError(f"prediction {bad[:5]} are not ids from 0 to {self.model.vocab_size - 1}.")
        return tuple(expected)

    def _bad_words(self, params: SamplingParams) -> list[tuple[int, ...]]:
        """Each bad word as token ids, at the beginning of a text and after a space."""
        if params.bad_words and self._encode is None:
            raise ConfigError("bad_words need a tokenizer, and this model has none; use logit_bias.")
        spelled = [
            tuple(self._encode(form)) for word in params.bad_words for form in (word, " " + word) if self._encode
        ]
        return [ids for ids in dict.fromkeys(spelled) if ids]


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
    )


def _write(request: Request, draft: Draft, verdict: Verdict, now: float) -> int:
    """Append what a verdict brought; returns how many tokens were taken before the text ended."""
    tokens = [draft.tokens[node] for node in verdict.path]
    if not verdict.broken:
        tokens.append(verdict.token)
    taken = request.write(tokens, guesses=len(verdict.path))
    if verdict.broken and request.finish is None:
        request.error = _why_broken(request)
        request.writer.end("error")
    depth = max(depths(draft.parents), default=0)
    if taken:
        request.tally.add_step(len(draft), depth, min(len(verdict.path), taken), taken, now)
    return taken


def _why_broken(request: Request) -> str:
    place = f"after token {len(request.tokens)}"
    if request.error is not None:
        return f"the request's own logits processor or grammar failed {place}: {request.error}"
    if request.law.edits:
        return f"no token may come {place}: the parameters (or NaN logits) leave the law without mass."
    return f"the model's logits are not finite {place}, so there is no next token; try a wider dtype (float32)."


def _record(step: Step, outcomes: Sequence[Outcome], clock: _Clock) -> StepRecord:
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
    )
