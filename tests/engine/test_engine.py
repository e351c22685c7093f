"""The engine at its edges: what it refuses, what it survives, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from sooner.config import Budget, EngineConfig
from sooner.control.fixed import FixedController
from sooner.core.step import Step
from sooner.core.tree import Draft, chain
from sooner.draft.none import NoDrafter
from sooner.draft.protocol import Context, Drafter
from sooner.engine.engine import Engine, Event
from sooner.engine.request import Request
from sooner.errors import ConfigError, RequestError
from sooner.model.protocol import Output
from sooner.params import SamplingParams
from sooner.testing import ScriptedDrafter, ToyModel
from tests.engine.plain import plain_text
from tests.engine.wild import Broken

PROMPT = [1, 2, 3]
TEN = SamplingParams(max_tokens=10)


def engine(
    drafter: Drafter | None = None, model: ToyModel | None = None, k: int = 4, limit: int | None = None
) -> Engine:
    return Engine(
        model or ToyModel(),
        drafter or NoDrafter(),
        FixedController(Budget.chain(k)),
        context_limit=limit,
        config=EngineConfig(4, 64, 16),
    )


def finish(one: Engine) -> list[Event]:
    events = []
    while one.busy:
        events += one.step()
        one.check()
    return events


def text(request: Request) -> list[int]:
    return request.tokens[len(request.prompt) :]


def plain(prompt: Sequence[int] = PROMPT, params: SamplingParams = TEN) -> list[int]:
    return plain_text(ToyModel().next_logits, prompt, params)[0]


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ([], "the prompt is empty"),
        ([1, 17], "prompt token 17 is not an id from 0 to 16"),
        ([1, -1], "prompt token -1"),
        ([1, 2.0], "prompt token 2.0"),
        ([True], "prompt token True"),
        ([1] * 20, "the prompt has 20 tokens; this model's context is 20, so a prompt may have at most 19"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused_by_name(prompt: list[int], named: str) -> None:
    one = engine(limit=20)
    with pytest.raises(RequestError, match=named):
        one.add(prompt, TEN)
    assert not one.busy


def test_ids_outside_the_vocabulary_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"stop_token_ids \[17\]"):
        engine().add(PROMPT, SamplingParams(stop_token_ids=(3, 17)))


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    with pytest.raises(ConfigError, match="stop strings need a tokenizer"):
        engine().add(PROMPT, SamplingParams(stop=("x",)))


def test_the_smaller_of_two_context_limits_counts() -> None:
    assert engine(model=ToyModel(context_limit=30), limit=20).context_limit == 20
    assert engine(model=ToyModel(context_limit=30), limit=50).context_limit == 30
    assert engine().context_limit is None


def test_an_idle_engine_does_nothing() -> None:
    one = engine()
    assert not one.busy
    assert one.step() == []


def test_ending_or_preempting_what_has_ended_changes_nothing() -> None:
    one = engine()
    request = one.add(PROMPT, TEN)
    finish(one)
    one.abort(request)
    one.preempt(request)
    assert (request.finish, one.busy) == ("length", False)


def test_a_waiting_request_can_be_aborted() -> None:
    one = engine()
    request = one.add(PROMPT, TEN)
    one.abort(request)
    assert (request.finish, one.busy, text(request)) == ("abort", False, [])


def test_preempting_a_waiting_request_changes_nothing() -> None:
    one = engine()
    request = one.add(PROMPT, TEN)
    one.preempt(request)
    finish(one)
    assert text(request) == plain()


class FailsOnce(ToyModel):
    """Raises at one pass, having spoilt the columns of that pass."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.passes, self._at = 0, at

    def forward(self, step: Step, *, rows: Tensor, taps: Sequence[int] = ()) -> Output:
        self.passes += 1
        out = super().forward(step, rows=rows, taps=taps) if self.passes != self._at else None
        if out is None:
            self.lanes.store[0, 0, :, 0, :, 0] *= self.lanes.store[0, 0, :, 0, :, 0] != 0
            raise Broken("pass")
        return out


@pytest.mark.parametrize("at", range(1, 8))
def test_a_step_whose_pass_failed_can_be_tried_again(at: int) -> None:
    one = engine(ScriptedDrafter(lambda c, b: chain([5, 5, 5][: b.depth])), FailsOnce(at))
    requests = [one.add(PROMPT, TEN), one.add([4] * 30, TEN)]
    with pytest.raises(Broken):
        finish(one)
    assert all(request.finish is None for request in requests)
    finish(one)
    assert [text(request) for request in requests] == [plain(), plain([4] * 30)]


