"""Random traffic through an engine, held to the plain loop after every step. Knows no expected texts by heart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from sooner.config import EngineConfig
from sooner.draft.protocol import Context, Drafter
from sooner.engine.engine import Engine, Event
from sooner.engine.request import Request
from sooner.errors import RequestError
from sooner.params import RULES, SamplingParams
from sooner.structured import StructuredOutputs
from tests.engine.automaton import Automaton
from tests.engine.plain import choose, edited, law_of, plain_text
from tests.engine.wild import Broken, FlakyModel, WildController, WildDrafter

MOST_STEPS = 3000
BEYOND = 8  # right tokens a draft may know past the end of the text


@dataclass(frozen=True)
class Setting:
    """What one run of traffic looks like; everything else follows from `seed`.

    alike: prompts that share beginnings, long enough to be taken over.
    """

    seed: int = 0
    vocab: int = 7
    order: int = 1
    requests: int = 4
    config: EngineConfig = field(default_factory=lambda: EngineConfig(4, 24, 8))
    context_limit: int | None = None
    eos: tuple[int, ...] = ()
    trouble: float = 0.0
    alike: bool = False


@dataclass
class Seen:
    """What the outside got to see of a request."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    ended: bool = False


class Traffic:
    """Requests that come, go, are preempted and aborted at random moments."""

    def __init__(self, setting: Setting, drafter: Drafter | None = None) -> None:
        self.setting = setting
        self.random = Random(setting.seed)
        self.model = FlakyModel(self.random, setting.vocab, trouble=setting.trouble, order=setting.order)
        self.engine = Engine(
            self.model,
            drafter or WildDrafter(self.random, setting.vocab, self._ahead, setting.trouble),
            WildController(self.random),
            eos_ids=setting.eos,
            compile_grammar=lambda wanted: self._grammar(wanted),
            context_limit=setting.context_limit,
            config=setting.config,
        )
        self.seen: dict[str, Seen] = {}
        self.drafted = self.accepted = 0
        self._texts: dict[str, list[int]] = {}
        self._beginnings: list[list[int]] = []
        self.reused = self.preempted = 0

    def run(self) -> None:
        """Raises AssertionError where anything differs from the plain loop."""
        to_come = self.setting.requests
        for _ in range(MOST_STEPS):
            if to_come and (not self.engine.busy or self.random.random() < 0.4):
                to_come -= 1
                self._add()
            if not (to_come or self.engine.busy):
                break
            self._disturb()
            self._step()
        assert not self.engine.busy, f"{MOST_STEPS} steps were not enough"
        assert self.model.lanes.in_use == 0
        for seen in self.seen.values():
            self._compare(seen)

    def _add(self) -> None:
        limit = self.engine.context_limit
        prompt = self._beginning() + self._tokens(self.random.randint(1, 30))
        if limit is not None and len(prompt) >= limit:
            try:
                self.engine.add(prompt, self._params())
            except RequestError:
                return
            raise AssertionError("a prompt as long as the context was taken")
        request = self.engine.add(prompt, self._params())
        if request.params.seed is None:
            request.seed = self.random.randrange(2**63)  # not from the system, so that a failure repeats itself
        self.seen[request.id] = Seen(request)

    def _tokens(self, count: int) -> list[int]:
        return [self.random.randrange(self.setting.vocab) for _ in range(count)]

    def _beginning(self) -> list[int]:
        if not self.setting.alike:
            return []
        if not self._beginnings or self.random.random() < 0.1:
            self._beginnings.append(self._tokens(60))
        return self.random.choice(self._beginnings)[: self.random.randint(30, 60)]

    def _params(self) -> SamplingParams:
        r = self.random
        sampled = r.random() < 0.6
        unlimited = self.setting.context_limit is not None and r.random() < 0.5
        return SamplingParams(
            max_tokens=None if unlimited else r.randint(1, r.choice([3, 20, 50])),
            temperature=r.choice([0.3, 0.8, 1.5]) if sampled else 0.0,
            top_k=r.choice([0, -1, 1, 3]),
            top_p=r.choice([1.0, 0.9, 0.5]),
            min_p=r.choice([0.0, 0.1]),
            seed=r.choice([0, 7, 2**63 - 1]) if r.random() < 0.8 else None,
            stop_token_ids=tuple(r.sample(range(self.setting.vocab), r.choice([0, 0, 1]))),
            ignore_eos=r.random() < 0.2,
            priority=r.choice([0, 0, 0, -1, 3]),
            cache_salt=r.choice([None, None, "a"]),
            speculation=r.choice(["auto", "auto", "off", 3]),
            logprobs=r.choice([None, 0, 2]),
            logprobs_mode=r.choice(["raw", "raw", "processed"]),
            prompt_logprobs=r.choice([None, None, 0, 1]),
            rule=r.choice(["auto", "auto", "auto", "match", *RULES]),
            **(self._edits() if r.random() < 0.4 else {}),
        )

    def _edits(self) -> dict[str, Any]:
        """What acts on logits. Penalties are exact in float32, so that both sides compute the same."""
        r, ids = self.random, range(self.setting.vocab)
        few = lambda most: r.sample(ids, min(r.randint(1, most), len(ids)))  # noqa: E731  # short names for dice
        return dict(
            typical_p=r.choice([1.0, 1.0, 0.7]),
            repetition_penalty=r.choice([1.0, 1.5, 0.5]),
            presence_penalty=r.choice([0.0, 0.5, -2.0]),
            frequency_penalty=r.choice([0.0, 0.25, -1.0]),
            logit_bias=r.choice([{}, {token: r.choice([-100.0, 1.5]) for token in few(3)}]),
            allowed_token_ids=r.choice([None, None, tuple(few(9))]),
            min_tokens=r.choice([0, 0, 1]),
            logits_processors=r.choice([(), (), (after_even_no_zero,)]),
            structured_outputs=r.choice([None, StructuredOutputs(regex=str(r.randrange(1000)))]),
        )

    def _disturb(self) -> None:
        requests = [seen.request for seen in self.seen.values()]
        if requests and self.random.random() < 0.15:
            self.engine.preempt(self.random.choice(requests))
        if requests and self.random.random() < 0.03:
            victim = self.random.choice(requests)
            self.seen[victim.id].ended |= victim.finish is None
            self.engine.abort(victim)

    def _step(self) -> None:
        try:
            events = self.engine.step()
        except Broken:
            events = []
        self.engine.check()
        assert self.model.rows <= self.setting.config.step_rows
        if self.setting.config.kv_memory is not None:
            assert self.model.lanes.bytes <= self.setting.config.kv_memory
        for event in events:
            self._take(event)

    def _take(self, event: Event) -> None:
        seen = self.seen[event.request.id]
        assert not seen.ended, "an event after the end"
        assert event.tokens or event.finish, "an event that says nothing"
        seen.tokens += event.tokens
        seen.ended = event.finish is not None

    def _scores(self, request: Request, text: Sequence[int]) -> list[float]:
        """Logits of the next token after everything that acts on them."""
        logits = self.model.next_logits([*request.prompt, *text]).tolist()
        ends, grammar = self._ends(request), self._grammar(request.params.structured_outputs)
        return edited(logits, request.params, request.prompt, list(text), ends, grammar)

    def _grammar(self, wanted: StructuredOutputs | None) -> Automaton | None:
        """The toy grammar that a number written as an expression stands for."""
        return None if wanted is None else Automaton(self.setting.vocab, int(wanted.source))

    def _ends(self, request: Request) -> set[int]:
        return set(request.params.stop_token_ids) | (set() if request.params.ignore_eos else set(self.setting.eos))

    def _ahead(self, context: Context) -> Sequence[int]:
        """The right text of a request, some tokens past its end included."""
        request = self.seen[context.request_id].request
        text, params = self._texts.setdefault(request.id, list(request.prompt)), _seeded(request)
        if context.rule != "match":
            params = SamplingParams()  # its text is a matter of luck; the greedy one is as good a guess as any
            text[:] = context.tokens
        while len(text) < len(context.tokens) + BEYOND:
            scores = self._scores(request, text[len(request.prompt) :])
            if max(scores) == -math.inf:
                break
            text.append(choose(scores, params, len(text)))
        return text

    def _compare(self, seen: Seen) -> None:
        request = seen.request
        written = request.tokens[len(request.prompt) :]
        assert seen.ended
        assert seen.tokens == written, "events and result differ"
        assert request.lane is None
        self._compare_text(request, written)
        self._compare_logprobs(request, written)
        record = request.tally.close()
        assert record.emitted == len(written)
        assert record.accepted <= min(record.drafted, record.emitted)
        # Every pass gives one token beside the accepted ones; only the last may be cut before it.
        assert record.steps - 1 <= record.emitted - record.accepted <= record.steps
        assert record.reused < len(request.prompt)
        self.reused += record.reused
        self.preempted += record.preempted
        self.drafted += record.drafted
        self.accepted += record.accepted

    def _compare_text(self, request: Request, written: list[int]) -> None:
        if request.rule != "match" and not request.params.greedy:
            for i, token in enumerate(written):
                law = law_of(self._scores(request, written[:i]), request.params)
                assert law[token] > 0, "a token the law rules out"
            return
        expected, finish = plain_text(
            self.model.next_logits,
            request.prompt,
            _seeded(request),
            eos=self.setting.eos,
            limit=self.engine.context_limit,
            grammar=self._grammar(request.params.structured_outputs),
        )
        if request.finish == "abort":
            expected, finish = expected[: len(written)], "abort"
        assert (written, request.finish) == (expected, finish)

    def _compare_logprobs(self, request: Request, written: list[int]) -> None:
        for tokens, entries, wanted, before in (
            (written, request.logprobs, request.params.logprobs, [*request.prompt]),
            (
                list(request.prompt[1:]),
                request.prompt_logprobs,
                request.params.prompt_logprobs,
                [*request.prompt[:1]],
            ),
        ):
            if wanted is None:
                assert not entries
                continue
            if tokens is not written and not written:
                continue  # it ended before its prompt was through
            assert [entry.token for entry in entries] == tokens
            for i, entry in enumerate(entries):
                logs = self._logs(request, [*before, *tokens[:i]], processed=tokens is written)
                assert entry.logprob == pytest.approx(float(logs[entry.token]), rel=1e-5, abs=1e-4)
                best = logs.topk(wanted).values.tolist()
                assert [value for _, value in entry.top] == pytest.approx(best, rel=1e-5, abs=1e-4)
                assert all(
                    float(logs[token]) == pytest.approx(value, rel=1e-5, abs=1e-4) for token, value in entry.top
                )

    def _logs(self, request: Request, tokens: Sequence[int], processed: bool) -> Tensor:
        logits = self.model.next_logits(tokens)
        if processed and request.params.logprobs_mode == "processed":
            scores = self._scores(request, tokens[len(request.prompt) :])
            if not request.params.greedy:
                return torch.tensor(law_of(scores, request.params), dtype=torch.float64).log()
            logits = torch.tensor(scores, dtype=torch.float64)
        return logits.log_softmax(-1)


def after_even_no_zero(tokens: Sequence[int], logits: Tensor) -> Tensor:
    """A processor: after an even token 0 is unlikely."""
    if tokens[-1] % 2 == 0:
        logits[0] -= 2.0
    return logits


def _seeded(request: Request) -> SamplingParams:
    """Its parameters with the seed it got if the caller gave none."""
    return replace(request.params, seed=request.seed)
