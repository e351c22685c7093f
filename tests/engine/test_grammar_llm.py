"""Structured outputs of a real (tiny) model with a byte-level tokenizer, through the library's front door."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

import sooner
from sooner import LLM, ConfigError, SamplingParams, StructuredOutputs
from sooner.config import Budget, EngineConfig
from sooner.core.tree import Draft
from sooner.draft.protocol import Context
from sooner.engine import constraint as protocol
from sooner.model.load import Loaded, load
from sooner.testing import ScriptedDrafter
from tests.engine.grammars import BACKENDS
from tests.tiny import VOCAB, make_tiny

SCHEMA = {
    "type": "object",
    "properties": {
        "the_title_of_the_book_in_the_library": {"type": "string", "pattern": "^.{1,8}$"},
        "number_of_pages_without_the_cover": {"type": "integer", "minimum": 0, "maximum": 999},
        "open": {"type": "boolean"},
    },
    "required": ["the_title_of_the_book_in_the_library", "number_of_pages_without_the_cover", "open"],
}
PROMPTS = ['{"a": [1, 2, {"a": [1, 2, ', "once upon a time there was a library", "yes no yes no yes", "abababab"]


def of_schema(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == SCHEMA["required"]
        and len(value["the_title_of_the_book_in_the_library"]) <= 8
        and 0 <= value["number_of_pages_without_the_cover"] <= 999
        and isinstance(value["open"], bool)
    )


CASES: dict[str, tuple[dict[str, Any], Callable[[str], bool]]] = {
    "schema": (dict(json=SCHEMA), of_schema),
    "regex": (dict(regex="(ab)*c"), lambda text: bool(re.fullmatch("(ab)*c", text))),
    "choice": (dict(choice=["yes", "no", "maybe so", 'a "quoted" one']), lambda text: len(text) > 1),
    "ebnf": (
        dict(grammar='root ::= "[" root "]" | "the end"'),
        lambda t: t.replace("[", "").replace("]", "") == "the end",
    ),
}


@pytest.fixture(scope="module", params=[None, [0, 1]], ids=["no end of text", "two ends of text"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """Its logits are wider than its tokenizer."""
    folder = make_tiny(tmp_path_factory.mktemp("models") / "wide", seed=1, vocab=VOCAB + 13, eos=request.param)
    return load(str(folder), dtype="float32")


def wrong(context: Context, budget: Budget) -> Draft:
    """Trees of ids no grammar allows, and of some that one may."""
    tokens = (VOCAB + 5, 1, 0, 70, 71, 64, 2)[: budget.nodes]
    return Draft(tokens, (-1, -1, -1, -1, 3, 4, 4)[: budget.nodes])


def llm_of(target: Loaded, draft: str, **options: Any) -> LLM:
    drafter: Any = ScriptedDrafter(wrong) if draft == "wrong" else draft.replace("self", f"model:{target.name}")
    return LLM(target, drafter, k=3, width=1 if draft == "self" else 4, dtype="float32", **options)


def params_of(case: str, backend: str, temperature: float, **more: Any) -> SamplingParams:
    wanted = StructuredOutputs(**CASES[case][0], backend=backend)
    spaces = {token: -30.0 for token in (201, 200, 204, 223)} | {69: -1.0}
    return SamplingParams(
        max_tokens=160, temperature=temperature, seed=11, structured_outputs=wanted, logit_bias=spaces, **more
    )


@pytest.fixture(scope="module")
def plain(target: Loaded) -> Callable[[str, SamplingParams], sooner.Result]:
    """Plain constrained decoding: nobody drafts, and nothing that is forced is guessed."""
    one = llm_of(target, "none")

    def write(prompt: str, params: SamplingParams) -> sooner.Result:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(protocol, "FORCED", 0)
            result = one.generate(prompt, params)
        assert result.stats.drafted == 0
        return result

    return write


@pytest.mark.parametrize("draft", ["none", "lookup", "self", "wrong"])
def test_a_text_fits_and_is_that_of_plain_constrained_decoding(
    target: Loaded, plain: Callable[[str, SamplingParams], sooner.Result], draft: str
) -> None:
    llm = llm_of(target, draft, config=EngineConfig(4, 64, 5))
    accepted = 0
    for case, (_, fits) in CASES.items():
        for backend in BACKENDS:
            for temperature in (0.0, 1.0):
                params = params_of(case, backend, temperature)
                result = llm.generate(PROMPTS[0], params)
                expected = plain(PROMPTS[0], params)
                assert result.token_ids == expected.token_ids, (case, backend, temperature)
                assert (result.text, result.finish_reason) == (expected.text, expected.finish_reason)
                assert expected.finish_reason == "stop"
                assert fits(result.text), result.text
                accepted += result.stats.accepted
    assert accepted > 60


def test_three_grammars_and_a_free_text_share_their_passes(
    target: Loaded, plain: Callable[[str, SamplingParams], sooner.Result]
) -> None:
    """With prompts in chunks, a drafter of trees, and each of them preempted in the middle."""
    llm = llm_of(target, "lookup", config=EngineConfig(4, 64, 5))
    wanted = [params_of(case, "auto", 1.0) for case in ("schema", "regex", "ebnf")]
    wanted.append(SamplingParams(max_tokens=40, temperature=1.0, seed=11))
    requests = [llm.engine.add(llm.encode(p), w) for p, w in zip(PROMPTS, wanted, strict=True)]
    steps = 0
    while llm.engine.busy:
        llm.engine.step()
        llm.engine.check()
        steps += 1
        if steps in (3, 12, 20, 30):
            llm.engine.preempt(requests[steps % 4])
    for prompt, params, request in zip(PROMPTS, wanted, requests, strict=True):
        assert tuple(request.tokens[len(request.prompt) :]) == plain(prompt, params).token_ids
        assert request.error is None


def test_any_json_object_may_be_asked_for(target: Loaded) -> None:
    llm = llm_of(target, "lookup")
    ends = {token: 8.0 for token in (4, 95)}  # the quotation mark and the closing brace
    for backend in BACKENDS:
        wanted = StructuredOutputs(json_object=True, backend=backend)
        params = SamplingParams(max_tokens=200, structured_outputs=wanted, logit_bias=ends)
        result = llm.generate(PROMPTS[1], params)
        assert result.finish_reason == "stop"
        assert isinstance(json.loads(result.text), dict)


def test_several_texts_of_one_prompt_each_fit(target: Loaded) -> None:
    llm = llm_of(target, "lookup")
    result = llm.generate(PROMPTS[2], params_of("schema", "auto", 1.0, n=3))
    assert len(result.alternatives) == 3
    assert all(of_schema(one.text) for one in result.alternatives)


def test_log_probabilities_of_the_processed_law_give_nothing_to_what_is_forbidden(target: Loaded) -> None:
    params = params_of("choice", "auto", 1.0, logprobs=20, logprobs_mode="processed")
    result = llm_of(target, "self").generate(PROMPTS[2], params)
    assert result.logprobs is not None
    first = {target.tokenizer.decode([token]) for token, value in result.logprobs[0].top if value > -1e9}
    assert first
    assert all(any(choice.startswith(start) for choice in CASES["choice"][0]["choice"]) for start in first)


def test_what_cannot_be_compiled_is_refused_and_its_neighbours_go_on(target: Loaded) -> None:
    llm = llm_of(target, "lookup")
    neighbour = llm.engine.add(llm.encode(PROMPTS[0]), SamplingParams(max_tokens=5))
    with pytest.raises(ConfigError, match="structured_outputs regex cannot be compiled"):
        llm.generate(PROMPTS[0], SamplingParams(structured_outputs=StructuredOutputs(regex="(a")))
    while llm.engine.busy:
        llm.engine.step()
    assert neighbour.finish == "length"
    llm.engine.check()