def spoil(context: Context) -> None:
    tokens = context.tokens
    assert isinstance(tokens, list)
    tokens[:] = [0] * 3


@pytest.mark.parametrize(
    "script",
    [
        lambda c, b: spoil(c) or chain([1]),
        lambda c, b: Draft([1, 2][: b.nodes], [-1, 0][: b.nodes]),
        lambda c, b: Draft((1,), (-1,), torch.ones((1, 17), requires_grad=True).softmax(-1)),
    ],
    ids=["changes its context", "lists for tuples", "laws that want a gradient"],
)
@pytest.mark.parametrize(
    "params", [TEN, SamplingParams(max_tokens=10, temperature=1.0, seed=3)], ids=["greedy", "seed"]
)
def test_a_drafter_with_bad_manners_changes_no_text(
    script: Callable[[Context, Budget], Draft], params: SamplingParams
) -> None:
    one = engine(ScriptedDrafter(script))
    request = one.add(PROMPT, params)
    finish(one)
    assert text(request) == plain(params=params)


@pytest.mark.parametrize("rule", ["reject", "block", "traversal"])
def test_laws_that_want_a_gradient_cost_nothing_but_time(rule: str) -> None:
    laws = torch.zeros((1, 17), requires_grad=True).softmax(-1)
    one = engine(ScriptedDrafter(lambda c, b: Draft((1,), (-1,), laws)))
    request = one.add(PROMPT, SamplingParams(max_tokens=10, temperature=1.0, rule=rule))  # type: ignore[arg-type]
    finish(one)
    assert len(text(request)) == 10
    assert not one.guard.failures


def test_a_drafter_is_told_when_a_request_ends_and_when_it_loses_its_place() -> None:
    drafter = ScriptedDrafter(lambda c, b: Draft())
    one = engine(drafter)
    ended, aborted, preempted = (one.add(PROMPT, TEN) for _ in range(3))
    one.step()
    one.abort(aborted)
    one.preempt(preempted)
    assert drafter.forgotten == [aborted.id, preempted.id]
    finish(one)
    assert sorted(drafter.forgotten[2:]) == [ended.id, preempted.id]


def test_outcomes_tell_a_drafter_what_became_of_its_draft() -> None:
    right = plain()
    drafter = ScriptedDrafter(lambda c, b: chain([*right[len(c.tokens) - 3 :][:2], 16][: b.depth]))
    one = engine(drafter)
    one.add(PROMPT, TEN)
    finish(one)
    assert [token for outcome in drafter.outcomes for token in outcome.tokens] == right
    first = drafter.outcomes[0]
    assert (first.accepted, first.drafted, first.tokens) == (2, 3, tuple(right[:3]))


def test_features_belong_to_the_rows_of_their_request() -> None:
    """Alone or in company, a request's rows carry the same features."""

    def features(prompts: list[list[int]], mine: int) -> list[Tensor]:
        drafter = ScriptedDrafter(lambda c, b: chain([7, 8][: b.depth]))
        drafter.taps = (0, 1)
        one = engine(drafter)
        requests = [one.add(prompt, SamplingParams(max_tokens=3)) for prompt in prompts]
        finish(one)
        return [
            o.features for o in drafter.outcomes if o.request_id == requests[mine].id and o.features is not None
        ]

    alone = features([PROMPT], 0)
    together = features([[9] * 7, PROMPT, [3]], 1)
    assert len(alone) == len(together) > 1
    for left, right in zip(alone, together, strict=True):
        assert torch.equal(left, right)
        assert left.shape[1:] == (2, 1)


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_more_alternatives_than_there_are_ids_gives_all_ids(mode: str) -> None:
    one = engine(model=ToyModel(5))
    request = one.add([1, 2], SamplingParams(max_tokens=3, logprobs=20, prompt_logprobs=20, logprobs_mode=mode))  # type: ignore[arg-type]
    finish(one)
    assert all(len(entry.top) == 5 for entry in [*request.logprobs, *request.prompt_logprobs])


def test_end_ids_that_the_model_has_no_logits_for_are_no_hindrance() -> None:
    """Configurations name ids of tokens that were added and never trained, and -1 for none."""
    one = Engine(ToyModel(), NoDrafter(), FixedController(Budget.chain(4)), eos_ids=(17, 99, -1))
    request = one.add(PROMPT, SamplingParams(max_tokens=10, min_tokens=5))
    finish(one)
    assert text(request) == plain()
