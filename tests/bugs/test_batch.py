"""Bug reports on batches, preemption, threads and memory (I of the collection)."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

import sooner
from sooner.config import Budget, EngineConfig
from sooner.control.fixed import FixedController
from sooner.core.tree import Draft, chain
from sooner.draft.lookup import LookupDrafter
from sooner.draft.protocol import Context
from sooner.engine.engine import Engine
from sooner.errors import ConfigError
from sooner.params import SamplingParams
from sooner.testing import ScriptedDrafter, ToyModel
from tests.bugs.harness import PROMPT, VOCAB, engine, generate, greedy, run, self_draft, text

SECONDS = 60.0  # far more than any of these needs; a hang ends the test


def prompts(count: int) -> list[list[int]]:
    return [[(17 * i + 5 * j) % VOCAB for j in range(3 + 2 * i)] for i in range(count)]


@pytest.mark.parametrize("size", [1, 2, 7])
@pytest.mark.parametrize("seed", range(3))
def test_50_rows_with_and_without_drafts_are_mixed_up(size: int, seed: int) -> None:
    """Who has a draft, and of what length, changes from round to round and from row to row."""
    random = Random(seed)
    plain = [greedy(ToyModel(VOCAB), prompt, 30) for prompt in prompts(size)]
    whole: dict[int, list[int]] = {len(p): [*p, *g] for p, g in zip(prompts(size), plain, strict=True)}
    known: dict[str, list[int]] = {}

    def script(context: Context, budget: Budget) -> Draft:
        right = known.setdefault(context.request_id, whole.get(len(context.tokens), []))
        if random.random() < 0.5:
            return Draft()
        start = len(context.tokens)
        return chain([*right[start : start + random.randint(0, budget.depth)], VOCAB - 1][: budget.depth])

    one = engine(ScriptedDrafter(script), k=4)
    requests = [one.add(prompt, SamplingParams(max_tokens=30)) for prompt in prompts(size)]
    run(one)
    assert [text(request) for request in requests] == plain
    assert sum(request.tally.close().accepted for request in requests) > 0


@pytest.mark.parametrize("size", [2, 7])
def test_50_rows_with_and_without_an_n_gram_match(size: int) -> None:
    made = [[i, *greedy(ToyModel(30, order=4), [i], 1 + 10 * (i % 3))] for i in range(size)]
    alone = [generate(LookupDrafter(), p, SamplingParams(max_tokens=40), ToyModel(30, order=4)) for p in made]
    one = engine(LookupDrafter(), ToyModel(30, order=4))
    requests = [one.add(prompt, SamplingParams(max_tokens=40)) for prompt in made]
    run(one)
    for request, single in zip(requests, alone, strict=True):
        assert text(request) == text(single)
        assert request.tally.close().accepted == single.tally.close().accepted


def preempting(one: Engine, random: Random) -> None:
    """Run to the end; every now and then a running request loses its place, drafts and all."""
    while one.busy:
        running = list(one._scheduler.running)
        if running and random.random() < 0.08:
            one.preempt(random.choice(running))
            one.check()
        one.step()
        one.check()


@pytest.mark.parametrize("k", [0, 1, 4, 9])
@pytest.mark.parametrize("drafter", [self_draft, LookupDrafter])
def test_51_preemption_with_drafts_outstanding(k: int, drafter: Callable[[], ScriptedDrafter]) -> None:
    """Four requests of 60 tokens, room for two at once, and places taken away again and again."""
    four = prompts(4)
    one = Engine(
        ToyModel(VOCAB),
        drafter(),
        FixedController(Budget.chain(k)),
        config=EngineConfig(max_requests=2, step_rows=16, chunk_rows=5),
    )
    requests = [one.add(prompt, SamplingParams(max_tokens=60, logprobs=0)) for prompt in four]
    preempting(one, Random(k))
    for request, prompt in zip(requests, four, strict=True):
        assert text(request) == greedy(ToyModel(VOCAB), prompt, 60)
        assert len(request.logprobs) == request.tally.close().emitted == 60
    assert one.model.lanes.in_use == 0


def test_52_several_samples_of_one_prompt_fail_or_repeat_each_other(tiny: Path) -> None:
    llm = sooner.LLM(str(tiny), draft="lookup", dtype="float32")
    greedy_one = llm.generate("the text", SamplingParams(max_tokens=12))
    cold = llm.generate("the text", SamplingParams(max_tokens=12, n=3))
    assert [r.token_ids for r in cold.alternatives] == [greedy_one.token_ids] * 3
    warm = llm.generate("the text", SamplingParams(max_tokens=12, n=3, temperature=1.5, seed=1))
    assert len({r.token_ids for r in warm.alternatives}) == 3
    first = llm.generate("the text", SamplingParams(max_tokens=12, temperature=1.5, seed=1))
    assert warm.token_ids == warm.alternatives[0].token_ids == first.token_ids
    again = llm.generate("the text", SamplingParams(max_tokens=12, n=3, temperature=1.5, seed=1))
    assert [r.token_ids for r in again.alternatives] == [r.token_ids for r in warm.alternatives]
    with pytest.raises(ConfigError, match="n and best_of must be 1"):
        llm.stream("the text", SamplingParams(n=2))


def in_threads(*works: Callable[[], None]) -> None:
    """Run all at once; raise what they raised, and AssertionError if one hangs."""
    raised: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if raised:
        raise raised[0]


@pytest.mark.parametrize("draft", ["lookup", "model"])
def test_53_requests_hang_or_outlive_their_clients_under_concurrency(tiny: Path, draft: str) -> None:
    """Eight threads, mixed lengths; every third client leaves early, one asks for something wrong."""
    llm = sooner.LLM(str(tiny), draft=f"model:{tiny}" if draft == "model" else draft, dtype="float32", k=3)
    plain = sooner.LLM(llm.target, draft="none")
    asked = [[(31 * i + j) % 250 + 3 for j in range(2 + 4 * i)] for i in range(8)]
    expected = [plain.generate(p, SamplingParams(max_tokens=10 + 3 * i)).token_ids for i, p in enumerate(asked)]

    def client(i: int) -> None:
        params = SamplingParams(max_tokens=10 + 3 * i)
        for _ in range(3):
            stream = llm.stream(asked[i], params)
            if i % 3 == 2:
                next(stream)
                del stream  # the client is gone
                continue
            chunks = list(stream)
            assert tuple(token for chunk in chunks for token in chunk.token_ids) == expected[i]

    def wrong() -> None:
        for _ in range(5):
            with pytest.raises(sooner.RequestError):
                llm.generate([5] * 300, SamplingParams())

    in_threads(*(lambda i=i: client(i) for i in range(8)), wrong)  # type: ignore[misc]  # i is bound on purpose
    assert not llm.engine.busy
    llm.engine.check()
    assert llm.engine.model.lanes.in_use == 0
    assert llm._events == {}
    assert llm.generate(asked[1], SamplingParams(max_tokens=13)).token_ids == expected[1]


def test_53_a_stream_nobody_reads_stays_for_ever(tiny: Path) -> None:
    """Dropped before its first chunk: the request must go as it does after one."""
    llm = sooner.LLM(str(tiny), draft="lookup", dtype="float32")
    stream = llm.stream("the text", SamplingParams(max_tokens=50))
    del stream
    gc.collect()
    llm.generate("the end", SamplingParams(max_tokens=2))
    assert not llm.engine.busy
    assert llm._events == {}


def test_53_a_stream_collected_while_the_engine_steps_stops_everything(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An abandoned stream in a reference cycle is closed by the garbage collector, which may run at any moment,
    also inside the engine's own step, in the thread that holds the lock."""
    llm = sooner.LLM(str(tiny), draft="lookup", dtype="float32")
    expected = llm.generate("the end", SamplingParams(max_tokens=8)).token_ids
    stepping, results = Engine.step, []

    def step(self: Engine) -> object:
        gc.collect()
        return stepping(self)

    def client() -> None:
        stream = llm.stream("the text", SamplingParams(max_tokens=50))
        next(stream)
        cycle: list[object] = [stream]
        cycle.append(cycle)
        del stream, cycle
        monkeypatch.setattr(Engine, "step", step)
        results.append(llm.generate("the end", SamplingParams(max_tokens=8)).token_ids)

    gc.collect()
    gc.disable()
    try:
        thread = threading.Thread(target=client, daemon=True)
        thread.start()
        thread.join(10)
        assert results == [expected], "the thread waits for a lock it holds itself"
    finally:
        gc.enable()
    assert not llm.engine.busy


def alive() -> int:
    gc.collect()
    return len(gc.get_objects())


def test_54_memory_grows_when_speculation_is_switched_off() -> None:
    """1,000 short requests without drafts, then 1,000 with: nothing is left of them."""
    for k in (0, 3):
        drafter = self_draft()
        one = engine(drafter, k=k)

        def hundred(one: Engine = one) -> None:
            for i in range(100):
                one.add([i, 1, 2], SamplingParams(max_tokens=4))
            run(one)

        hundred()
        before, room = alive(), one.model.lanes.store.shape
        for _ in range(10):
            hundred()
        assert alive() - before < before * 0.01
        assert one.model.lanes.store.shape == room
        assert one.model.lanes.in_use == drafter.model.lanes.in_use == 0
        assert drafter._lanes == {}
        assert one.guard.failures == {}


def test_54_a_long_text_needs_no_more_lanes_than_one() -> None:
    one = engine(self_draft(), k=3)
    request = one.add(PROMPT, SamplingParams(max_tokens=600))
    run(one)
    assert len(text(request)) == 600
    assert one.model.lanes.store.shape[2] <= 4
    assert one.model.lanes.capacity < 1000
