"""Bug reports on what is told about a text: log-probabilities, chunks, counts (K, L, M of the collection)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import sooner
from sooner.config import Budget, EngineConfig
from sooner.control.fixed import FixedController
from sooner.core.tree import Draft, chain
from sooner.draft.lookup import LookupDrafter
from sooner.draft.protocol import Context
from sooner.engine.engine import Engine
from sooner.engine.logprobs import TokenLogprob
from sooner.params import SamplingParams
from sooner.testing import ScriptedDrafter, ToyModel, oracle
from tests.bugs.harness import (
    KINDS,
    PROMPT,
    VOCAB,
    drafters,
    engine,
    generate,
    greedy,
    letters,
    run,
    text,
    with_text,
)

G = greedy(ToyModel(VOCAB), PROMPT, 60)
WHOLE = [*PROMPT, *G]
LETTERS = letters(VOCAB)
WRONG = VOCAB - 1


def scores(tokens: Sequence[int]) -> Tensor:
    """Plain log-probabilities of the token after `tokens`."""
    return ToyModel(VOCAB).next_logits(tokens).log_softmax(-1)


def compare(entries: Sequence[TokenLogprob], before: Sequence[int], tokens: Sequence[int], top: int) -> None:
    """One entry a token, each that of plain scoring, with a sorted list of the likeliest."""
    assert [entry.token for entry in entries] == list(tokens)
    for i, entry in enumerate(entries):
        plain = scores([*before, *tokens[:i]])
        assert entry.logprob == pytest.approx(float(plain[entry.token]), abs=1e-4)
        best = plain.topk(top)
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_57_the_log_probability_of_an_accepted_token_is_0(kind: str, temperature: float) -> None:
    params = SamplingParams(max_tokens=20, temperature=temperature, seed=5, logprobs=3)
    plain = generate(None, PROMPT, params)
    request = generate(drafters([*PROMPT, *text(plain)])[kind](), PROMPT, params)
    assert text(request) == text(plain)
    compare(request.logprobs, PROMPT, text(request), 3)
    if temperature == 0:
        assert all(entry.top[0][0] == entry.token for entry in request.logprobs), "the chosen one comes first"


@pytest.mark.parametrize("rule", ["reject", "block", "traversal"])
def test_57_the_log_probability_is_that_of_the_model_whatever_the_rule(rule: str) -> None:
    params = SamplingParams(max_tokens=20, temperature=0.7, seed=5, logprobs=3, rule=rule)  # type: ignore[arg-type]
    request = generate(drafters(WHOLE)["self"](), PROMPT, params)
    compare(request.logprobs, PROMPT, text(request), 3)


def in_turn(whole: Sequence[int], k: int) -> ScriptedDrafter:
    """Right for 0, 1 and k tokens in turn, so that rounds bring 1, 2 and k + 1."""
    rounds = iter(range(10**6))

    def script(context: Context, budget: Budget) -> Draft:
        start, right = len(context.tokens), (0, 1, k)[next(rounds) % 3]
        return chain([*whole[start : start + right], WRONG, WRONG - 1][: budget.depth])

    return ScriptedDrafter(script)


@pytest.mark.parametrize("chunk", [1, 3, 4, 100])
def test_58_log_probabilities_are_missing_or_from_the_wrong_row(chunk: int) -> None:
    """Two requests, prompts in chunks, rounds of 1, 2 and k + 1 tokens."""
    one = Engine(
        ToyModel(VOCAB),
        in_turn(WHOLE, 4),
        FixedController(Budget.chain(4)),
        config=EngineConfig(4, 64, chunk),
    )
    params = SamplingParams(max_tokens=30, logprobs=2, prompt_logprobs=2)
    requests = [one.add(PROMPT, params), one.add(PROMPT[:1], params), one.add(WHOLE[:20], params)]
    run(one)
    for request in requests:
        compare(request.logprobs, request.prompt, text(request), 2)
        compare(request.prompt_logprobs, request.prompt[:1], request.prompt[1:], 2)


@pytest.mark.parametrize("preempted_after", range(1, 6))
def test_58_prompt_log_probabilities_of_a_request_that_lost_its_place(preempted_after: int) -> None:
    """It comes again in chunks of another size, its neighbour being gone; nothing is left out or repeated."""
    one = engine(config=EngineConfig(2, 9, 9))
    neighbour = one.add(WHOLE[:12], SamplingParams(max_tokens=3, prompt_logprobs=1))
    request = one.add(WHOLE[:40], SamplingParams(max_tokens=3, prompt_logprobs=1))
    for _ in range(preempted_after):
        one.step()
    one.preempt(request)
    run(one)
    for each in (request, neighbour):
        compare(each.prompt_logprobs, each.prompt[:1], each.prompt[1:], 1)


@pytest.mark.parametrize("draft", ["none", "lookup", "model"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_58_log_probabilities_of_a_model_are_those_of_transformers(
    tiny: Path, draft: str, temperature: float
) -> None:
    llm = sooner.LLM(
        str(tiny),
        draft=f"model:{tiny}" if draft == "model" else draft,
        dtype="float32",
        k=4,
        config=EngineConfig(4, 64, 5),
    )
    prompt = llm.encode("once upon a time there was a library")
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=3, logprobs=4, prompt_logprobs=0)
    result = llm.generate(prompt, params)
    plain = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    with torch.inference_mode():
        logs = plain(torch.tensor([[*prompt, *result.token_ids]])).logits[0].log_softmax(-1)
    assert result.logprobs is not None
    assert result.prompt_logprobs is not None
    entries = [*result.prompt_logprobs, *result.logprobs]
    assert [entry.token for entry in entries] == [*prompt[1:], *result.token_ids]
    for row, entry in zip(logs, entries, strict=False):
        assert entry.logprob == pytest.approx(float(row[entry.token]), abs=1e-4)
    for row, entry in zip(logs[len(prompt) - 1 :], result.logprobs, strict=False):
        assert [value for _, value in entry.top] == pytest.approx(row.topk(4).values.tolist(), abs=1e-4)


@pytest.mark.parametrize("k", [1, 4, 8])
@pytest.mark.parametrize("marker", range(12))
def test_59_only_the_last_token_of_a_block_is_streamed(k: int, marker: int) -> None:
    """A marker as first, middle and last token of a block: every token's text comes, once and in order."""
    one = engine(oracle(WHOLE), k=k, **with_text(LETTERS))
    one.add(PROMPT, SamplingParams(max_tokens=13))
    events = run(one)
    assert max(len(event.tokens) for event in events) == min(k + 1, 13)
    shown = "".join(piece.text for event in events for piece in event.pieces)
    assert shown == "".join(f"<{token}>" for token in G[:13])
    assert shown.count(f"<{G[marker]}>") == 1


