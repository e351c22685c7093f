"""Bug reports on length limits: budgets, contexts, a draft with less room than its target (B of the list)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from torch import Tensor

import sooner
from sooner.config import Budget
from sooner.core.step import Step
from sooner.core.tree import Draft, chain
from sooner.draft.lookup import LookupDrafter
from sooner.draft.protocol import Context
from sooner.errors import RequestError
from sooner.model.protocol import Output
from sooner.params import SamplingParams
from sooner.testing import ScriptedDrafter, ToyModel, oracle
from tests.bugs.harness import KINDS, PROMPT, VOCAB, drafters, engine, generate, greedy, run, self_draft, text

K = 8
G = greedy(ToyModel(VOCAB), PROMPT, 80)
WHOLE = [*PROMPT, *G]


class Bounded(ToyModel):
    """A ToyModel with `limit` positions: a row beyond them is an error, as it is on a real model."""

    def __init__(self, limit: int) -> None:
        super().__init__(VOCAB, context_limit=limit)
        self._limit = limit

    def forward(self, step: Step, *, rows: Tensor, taps: Sequence[int] = ()) -> Output:
        assert int(step.positions.max()) < self._limit, "a row outside the context"
        return super().forward(step, rows=rows, taps=taps)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2, 3, K, K + 1])
def test_10_more_new_tokens_than_asked(kind: str, n: int) -> None:
    request = generate(drafters(WHOLE)[kind](), PROMPT, SamplingParams(max_tokens=n), k=K)
    assert (text(request), request.finish) == (G[:n], "length")


@pytest.mark.parametrize("n", [1, 2, 3, K, K + 1])
def test_10_more_new_tokens_than_asked_from_a_repetitive_prompt(n: int) -> None:
    model = ToyModel(40, order=10**6)
    prompt = [1, *greedy(model, [1], 80)]
    request = generate(LookupDrafter(3), prompt, SamplingParams(max_tokens=n), ToyModel(40, order=10**6), k=K)
    assert text(request) == greedy(model, prompt, n)


def test_10_one_token_needs_no_draft() -> None:
    drafter = oracle(WHOLE)
    assert text(generate(drafter, PROMPT, SamplingParams(max_tokens=1), k=K)) == G[:1]
    assert drafter.contexts == []


@pytest.mark.parametrize("n", range(1, 21))
def test_11_fewer_tokens_than_asked_while_usage_reports_the_full_number(n: int) -> None:
    request = generate(oracle(WHOLE), PROMPT, SamplingParams(max_tokens=n, logprobs=0), k=4)
    assert text(request) == G[:n]
    assert request.tally.close().emitted == request.written == len(request.logprobs) == n


@pytest.mark.parametrize("i", range(12))
def test_11_usage_counts_what_an_end_in_mid_block_threw_away(i: int) -> None:
    params = SamplingParams(max_tokens=20, logprobs=0)
    request = generate(oracle(WHOLE), PROMPT, params, k=4, eos_ids=(G[i],))
    record = request.tally.close()
    assert record.emitted == len(request.logprobs) == len(text(request)) == i + 1
    assert record.accepted <= record.emitted


@pytest.mark.parametrize("short_of", [1, 2, K, K + 1, 30])
@pytest.mark.parametrize("most", [None, 1000])
@pytest.mark.parametrize("kind", KINDS)
def test_12_a_draft_runs_over_the_context_limit(short_of: int, most: int | None, kind: str) -> None:
    limit = 64
    prompt = [(7 * i) % VOCAB for i in range(limit - short_of)]
    expected = greedy(ToyModel(VOCAB), prompt, short_of)
    neighbour_text = greedy(ToyModel(VOCAB), PROMPT, 20)
    one = engine(drafters([*prompt, *expected])[kind](), Bounded(limit), k=K)
    request = one.add(prompt, SamplingParams(max_tokens=most))
    neighbour = one.add(PROMPT, SamplingParams(max_tokens=20))
    run(one)
    assert (text(request), request.finish) == (expected, "length")
    assert (text(neighbour), neighbour.finish) == (neighbour_text, "length")


@pytest.mark.parametrize("kind", KINDS)
def test_12_a_prompt_that_fills_the_context_is_refused_and_its_neighbour_is_not(kind: str) -> None:
    one = engine(drafters(WHOLE)[kind](), Bounded(64), k=K)
    neighbour = one.add(PROMPT, SamplingParams(max_tokens=20))
    with pytest.raises(RequestError, match="the prompt has 64 tokens; this model's context is 64"):
        one.add([1] * 64, SamplingParams())
    run(one)
    assert text(neighbour) == G[:20]


@pytest.mark.parametrize("draft", ["none", "lookup", "model"])
def test_12_a_text_ends_where_the_positions_of_the_model_end(tiny: Path, draft: str) -> None:
    """The tiny model has 256 positions; without a limit of its own a text goes on to the last."""
    llm = sooner.LLM(str(tiny), draft=f"model:{tiny}" if draft == "model" else draft, dtype="float32", k=K)
    prompt = [5 + i % 200 for i in range(240)]
    result = llm.generate(prompt, SamplingParams(max_tokens=None))
    assert (len(result.token_ids), result.finish_reason) == (16, "length")


@pytest.mark.parametrize("length", [27, 28, 30, 31, 32, 33, 40])
def test_13_the_draft_model_has_a_shorter_context(length: int) -> None:
    prompt = [(11 * i) % VOCAB for i in range(length)]
    one = engine(self_draft(context_limit=32), ToyModel(VOCAB, context_limit=128), k=5)
    request = one.add(prompt, SamplingParams(max_tokens=60))
    neighbour = one.add(PROMPT, SamplingParams(max_tokens=25))
    run(one)
    assert text(request) == greedy(ToyModel(VOCAB), prompt, 60)
    assert text(neighbour) == G[:25]
    record = neighbour.tally.close()
    assert record.accepted == record.drafted >= 15, "the short request keeps its acceptance"
    assert one.guard.failures == {}


def test_13_token_0_is_not_taken_for_nothing_proposed() -> None:
    """With three ids the text is full of zeros, before and after the draft model has run out of positions."""
    plain = greedy(ToyModel(3), [1, 2], 90)
    assert 0 in plain[:20]
    assert 0 in plain[40:]
    request = generate(self_draft(3, context_limit=32), [1, 2], SamplingParams(max_tokens=90), ToyModel(3), k=5)
    assert text(request) == plain


def test_14_no_limit_makes_the_budget_negative() -> None:
    request = generate(self_draft(), PROMPT, SamplingParams(max_tokens=None), k=K, eos_ids=(G[20],))
    assert (text(request), request.finish) == (G[:21], "stop")


@pytest.mark.parametrize("over", [1, 2, 7, 60])
def test_a5_a_draft_longer_than_the_budget_that_is_left(over: int) -> None:
    """The drafter is asked for no more than can be used; what it returns beyond that is refused, not emitted."""
    asked: list[int] = []

    def script(context: Context, budget: Budget) -> Draft:
        asked.append(budget.depth)
        start = len(context.tokens)
        return chain(WHOLE[start : start + budget.depth + over])

    request = generate(ScriptedDrafter(script), PROMPT, SamplingParams(max_tokens=10), k=4)
    assert text(request) == G[:10]
    assert max(asked) == 4
    assert request.tally.close().draft_failures == len(asked)
