"""The engine: one step serves every request, whatever it needs. Knows no text, no files, no model family.

There is one path. A prompt chunk, plain decoding, a chain, a tree, a request resumed after preemption
differ only in their segments; `Engine.step` is the whole loop.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from sooner.config import EngineConfig
from sooner.control.protocol import Controller, StepRecord
from sooner.core.rules import Verdict
from sooner.core.step import Segment, Step, pack
from sooner.core.tree import Draft, depths
from sooner.draft.protocol import TAIL, Drafter, Outcome, Tops
from sooner.engine.admission import Admission
from sooner.engine.constraint import Compile, Constraint
from sooner.engine.detokenize import MakeDetokenizer, no_text
from sooner.engine.guard import Guard
from sooner.engine.judge import Judged, judge, wants_scores
from sooner.engine.memory import Memory
from sooner.engine.request import Request, law_params, new_request
from sooner.engine.scheduler import Scheduler, Share
from sooner.engine.speculation import Clock, Speculation, record, tried
from sooner.engine.stop import FinishReason, Piece, Writer
from sooner.engine.tops import MOST, firsts, tops
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


class Engine:
    """Serves requests on one target with one drafter.

    eos_ids: the target's end-of-text ids, none, one or several.
    detokenizer, encode: from tokens to text and, without special tokens, back; needed for stop strings
        and bad words only. compile_grammar: from structured outputs to a constraint.
    context_limit: most tokens of prompt and text together; the target's own limit by default.
    watch: told of every step, when set; it must not raise.
    clock: seconds, for deadlines and the times in reports.
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
        clock: Callable[[], float] = time.perf_counter,
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
        self.memory = Memory(self.config.kv_memory, model.lanes, getattr(drafter, "caches", ()))
        limits = (model.context_limit, context_limit, self.memory.longest)
        self.context_limit = min((limit for limit in limits if limit is not None), default=None)
        self._scheduler = Scheduler(self.config)
        # A drafter that reads features of the prompt's rows needs those rows to be computed.
        reuse = self.config.reuse_prefixes and not drafter.taps
        self._admission = Admission(self._scheduler, self.memory, reuse=reuse, forget=self.guard.forget)
        self._speculation = Speculation(self.guard, controller, self._scheduler, self.context_limit)
        self._eos = frozenset(token for token in eos_ids if 0 <= token < model.vocab_size)
        self._detokenizer, self._encode, self._compile = detokenizer, encode, compile_grammar
        self._ids = itertools.count()
        self.watch: Callable[[StepRecord], None] | None = None
        self._clock = clock
        self._deadlines: set[Request] = set()

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
        request.tally.admitted = self._clock()
        if params.deadline_s is not None:
            request.expires = request.tally.admitted + params.deadline_s
            self._deadlines.add(request)
        self._scheduler.add(request)
        return request

    def abort(self, request: Request) -> None:
        """End a request now; a request that has ended already is left alone."""
        if request.finish is None:
            request.writer.end("abort")
            self._scheduler.remove(request)
            self._end(request)

    def preempt(self, request: Request) -> None:
        """Take a running request's lane away; it resumes later with the same text."""
        if request in self._scheduler.running:
            self._scheduler.preempt(request)
            self._leave(request)
            request.tally.preempted += 1

    def step(self) -> list[Event]:
        """One pass of the target over everything that is ready; what it brought, request by request.

        If the target raises, no request has moved, and the step can be tried again.
        """
        expired = self._expire()
        self._admission.make_room(self.preempt)
        shares = self._scheduler.plan(self._admission)
        if not shares:
            return expired
        clock = Clock()
        drafted = self._speculation.draft(shares)
        clock.control_s = drafted.control_s
        clock.draft_s = clock.lap() - clock.control_s
        step = pack([self._segment(share, draft) for share, draft in zip(shares, drafted.drafts, strict=True)])
        clock.lap()
        out = self.model.forward(step, rows=step.law_rows, taps=self.guard.drafter.taps)
        clock.pass_s = clock.lap()
        requests = [share.request for share in shares]
        keep = any(r.watch is not None and r.watch.wants_logits for r in requests)
        best = tops(out.logits, step, self._tops)  # before laws edit the logits
        judged = judge(requests, step, out.logits, keep=keep, firsts=firsts(best, out.logits))
        clock.judge_s = clock.lap()
        events, outcomes = self._apply(shares, step, judged, out.features, best(), clock)
        clock.lap()
        self.guard.observe(outcomes)
        clock.draft_s += clock.lap()
        what = record(step, outcomes, clock, tried(drafted, outcomes, judged.verdicts))
        clock.lap()
        self.controller.observe(what)
        learning = clock.lap()
        self._retire(events)
        if self.watch is not None:
            self.watch(replace(what, control_s=what.control_s + learning, step_s=what.step_s + learning))
        return expired + events

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken; an idle engine holds no lane."""
        self.model.lanes.check()
        lanes = [r.lane for r in self._scheduler.running if r.lane is not None]
        if len(set(lanes)) != len(lanes) or len(lanes) != self.model.lanes.in_use:
            raise AssertionError(f"{self.model.lanes.in_use} lanes in use, requests hold {sorted(lanes)}")

    def _segment(self, share: Share, draft: Draft) -> Segment:
        request = share.request
        assert request.lane is not None  # it has one since it was admitted
        certain = tuple(request.tokens[request.held : request.held + share.certain])
        scored = wants_scores(request)
        return Segment(request.lane, request.held, certain, draft, law=share.whole, scored=scored)

    def _apply(
        self,
        shares: Sequence[Share],
        step: Step,
        judged: Judged,
        features: Tensor | None,
        best: Sequence[Tops | None],
        clock: Clock,
    ) -> tuple[list[Event], list[Outcome]]:
        """Write the verdicts into the requests and settle their lanes."""
        events, outcomes = [], []
        now = self._clock()
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
                self._end(event.request)

    def _expire(self) -> list[Event]:
        """End the requests whose time is over, with what they have written."""
        now = self._clock() if self._deadlines else 0.0
        over = [r for r in self._deadlines if r.expires is not None and r.expires <= now]
        for request in over:
            request.writer.end("deadline")
            self._scheduler.remove(request)
            self._end(request)
        return [Event(request, (), request.writer.take(), request.finish) for request in over]

    def _end(self, request: Request) -> None:
        self._deadlines.discard(request)
        self._leave(request)
        request.tally.note = self.controller.leave(request.id)

    def _leave(self, request: Request) -> None:
        """Give up the request's lane and whatever the drafter keeps for it."""
        self._admission.leave(request)
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