@pytest.mark.parametrize("draft", ["none", "lookup", "model"])
def test_59_chunks_join_to_the_text_and_usage_counts_tokens(tiny: Path, draft: str) -> None:
    llm = sooner.LLM(str(tiny), draft=f"model:{tiny}" if draft == "model" else draft, dtype="float32", k=4)
    params = SamplingParams(max_tokens=60)
    whole = llm.generate("the target checks the text, ", params)
    chunks = list(llm.stream("the target checks the text, ", params))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == whole.token_ids
    last = chunks[-1].result
    assert last is not None
    assert all(chunk.result is None for chunk in chunks[:-1])
    assert (last.text, last.token_ids, last.finish_reason) == (whole.text, whole.token_ids, "length")
    assert last.stats.emitted == len(whole.token_ids) == 60
    if draft == "model":
        assert len(chunks) < 60, "there were chunks of several tokens"


def test_61_the_accepted_count_goes_on_after_the_first_rejection() -> None:
    """Right at positions 1, 2, 4, 5 and wrong at 3: two are accepted. Beside it a row that is right throughout."""

    def script(context: Context, budget: Budget) -> Draft:
        start = len(context.tokens)
        tokens = WHOLE[start : start + budget.depth]
        if context.request_id == spoilt.id and len(tokens) > 2:
            tokens[2] = WRONG
        return chain(tokens)

    drafter = ScriptedDrafter(script)
    one = engine(drafter, k=5)
    spoilt = one.add(PROMPT, SamplingParams(max_tokens=60))
    right = one.add(WHOLE[:6], SamplingParams(max_tokens=48))
    run(one)
    for request, accepted in ((spoilt, 2), (right, 5)):
        rounds = [outcome for outcome in drafter.outcomes if outcome.request_id == request.id]
        assert {outcome.accepted for outcome in rounds[:-1]} == {accepted}
        assert {outcome.drafted for outcome in rounds[:-1]} == {5}
        assert all(len(outcome.tokens) == outcome.accepted + 1 for outcome in rounds[:-1])
        record = request.tally.close()
        assert record.accepted == sum(outcome.accepted for outcome in rounds)
        assert record.drafted == sum(outcome.drafted for outcome in rounds)
        assert record.emitted == sum(len(outcome.tokens) for outcome in rounds)
    assert spoilt.tally.close().accepted_by_depth[2:] == ()
    assert text(right) == G[1:49]


def test_62_tokens_thrown_away_at_the_end_count_into_the_mean() -> None:
    """The end as second token of a round whose six guesses are all right: two of them are delivered."""
    request = generate(oracle(WHOLE), PROMPT, SamplingParams(max_tokens=40), k=6, eos_ids=(G[8],))
    record = request.tally.close()
    assert text(request) == G[:9]
    assert (record.steps, record.emitted) == (2, 9), "7 and 2"
    assert (record.drafted, record.accepted) == (12, 8)
    assert record.accepted_by_depth == (2, 2, 1, 1, 1, 1)
    assert record.drafted_by_depth == (2,) * 6
    assert record.tokens_per_step == 4.5


def test_62_a_budget_that_cuts_a_round_short() -> None:
    request = generate(oracle(WHOLE), PROMPT, SamplingParams(max_tokens=9), k=6)
    record = request.tally.close()
    assert (record.steps, record.emitted, record.drafted, record.accepted) == (2, 9, 7, 7)
    assert record.acceptance == 1.0


def test_62_a_stop_string_in_the_middle_of_a_round() -> None:
    params = SamplingParams(max_tokens=40, stop=(f"<{G[8]}>",))
    record = generate(oracle(WHOLE), PROMPT, params, k=6, **with_text(LETTERS)).tally.close()
    assert (record.steps, record.emitted, record.accepted) == (2, 9, 8)


def test_62_no_round_at_all_divides_by_nothing() -> None:
    one = engine(LookupDrafter())
    request = one.add(PROMPT, SamplingParams())
    one.abort(request)
    record = request.tally.close()
    assert (record.steps, record.tokens_per_step, record.acceptance, record.tokens_per_second) == (
        0,
        0.0,
        0.0,
        0.0,
    )
    assert record.as_dict()["emitted"] == 0
