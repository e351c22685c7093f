"""Bug reports on options, and on drafts of another type than their target (N of the collection)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

import sooner
from sooner.config import Budget, EngineConfig
from sooner.core.tree import Draft, chain
from sooner.draft.model import ModelDrafter
from sooner.draft.protocol import Context
from sooner.errors import ConfigError
from sooner.params import SamplingParams
from sooner.testing import ScriptedDrafter, ToyModel
from tests.bugs.harness import KINDS, PROMPT, VOCAB, drafters, generate, greedy, text
from tests.draft.tables import Table

G = greedy(ToyModel(VOCAB), PROMPT, 40)
WHOLE = [*PROMPT, *G]
TWENTY = SamplingParams(max_tokens=20)


def named(tiny: Path, draft: str) -> str:
    return f"model:{tiny}" if draft == "model" else draft


@pytest.mark.parametrize("kind", KINDS)
def test_63_a_draft_length_of_0_divides_by_zero(kind: str) -> None:
    request = generate(drafters(WHOLE)[kind](), PROMPT, TWENTY, k=0)
    record = request.tally.close()
    assert text(request) == G[:20]
    assert (record.drafted, record.acceptance, record.tokens_per_step) == (0, 0.0, 1.0)


@pytest.mark.parametrize("draft", ["none", "lookup", "model"])
def test_63_a_draft_length_of_0_is_plain_decoding(tiny: Path, draft: str) -> None:
    plain = sooner.LLM(str(tiny), draft="none", dtype="float32").generate("the text", TWENTY)
    result = sooner.LLM(str(tiny), draft=named(tiny, draft), k=0, dtype="float32").generate("the text", TWENTY)
    assert result.token_ids == plain.token_ids
    assert result.stats.drafted == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(k=-1), "k must be a whole number from 0 to 64, got -1"),
        (dict(k=65), "k must be a whole number from 0 to 64, got 65"),
        (dict(k=2.5), "got 2.5"),
        (dict(k=True), "got True"),
        (dict(width=0), "width must be a whole number from 1 to 64, got 0"),
        (dict(width=-3), "got -3"),
        (dict(dtype="float23"), "Did you mean 'float32'"),
        (dict(device="gpu"), "device 'gpu'"),
        (dict(draft="lokup"), "Did you mean 'lookup'"),
        (dict(draft=3), "draft must be a name or a Drafter, got int"),
        (dict(context_limit=0), "context_limit"),
        (dict(context_limit=-5), "context_limit"),
        (dict(context_limit=True), "context_limit"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(f"{k}={v}" for k, v in value.items()),
)
def test_63_options_that_make_no_sense_are_refused_at_the_start(
    tiny: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        sooner.LLM(str(tiny), **{"dtype": "float32", **options})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (dict(max_requests=0), "max_requests"),
        (dict(step_rows=-1), "step_rows"),
        (dict(chunk_rows=0), "chunk_rows"),
        (dict(chunk_rows=True), "chunk_rows"),
        (dict(max_requests=20, step_rows=10), "step_rows"),
    ],
    ids=str,
)
def test_63_limits_that_make_no_sense_are_refused_by_name(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        EngineConfig(**options)


def test_63_a_draft_length_beyond_the_context_is_cut() -> None:
    request = generate(drafters(WHOLE)["self"](), PROMPT, SamplingParams(max_tokens=None), k=64, context_limit=30)
    assert text(request) == G[:25]


def counting() -> tuple[ScriptedDrafter, list[int]]:
    """A drafter that fills every budget, and the lengths it was asked for."""
    asked: list[int] = []

    def script(context: Context, budget: Budget) -> Draft:
        asked.append(budget.depth)
        return chain([0] * budget.depth)

    return ScriptedDrafter(script), asked


@pytest.mark.parametrize("k", [1, 3, 7])
def test_64_the_draft_length_is_not_passed_on(tiny: Path, k: int) -> None:
    drafter, asked = counting()
    result = sooner.LLM(str(tiny), draft=drafter, k=k, dtype="float32").generate("the text", TWENTY)
    written = 0
    for depth, gain in zip(asked, [len(outcome.tokens) for outcome in drafter.outcomes], strict=False):
        assert depth == min(k, 20 - written - 1), "the wish, or what is left"
        written += gain
    assert len(result.token_ids) == 20
    assert result.stats.drafted == sum(asked)


def test_64_options_outlive_the_call_or_change_the_callers(tiny: Path) -> None:
    target = sooner.LLM(str(tiny), dtype="float32").target
    params, config = SamplingParams(max_tokens=20, stop_token_ids=(5,)), EngineConfig(4, 64, 8)
    before = (asdict(params), asdict(config))
    drafter, asked = counting()
    sooner.LLM(target, draft=drafter, k=7, config=config).generate("the text", params)
    assert max(asked) == 7
    drafter, asked = counting()
    sooner.LLM(target, draft=drafter, k=3, config=config).generate("the text", params)
    assert max(asked) == 3
    drafter, asked = counting()
    sooner.LLM(target, draft=drafter, config=config).generate("the text", params)
    assert asked[0] == 2, "the controller begins with short drafts, whatever was asked for before"
    assert (asdict(params), asdict(config)) == before


def test_64_two_threads_with_different_lengths_on_one_model(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each engine has its lock, but the lanes are the model's: passes of two engines must not overlap.

    A lane store that grows in one thread while another writes keys loses those keys.
    """
    target = sooner.LLM(str(tiny), dtype="float32").target
    engines = [sooner.LLM(target, draft="lookup", k=k) for k in (1, 6)]
    prompts = [[(13 * i + j) % 300 for j in range(5 + 9 * i)] for i in range(6)]
    params = SamplingParams(max_tokens=24)
    expected = [engines[0].generate(prompt, params).token_ids for prompt in prompts]
    inside, wrong = 0, []
    forward = target.model.forward

    def alone(*args: Any, **options: Any) -> Any:
        nonlocal inside
        inside += 1
        if inside > 1:
            wrong.append("two passes at once")
        time.sleep(0.0005)
        out = forward(*args, **options)
        inside -= 1
        return out

    def client(llm: sooner.LLM) -> None:
        for prompt, right in zip(prompts, expected, strict=True):
            if llm.generate(prompt, params).token_ids != right:
                wrong.append("another text")

    monkeypatch.setattr(target.model, "forward", alone)
    threads = [threading.Thread(target=client, args=(llm,), daemon=True) for llm in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
    assert target.model.lanes.in_use == 0


@pytest.mark.parametrize("draft_dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=30),
        SamplingParams(max_tokens=30, temperature=0.8, top_p=0.9, seed=4),
        SamplingParams(max_tokens=30, repetition_penalty=1.3, min_tokens=5, stop_token_ids=(20, 21)),
    ],
    ids=["greedy", "seed", "penalties"],
)
def test_65_a_draft_of_another_type(tiny: Path, draft_dtype: str, params: SamplingParams) -> None:
    plain = sooner.LLM(str(tiny), draft="none", dtype="float32").generate("the text", params)
    llm = sooner.LLM(str(tiny), draft=f"model:{tiny}", dtype="float32", draft_dtype=draft_dtype, k=4)
    result = llm.generate("the text", params)
    assert result.token_ids == plain.token_ids
    assert llm.engine.guard.failures == {}
    assert result.stats.accepted > 0


