"""Constrained texts: always valid, and those of plain constrained decoding, whatever is drafted. ToyModel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from random import Random

import pytest
import torch
from torch import Tensor

from sooner.config import Budget, EngineConfig
from sooner.control.fixed import FixedController
from sooner.core.tree import Draft, chain
from sooner.draft.lookup import LookupDrafter
from sooner.draft.model import ModelDrafter
from sooner.draft.none import NoDrafter
from sooner.draft.protocol import Context, Drafter
from sooner.engine import constraint as protocol
from sooner.engine.engine import Engine
from sooner.engine.grammar import GrammarCompiler
from sooner.engine.request import Request
from sooner.params import SamplingParams
from sooner.structured import StructuredOutputs
from sooner.testing import ScriptedDrafter, ToyModel
from tests.engine.grammars import BACKENDS, CASES, EOS, NAMES, SPECIAL, WIDTH, constrained_text, pieces, written
from tests.engine.plain import plain_text
from tests.engine.wild import random_tree

PROMPT = [2, 3, 4, 5, 17, 9, 2, 3, 4, 2]  # it violates every grammar here, and lookup copies from it
MOST = 60


def toy() -> ToyModel:
    return ToyModel(WIDTH, order=3)


def forbidden(context: Context, budget: Budget) -> Draft:
    """Ids that no grammar allows: padding, special tokens, the end of the text and what follows it."""
    return chain([SPECIAL, EOS, WIDTH - 1, EOS][: budget.depth])


def wild(context: Context, budget: Budget) -> Draft:
    """Trees of anything."""
    random = Random(len(context.tokens) * 7919 + sum(context.tokens))
    return random_tree(random, WIDTH, Budget(4, 3, 12), [random.randrange(WIDTH) for _ in range(6)])


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "none": NoDrafter,
    "lookup": LookupDrafter,
    "forbidden": lambda: ScriptedDrafter(forbidden),
    "trees": lambda: ScriptedDrafter(wild),
    "model": lambda: ModelDrafter(toy(), WIDTH, confidence=0.0),
}


@pytest.fixture(scope="module", params=[(), (EOS,)], ids=["no end of text", "end of text"])
def compiler(request: pytest.FixtureRequest) -> Iterator[GrammarCompiler]:
    one = GrammarCompiler(pieces(), WIDTH, request.param, seconds=60)
    yield one
    one.close()


def ends(compiler: GrammarCompiler) -> tuple[int, ...]:
    return compiler.vocabulary().ends


def engine(compiler: GrammarCompiler, drafter: Drafter, config: EngineConfig | None = None) -> Engine:
    return Engine(
        toy(),
        drafter,
        FixedController(Budget(4, 3, 12)),
        eos_ids=ends(compiler),
        compile_grammar=compiler.compile,
        config=config or EngineConfig(4, 128, 4),
    )


def params_of(case: str, backend: str, temperature: float, seed: int | None = 7, **more: object) -> SamplingParams:
    return SamplingParams(
        max_tokens=MOST,
        temperature=temperature,
        seed=seed,
        logit_bias=CASES[case].bias,
        structured_outputs=CASES[case].by(backend),
        **more,  # type: ignore[arg-type]  # whatever SamplingParams takes
    )


def plain(
    compiler: GrammarCompiler, params: SamplingParams, prompt: Sequence[int] = PROMPT
) -> tuple[list[int], str]:
    wanted = params.structured_outputs
    if wanted is None:
        return plain_text(toy().next_logits, prompt, params, eos=ends(compiler))
    return constrained_text(compiler, wanted, toy().next_logits, prompt, params, ends(compiler))


def run(one: Engine) -> None:
    while one.busy:
        one.step()
        one.check()


def text(request: Request) -> list[int]:
    return request.tokens[len(request.prompt) :]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_constrained_text_is_that_of_plain_constrained_decoding(
    compiler: GrammarCompiler, backend: str, case: str, temperature: float
) -> None:
    for seed in (7, 8):
        params = params_of(case, backend, temperature, seed)
        expected = plain(compiler, params)
        for name, make in DRAFTERS.items():
            one = engine(compiler, make())
            request = one.add(PROMPT, params)
            run(one)
            assert (text(request), request.finish) == expected, name
        if expected[1] == "stop":
            assert CASES[case].fits(written(expected[0])), written(expected[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_texts_of_these_tests_come_to_an_end(compiler: GrammarCompiler, backend: str) -> None:
    """So that whether they fit is looked at. Without an end of text "open" never ends."""
    for case in CASES:
        finishes = {plain(compiler, params_of(case, backend, 1.0, seed))[1] for seed in range(8)}
        assert ("stop" in finishes) is (case != "open" or bool(ends(compiler))), case


@pytest.mark.parametrize("rule", ["reject", "block", "traversal"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_text_is_valid_under_every_rule(compiler: GrammarCompiler, backend: str, rule: str) -> None:
    for case in CASES:
        for name in ("trees", "model", "forbidden"):
            one = engine(compiler, DRAFTERS[name]())
            requests = [one.add(PROMPT, params_of(case, backend, 1.0, seed, rule=rule)) for seed in range(2)]
            run(one)
            for request in requests:
                assert request.finish in ("stop", "length")
                if request.finish == "stop":
                    assert CASES[case].fits(written(text(request)))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("draft", DRAFTERS)
def test_requests_with_different_grammars_share_passes_and_are_preempted(
    compiler: GrammarCompiler, draft: str, temperature: float
) -> None:
    """Three grammars and a free text, prompts in chunks of 4, each request losing its lane now and then."""
    random = Random(1)
    one = engine(compiler, DRAFTERS[draft]())
    wanted = [
        params_of("schema", "xgrammar", temperature),
        params_of("regex", "llguidance", temperature),
        params_of("ebnf", "xgrammar", temperature),
        SamplingParams(max_tokens=MOST, temperature=temperature, seed=7),
    ]
    prompts = [PROMPT[i:] + PROMPT[:i] for i in range(4)]
    requests = [one.add(prompt, params) for prompt, params in zip(prompts, wanted, strict=True)]
    while one.busy:
        if random.random() < 0.3:
            one.preempt(random.choice(requests))
        one.step()
        one.check()
    for request, params in zip(requests, wanted, strict=True):
        assert (text(request), request.finish) == plain(compiler, params, request.prompt)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_grammar_forces_is_guessed_for_nothing(
    compiler: GrammarCompiler, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody drafts, and yet several tokens come at once; they count as drafted and accepted."""
    params = params_of("schema", backend, 0.0)
    records = []
    for forced in (protocol.FORCED, 0):
        monkeypatch.setattr(protocol, "FORCED", forced)
        one = engine(compiler, NoDrafter())
        request = one.add(PROMPT, params)
        run(one)
        assert (text(request), request.finish) == plain(compiler, params)
        records.append(request.tally.close())
    with_forced, without = records
    assert without.drafted == 0
    assert without.steps == without.emitted == with_forced.emitted
    assert with_forced.accepted > 0
    assert with_forced.accepted == with_forced.emitted - with_forced.steps
    assert with_forced.drafted >= with_forced.accepted


