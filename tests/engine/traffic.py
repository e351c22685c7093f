"""Random traffic through an engine, held to the plain loop after every step. Knows no expected texts by heart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

import torch

from sooner.config import EngineConfig
from sooner.draft.protocol import Context, Drafter
from sooner.engine.engine import Engine, Event
from sooner.engine.request import Request
from sooner.errors import RequestError
from sooner.params import RULES, SamplingParams
from tests.engine.plain import choose, law_of, plain_text
from tests.engine.wild import Broken, FlakyModel, WildController, WildDrafter

MOST_STEPS = 3000
BEYOND = 8  # right tokens a draft may know past the end of the text


@dataclass(frozen=True)
class Setting:
    """What one run of traffic looks like; everything else follows from `seed`."""

    seed: int = 0
    vocab: int = 7
    order: int = 1
    requests: int = 4
    config: EngineConfig = field(default_factory=lambda: EngineConfig(4, 24, 8))
    context_limit: int | None = None
    eos: tuple[int, ...] = ()
    trouble: float = 0.0


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
            context_limit=setting.context_limit,
            config=setting.config,
        )
        self.seen: dict[str, Seen] = {}
        self.drafted = self.accepted = 0
        self._texts: dict[str, list[int]] = {}

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
        limit = self.setting.context_limit
        prompt = [self.random.randrange(self.setting.vocab) for _ in range(self.random.randint(1, 30))]
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
            logprobs=r.choice([None, 0, 2]),
            rule=r.choice(["auto", "auto", "auto", "match", *RULES]),
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
        for event in events:
            self._take(event)

    def _take(self, event: Event) -> None:
        seen = self.seen[event.request.id]
        assert not seen.ended, "an event after the end"
        assert event.tokens or event.finish, "an event that says nothing"
        seen.tokens += event.tokens
        seen.ended = event.finish is not None

    def _ahead(self, context: Context) -> Sequence[int]:
        """The right text of a request, some tokens past its end included."""
        if context.request_id not in self._texts:
            self._texts[context.request_id] = list(self.seen[context.request_id].request.prompt)
        text, params = self._texts[context.request_id], _seeded(self.seen[context.request_id].request)
        if context.rule != "match":
            params = SamplingParams()  # its text is a matter of luck; the greedy one is as good a guess as any
            text[:] = context.tokens
        while len(text) < len(context.tokens) + BEYOND:
            text.append(choose(self.model.next_logits(text), params, len(text)))
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
        self.drafted += record.drafted
        self.accepted += record.accepted

    def _compare_text(self, request: Request, written: list[int]) -> None:
        if request.rule != "match" and not request.params.greedy:
            for i, token in enumerate(written):
                logits = self.model.next_logits([*request.prompt, *written[:i]])
                assert law_of(logits.tolist(), request.params)[token] > 0, "a token the law rules out"
            return
        expected, finish = plain_text(
            self.model.next_logits,
            request.prompt,
            _seeded(request),
            eos=self.setting.eos,
            limit=self.setting.context_limit,
        )
        if request.finish == "abort":
            expected, finish = expected[: len(written)], "abort"
        assert (written, request.finish) == (expected, finish)

    def _compare_logprobs(self, request: Request, written: list[int]) -> None:
        if request.params.logprobs is None:
            assert not request.logprobs
            return
        assert [entry.token for entry in request.logprobs] == written
        for i, entry in enumerate(request.logprobs):
            logits = self.model.next_logits([*request.prompt, *written[:i]])
            scores = torch.log_softmax(logits, -1)
            assert abs(entry.logprob - float(scores[entry.token])) < 1e-5
            best = scores.topk(request.params.logprobs)
            assert [token for token, _ in entry.top] == best.indices.tolist()


def _seeded(request: Request) -> SamplingParams:
    """Its parameters with the seed it got if the caller gave none."""
    return replace(request.params, seed=request.seed)
