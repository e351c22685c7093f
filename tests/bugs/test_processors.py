"""Bug reports on what acts on logits, and the prefix it sees (D of the collection)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from torch import Tensor

from sooner.core.tree import Draft
from sooner.draft.lookup import LookupDrafter
from sooner.params import SamplingParams
from sooner.testing import ScriptedDrafter, ToyModel, oracle
from tests.bugs.harness import KINDS, drafters, engine, generate, run, text
from tests.engine.plain import plain_text

VOCAB = 20  # so few ids that penalties find something to count
PROMPT = [3, 14, 15, 9, 6]
K = 5


def plain(prompt: Sequence[int], params: SamplingParams, model: ToyModel | None = None) -> list[int]:
    return plain_text((model or ToyModel(VOCAB)).next_logits, prompt, params, eos=())[0]


UNBIASED = plain(PROMPT, SamplingParams(max_tokens=30))
PHRASE = UNBIASED[1:3]


def after_a_only_b_or_c(tokens: Sequence[int], logits: Tensor) -> Tensor:
    """Pure: whatever follows the first token of the plain text is 7 or 8."""
    if tokens[-1] == UNBIASED[0]:
        logits[[7, 8]] += 50
    return logits


def not_this_phrase(tokens: Sequence[int], logits: Tensor) -> Tensor:
    """Pure: forbids the second word of a two-word phrase after its first."""
    if tokens[-1] == PHRASE[0]:
        logits[PHRASE[1]] = -100.0
    return logits


EDITS: dict[str, dict[str, Any]] = {
    "a token is ruled out": dict(logit_bias={UNBIASED[3]: -100.0, UNBIASED[4]: -100.0}),
    "a token is pushed": dict(logit_bias={7: 1.5}),
    "only some are allowed": dict(allowed_token_ids=tuple(range(0, VOCAB, 3))),
    "min-p": dict(min_p=0.3, temperature=0.9, seed=1),
    "after a only b or c": dict(logits_processors=(after_a_only_b_or_c,)),
    "a phrase is ruled out": dict(logits_processors=(not_this_phrase,)),
    "repetition": dict(repetition_penalty=1.5),
    "presence and frequency": dict(presence_penalty=1.0, frequency_penalty=0.5),
    "frequency below 0": dict(frequency_penalty=-2.0),
    "no early end": dict(min_tokens=9, stop_token_ids=tuple(UNBIASED[2:6])),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("edit", EDITS)
def test_27_what_acts_on_logits_reaches_the_bonus_token_only(edit: str, kind: str) -> None:
    params = SamplingParams(max_tokens=30, **EDITS[edit])
    expected = plain(PROMPT, params)
    assert expected != UNBIASED, "the edit changes the text"
    request = generate(drafters([*PROMPT, *expected], VOCAB)[kind](), PROMPT, params, ToyModel(VOCAB), k=K)
    assert text(request) == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_27_forbidden_tokens_come_through_lookup(temperature: float) -> None:
    """The prompt goes in circles through tokens that are forbidden; lookup proposes them again and again."""
    model = ToyModel(40, order=10**6)
    prompt = [1, *plain([1], SamplingParams(max_tokens=80), model)]
    banned = prompt[-12:-6]
    params = SamplingParams(
        max_tokens=60, temperature=temperature, seed=3, logit_bias={token: -100.0 for token in banned}
    )
    request = generate(LookupDrafter(), prompt, params, ToyModel(40, order=10**6), k=K)
    assert text(request) == plain(prompt, params, model)
    assert not set(text(request)) & set(banned)
    proposed = ScriptedDrafter(lambda context, budget: LookupDrafter().propose([context], [budget])[0])
    guessed: list[int] = []
    script = proposed._script

    def noted(context: Any, budget: Any) -> Draft:
        draft = script(context, budget)
        guessed.extend(draft.tokens)
        return draft

    proposed._script = noted
    generate(proposed, prompt, params, ToyModel(40, order=10**6), k=K)
    assert set(guessed) & set(banned), "lookup did propose what is forbidden"


@pytest.mark.parametrize("kind", ["oracle", "oracle(1)", "oracle(2)", "anti", "self", "lookup"])
def test_28_a_processor_gets_a_stale_history(kind: str) -> None:
    """Every prefix it sees is prompt, text, and the drafted tokens before that position; none is left out."""
    seen: list[list[int]] = []

    def record(tokens: Sequence[int], logits: Tensor) -> Tensor:
        seen.append(list(tokens))
        return logits

    whole = [*PROMPT, *UNBIASED]
    params = SamplingParams(max_tokens=30, logits_processors=(record,))
    request = generate(drafters(whole, VOCAB)[kind](), PROMPT, params, ToyModel(VOCAB), k=K)
    assert text(request) == UNBIASED
    for i in range(30):
        assert whole[: len(PROMPT) + i] in seen, f"the prefix of token {i} was never shown"
    for prefix in seen:
        right = next((i for i, (a, b) in enumerate(zip(prefix, whole, strict=False)) if a != b), len(prefix))
        assert right >= len(PROMPT)
        assert len(prefix) - right <= K, "more wrong tokens than a draft has"


def test_28_a_drafter_sees_the_whole_text_each_time_it_is_asked() -> None:
    whole = [*PROMPT, *UNBIASED]
    drafter = oracle(whole, 2, VOCAB)
    one = engine(drafter, ToyModel(VOCAB), k=K)
    first, second = (
        one.add(PROMPT, SamplingParams(max_tokens=30)),
        one.add(PROMPT[1:], SamplingParams(max_tokens=9)),
    )
    run(one)
    for request in (first, second):
        lengths = []
        for context in drafter.contexts:
            if context.request_id == request.id:
                assert list(context.tokens) == request.tokens[: len(context.tokens)]
                lengths.append(len(context.tokens))
        assert lengths == sorted(set(lengths)), "longer each time"
        assert lengths[0] == len(request.prompt)


@pytest.mark.parametrize("broken", [KeyError("mine"), ZeroDivisionError()], ids=["KeyError", "ZeroDivisionError"])
@pytest.mark.parametrize("at", [1, 7, 16])
def test_40_a_processor_that_raises_takes_the_other_requests_with_it(broken: Exception, at: int) -> None:
    """A request whose own function fails ends with an error; its neighbour never notices."""
    calls = iter(range(1, 10**6))

    def fails(tokens: Sequence[int], logits: Tensor) -> Tensor:
        if next(calls) >= at:
            raise broken
        return logits

    whole = [*PROMPT, *UNBIASED]
    one = engine(oracle(whole), ToyModel(VOCAB), k=K)
    failing = one.add(PROMPT, SamplingParams(max_tokens=30, logits_processors=(fails,)))
    neighbour = one.add(PROMPT, SamplingParams(max_tokens=30))
    run(one)
    assert text(neighbour) == UNBIASED
    assert failing.finish == "error"
    assert failing.error is not None
    assert type(broken).__name__ in failing.error
    assert text(failing) == UNBIASED[: len(text(failing))]
    again = one.add(PROMPT, SamplingParams(max_tokens=30))
    run(one)
    assert text(again) == UNBIASED


def wrong_shape(tokens: Sequence[int], logits: Tensor) -> Any:
    return logits[:-1]


def nothing(tokens: Sequence[int], logits: Tensor) -> Any:
    return None


@pytest.mark.parametrize("processor", [wrong_shape, nothing])
def test_40_a_processor_that_returns_nonsense_is_that_requests_error(processor: Callable[..., Any]) -> None:
    one = engine(oracle([*PROMPT, *UNBIASED]), ToyModel(VOCAB), k=K)
    failing = one.add(PROMPT, SamplingParams(max_tokens=30, logits_processors=(processor,)))
    neighbour = one.add(PROMPT, SamplingParams(max_tokens=30))
    run(one)
    assert text(neighbour) == UNBIASED
    assert (failing.finish, text(failing)) == ("error", [])