@pytest.mark.parametrize("rule", ["reject", "block", "traversal"])
@pytest.mark.parametrize("draft_dtype", ["bfloat16", "float16"])
def test_65_a_draft_of_another_type_under_the_other_rules(tiny: Path, draft_dtype: str, rule: str) -> None:
    params = SamplingParams(max_tokens=40, temperature=1.0, rule=rule, seed=1)  # type: ignore[arg-type]
    llm = sooner.LLM(str(tiny), draft=f"model:{tiny}", dtype="float32", draft_dtype=draft_dtype, k=4)
    result = llm.generate("the text", params)
    assert llm.engine.guard.failures == {}
    assert result.stats.acceptance > 0.8, "nearly the same law, nearly always accepted"


@pytest.mark.parametrize(
    "make", [lambda t: t.half() * 1e5, lambda t: t.bfloat16() * float("nan")], ids=["inf", "nan"]
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_65_a_draft_that_overflows_costs_nothing_but_time(
    make: Callable[[torch.Tensor], torch.Tensor], temperature: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    table = make(torch.randn((VOCAB, VOCAB), generator=generator))
    assert not torch.isfinite(table).all()
    params = SamplingParams(max_tokens=20, temperature=temperature, seed=2)
    plain = generate(None, PROMPT, params)
    request = generate(ModelDrafter(Table(table), VOCAB), PROMPT, params)
    assert text(request) == text(plain)
    assert request.tally.close().draft_failures == 0
