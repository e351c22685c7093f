"""Bug reports on grammars under speculation (E of the collection)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

import pytest

from sooner.config import Budget
from sooner.core.tree import Draft, chain
from sooner.draft.lookup import LookupDrafter
from sooner.draft.protocol import Context, Drafter
from sooner.engine import constraint as protocol
from sooner.engine.engine import Engine
from sooner.engine.grammar import GrammarCompiler
from sooner.params import SamplingParams
from sooner.structured import StructuredOutputs
from sooner.testing import ScriptedDrafter, ToyModel, oracle
from tests.bugs.harness import anti, engine, run, self_draft, text
from tests.engine.grammars import BACKENDS, EOS, NAMES, WIDTH, constrained_text, pieces, written

PROMPT = [2, 9, 4, 3, 14, 15]
A, B, AB, C, SPACE = (NAMES.index(name) for name in ("a", "b", "ab", "c", " "))
BRACE = NAMES.index("}")
OBJECT = {"type": "object", "properties": {"ab": {"enum": [0, 1]}}, "required": ["ab"]}


@pytest.fixture(scope="module")
def with_end() -> Iterator[GrammarCompiler]:
    one = GrammarCompiler(pieces(), WIDTH, (EOS,), seconds=60)
    yield one
    one.close()


@pytest.fixture(scope="module")
def endless() -> Iterator[GrammarCompiler]:
    """For a model that has no id for the end of a text."""
    one = GrammarCompiler(pieces(), WIDTH, (), seconds=60)
    yield one
    one.close()


def toy() -> ToyModel:
    return ToyModel(WIDTH)


def serve(compiler: GrammarCompiler, drafter: Drafter, k: int = 6) -> Engine:
    ends = compiler.vocabulary().ends
    return engine(drafter, toy(), k=k, eos_ids=ends, compile_grammar=compiler.compile)


def plainly(
    compiler: GrammarCompiler, params: SamplingParams, prompt: Sequence[int] = PROMPT
) -> tuple[list[int], str]:
    assert params.structured_outputs is not None
    ends = compiler.vocabulary().ends
    return constrained_text(compiler, params.structured_outputs, toy().next_logits, prompt, params, ends)


def beyond(right: Sequence[int], more: Sequence[int]) -> ScriptedDrafter:
    """Drafts the whole right text at once, and more tokens behind its end."""
    whole = [*PROMPT, *right, *more]

    def script(context: Context, budget: Budget) -> Draft:
        start = len(context.tokens)
        return chain(whole[start : start + budget.depth])

    return ScriptedDrafter(script)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("backend", BACKENDS)
def test_30_a_matcher_is_advanced_after_it_has_ended(
    with_end: GrammarCompiler, backend: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft of the closing brace, the end of the text and two more tokens, where spaces could have followed."""
    monkeypatch.setattr(protocol, "FORCED", 0)  # else a forced chain comes in place of the draft
    wanted = StructuredOutputs(regex=r'\{"ab":(0|1)\} *', backend=backend)
    bias = {EOS: 5.0}
    params = SamplingParams(
        max_tokens=30, temperature=temperature, seed=1, structured_outputs=wanted, logit_bias=bias
    )
    right, finish = plainly(with_end, params)
    assert finish == "stop"
    assert right[-2:] == [BRACE, EOS]
    for more in ([A, B], [EOS, EOS], [BRACE, BRACE], [SPACE, WIDTH - 1]):
        one = serve(with_end, beyond(right, more), k=len(right) + 2)
        request = one.add(PROMPT, params)
        run(one)
        assert (text(request), request.finish, request.error) == (right, "stop", None)
        assert json.loads(written(text(request)))["ab"] in (0, 1)
        assert request.tally.accepted_by_depth[-1] == 1, "all of it in one pass"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("backend", BACKENDS)