@pytest.mark.parametrize("backend", BACKENDS)
def test_nobody_writes_spaces_for_ever(backend: str) -> None:
    """A model that wants nothing but spaces still writes JSON, with some spaces in it."""
    compiler = GrammarCompiler(pieces(), WIDTH, (), seconds=60)
    one = engine(compiler, NoDrafter())
    bias = {NAMES.index(" "): 100.0, NAMES.index("}"): 50.0, NAMES.index("]"): 50.0}
    wanted = CASES["schema"].by(backend)
    request = one.add(PROMPT, SamplingParams(max_tokens=400, logit_bias=bias, structured_outputs=wanted))
    run(one)
    assert request.finish == "stop"
    assert CASES["schema"].fits(written(text(request)))
    assert written(text(request)).count(" ") > 20
    compiler.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_text_ends_where_nothing_may_follow(compiler: GrammarCompiler, backend: str) -> None:
    """With or without an end-of-text id, also where ends are ignored or come too early, and none is written."""
    for more in ({}, {"ignore_eos": True}, {"min_tokens": MOST}):
        one = engine(compiler, NoDrafter())
        request = one.add(PROMPT, params_of("choice", backend, 0.0, **more))
        run(one)
        assert request.finish == "stop", more
        assert EOS not in text(request)
        assert request.error is None


@pytest.mark.parametrize("name", ["none", "lookup"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_text_that_is_complete_with_its_last_allowed_token_has_stopped_not_run_out_of_room(
    backend: str, name: str
) -> None:
    """It was reported as "length", so a caller that retries cut texts would throw a complete one away."""
    compiler = GrammarCompiler(pieces(), WIDTH, (), seconds=60)
    one = engine(compiler, DRAFTERS[name]())
    wanted = StructuredOutputs(regex="[ab]{6}", backend=backend)
    whole = one.add(PROMPT, SamplingParams(max_tokens=MOST, structured_outputs=wanted))
    run(one)
    length = len(text(whole))
    exact, cut = (one.add(PROMPT, replace(whole.params, max_tokens=room)) for room in (length, length - 1))
    run(one)
    assert (exact.finish, text(exact)) == ("stop", text(whole))
    assert (cut.finish, text(cut)) == ("length", text(whole)[:-1])
    compiler.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_where_a_text_may_go_on_an_end_of_text_id_ends_it_although_it_is_ignored(backend: str) -> None:
    compiler = GrammarCompiler(pieces(), WIDTH, (EOS,), seconds=60)
    one = engine(compiler, LookupDrafter())
    wanted = StructuredOutputs(regex="[ab]+", backend=backend)
    params = SamplingParams(max_tokens=50, logit_bias={EOS: 1.0}, structured_outputs=wanted, ignore_eos=True)
    request = one.add(PROMPT, params)
    run(one)
    assert request.finish == "stop"
    assert text(request)[-1] == EOS
    assert set(written(text(request))) <= {"a", "b"}
    compiler.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_logits_processor_cannot_write_what_the_grammar_forbids(compiler: GrammarCompiler, backend: str) -> None:
    """Whatever it makes of the logits."""

    def zeros(tokens: Sequence[int], logits: Tensor) -> Tensor:
        return torch.zeros_like(logits)

    one = engine(compiler, NoDrafter())
    request = one.add(PROMPT, params_of("choice", backend, 0.0, logits_processors=(zeros,)))
    run(one)
    assert CASES["choice"].fits(written(text(request)))