def test_30_a_grammar_that_is_complete_does_not_end_the_request(
    endless: GrammarCompiler, with_end: GrammarCompiler, backend: str, temperature: float
) -> None:
    """Nothing may follow the brace: the text ends there, with reason "stop", whether or not an id says so."""
    wanted = StructuredOutputs(json=OBJECT, backend=backend)
    params = SamplingParams(max_tokens=200, temperature=temperature, seed=1, structured_outputs=wanted)
    for compiler in (endless, with_end):
        right, finish = plainly(compiler, params)
        assert finish == "stop"
        assert right[-1] == BRACE
        for more in ([EOS, A, B], [BRACE, BRACE], [A, B, C]):
            one = serve(compiler, beyond(right, more), k=12)
            request = one.add(PROMPT, params)
            run(one)
            assert (text(request), request.finish, request.error) == (right, "stop", None)
            assert json.loads(written(text(request)))["ab"] in (0, 1)


REGEX = "(ab)*c"
# Makes the ToyModel stay in the loop of the expression for all of the 50 tokens, or leave it sooner or later.
BIASES = {"long": {C: -100.0}, "some": {C: -1.0}}


def begins(written_text: str) -> bool:
    return bool(re.fullmatch("(ab)*(a|c)?", written_text))


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("draft", ["anti", "oracle(1)", "oracle(2)", "oracle", "self", "forbidden"])
def test_31_a_matcher_stays_ahead_of_the_text_after_rejected_drafts(
    endless: GrammarCompiler, backend: str, draft: str, temperature: float, bias: str
) -> None:
    wanted = StructuredOutputs(regex=REGEX, backend=backend)
    params = SamplingParams(
        max_tokens=50, temperature=temperature, seed=2, structured_outputs=wanted, logit_bias=BIASES[bias]
    )
    right, finish = plainly(endless, params)
    whole = [*PROMPT, *right]
    drafters: dict[str, Drafter] = {
        "anti": anti(whole, WIDTH),
        "oracle(1)": oracle(whole, right=1, vocab=WIDTH),
        "oracle(2)": oracle(whole, right=2, vocab=WIDTH),
        "oracle": oracle(whole),
        "self": self_draft(WIDTH),
        "forbidden": oracle([*PROMPT, *[WIDTH - 1] * 60]),
    }
    one = serve(endless, drafters[draft], k=4)
    request = one.add(PROMPT, params)
    run(one)
    assert (text(request), request.finish, request.error) == (right, finish, None)
    assert begins(written(right))
    assert (len(right) == 50) is (finish == "length"), "it is not cut after a handful of tokens"
    assert bias != "long" or len(right) == 50


@pytest.mark.parametrize("backend", BACKENDS)
def test_31_two_grammars_in_one_batch(endless: GrammarCompiler, backend: str) -> None:
    other = StructuredOutputs(grammar='root ::= "(" root ")" | "x"', backend=backend)
    wanted = [StructuredOutputs(regex=REGEX, backend=backend), other]
    all_params = [
        SamplingParams(
            max_tokens=50,
            temperature=1.0,
            seed=2,
            structured_outputs=one,
            logit_bias={C: -3.0, NAMES.index("x"): -1.0},
        )
        for one in wanted
    ]
    for drafter in (LookupDrafter(), self_draft(WIDTH)):
        one = serve(endless, drafter)
        requests = [one.add(PROMPT, params) for params in all_params]
        run(one)
        for request, params in zip(requests, all_params, strict=True):
            assert (text(request), request.finish) == plainly(endless, params)
        assert begins(written(text(requests[0])))
        assert re.fullmatch(r"\(*(x\)*)?", written(text(requests[1])))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_31_a_prompt_full_of_what_the_grammar_forbids(
    endless: GrammarCompiler, backend: str, temperature: float
) -> None:
    """Lookup copies "abab" and then what followed it there."""
    prompt = [A, B, NAMES.index("yes"), AB, AB, BRACE, A, B, A, B, SPACE, NAMES.index("x")] * 4 + [A, B]
    wanted = StructuredOutputs(regex=REGEX, backend=backend)
    params = SamplingParams(
        max_tokens=50, temperature=temperature, seed=2, structured_outputs=wanted, logit_bias=BIASES["long"]
    )
    one = serve(endless, LookupDrafter())
    request = one.add(prompt, params)
    run(one)
    assert (text(request), request.finish) == plainly(endless, params, prompt)
    assert begins(written(text(request)))
    record = request.tally.close()
    assert 0 < record.accepted < record.drafted
