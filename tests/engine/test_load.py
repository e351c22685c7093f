"""Many requests, little room: shared beginnings, a memory limit that is kept, deadlines, nothing left behind."""

from __future__ import annotations

import gc
import tracemalloc
from dataclasses import replace
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sooner.config import Budget, EngineConfig
from sooner.control.adaptive import AdaptiveController
from sooner.control.fixed import FixedController
from sooner.core.tree import Draft
from sooner.draft.lookup import LookupDrafter
from sooner.draft.model import ModelDrafter
from sooner.engine.engine import Engine
from sooner.engine.request import Request
from sooner.errors import ConfigError, RequestError
from sooner.params import SamplingParams
from sooner.testing import ScriptedDrafter, ToyModel
from tests.engine.plain import plain_text
from tests.engine.traffic import Setting, Traffic

COLUMN = 16  # bytes of a ToyModel's keys and values for one token
GREEDY = SamplingParams(max_tokens=12)

crowds = st.builds(
    lambda seed, lanes, columns, requests, trouble: Setting(
        seed=seed,
        requests=requests,
        alike=True,
        trouble=trouble,
        config=EngineConfig(
            requests, 90, 40, kv_memory=None if lanes is None else lanes * columns * COLUMN, reuse_prefixes=True
        ),
    ),
    seed=st.integers(0, 2**32),
    lanes=st.sampled_from([None, 1, 2, 3, 5]),
    columns=st.sampled_from([192, 384]),
    requests=st.integers(2, 9),
    trouble=st.sampled_from([0.0, 0.0, 0.2]),
)


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(crowds)
def test_crowds_that_share_beginnings_and_memory_write_the_plain_loop(setting: Setting) -> None:
    Traffic(setting).run()


def test_these_crowds_do_share_and_do_lose_their_lanes() -> None:
    reused = preempted = 0
    for seed in range(12):
        run = Traffic(Setting(seed=seed, requests=9, alike=True, config=EngineConfig(9, 90, 40, 2 * 384 * COLUMN)))
        run.run()
        reused, preempted = reused + run.reused, preempted + run.preempted
    assert reused > 300
    assert preempted > 12


def engine(**options: object) -> Engine:
    return Engine(ToyModel(17, order=3), LookupDrafter(), AdaptiveController(Budget.chain(6)), **options)  # type: ignore[arg-type]  # of Engine


def finish(one: Engine, *requests: Request) -> int:
    """Run to the end; rows of all passes together."""
    rows = 0
    forward = one.model.forward

    def counted(step, **kwargs):  # type: ignore[no-untyped-def]  # stands in for Model.forward
        nonlocal rows
        rows += sum(len(s.certain) for s in step.segments if s.start + len(s.certain) <= len(PROMPT))
        return forward(step, **kwargs)

    one.model.forward = counted  # type: ignore[method-assign]
    while one.busy:
        one.step()
        one.check()
    one.model.forward = forward  # type: ignore[method-assign]
    assert all(request.finish is not None for request in requests)
    return rows


PROMPT = [Random(5).randrange(17) for _ in range(1000)]


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "one after the other"])
def test_the_same_prompt_sixteen_times_is_computed_once(at_once: bool) -> None:
    one = engine(config=EngineConfig(16, 1024, 256))
    expected = plain_text(one.model.next_logits, PROMPT, GREEDY)[0]  # type: ignore[attr-defined]  # a ToyModel
    requests, rows = [], 0
    for _ in range(16):
        requests.append(one.add(PROMPT, GREEDY))
        rows += 0 if at_once else finish(one)
    rows += finish(one, *requests)
    assert rows < 1.2 * len(PROMPT)
    assert all(request.tokens[1000:] == expected for request in requests)
    assert [request.tally.close().reused for request in requests] == [0] + [999] * 15


@pytest.mark.parametrize(("common", "reused"), [(20, 20), (10, 0)])
def test_a_short_beginning_is_copied_if_it_is_worth_it(common: int, reused: int) -> None:
    one = engine(config=EngineConfig(4, 1024, 256))
    first = one.add(PROMPT[:60], GREEDY)
    finish(one, first)
    second = one.add([*PROMPT[:common], (PROMPT[common] + 1) % 17, *PROMPT[100:120]], GREEDY)
    finish(one, second)
    assert second.tally.close().reused == reused
    assert second.tokens[len(second.prompt) :] == plain_text(one.model.next_logits, second.prompt, GREEDY)[0]  # type: ignore[attr-defined]  # a ToyModel


@pytest.mark.parametrize(("common", "waits"), [(20, False), (40, True)])
def test_nobody_waits_for_a_beginning_that_is_soon_computed(common: int, waits: bool) -> None:
    one = engine(config=EngineConfig(4, 1024, 256))
    one.add(PROMPT[:300], GREEDY)
    second = one.add([*PROMPT[:common], (PROMPT[common] + 1) % 17, *PROMPT[400:420]], GREEDY)
    one.step()
    assert (second.lane is None) is waits


def test_another_scope_gets_no_hit() -> None:
    one = engine(config=EngineConfig(16, 1024, 256))
    mine = [one.add(PROMPT, replace(GREEDY, cache_salt=salt)) for salt in ("a", "b", None, "a")]
    rows = finish(one, *mine)
    later = one.add(PROMPT, replace(GREEDY, cache_salt="c"))
    rows += finish(one, later)
    assert [r.tally.close().reused for r in (*mine, later)] == [0, 0, 0, 999, 0]
    assert rows >= 4 * len(PROMPT)
    assert len({tuple(r.tokens) for r in (*mine, later)}) == 1


def test_drafters_may_share_within_a_salt_alone() -> None:
    seen = ScriptedDrafter(lambda context, budget: Draft())
    one = Engine(ToyModel(17), seen, FixedController(Budget.chain(2)))
    for salt in ("a", None):
        one.add([1, 2, 3], replace(GREEDY, cache_salt=salt))
    one.step()
    assert [context.scope for context in seen.contexts] == ["a", None]


def test_without_reuse_every_prompt_is_computed() -> None:
    one = engine(config=EngineConfig(4, 1024, 256, reuse_prefixes=False))
    requests = [one.add(PROMPT, GREEDY) for _ in range(3)]
    assert finish(one, *requests) == 3 * len(PROMPT)


def test_a_request_whose_teacher_is_aborted_goes_on_alone() -> None:
    one = engine(config=EngineConfig(4, 1024, 100))
    first, second = one.add(PROMPT, GREEDY), one.add(PROMPT, GREEDY)
    one.step()
    one.step()
    one.abort(first)
    finish(one, second)
    assert second.tokens[1000:] == plain_text(one.model.next_logits, PROMPT, GREEDY)[0]  # type: ignore[attr-defined]  # a ToyModel
    assert second.tally.close().reused == 200


def test_a_second_turn_goes_on_from_the_first() -> None:
    one = engine(config=EngineConfig(4, 1024, 256))
    first = one.add(PROMPT[:300], GREEDY)
    finish(one, first)
    second = one.add([*first.tokens, *PROMPT[:20]], GREEDY)
    finish(one, second)
    assert second.tally.close().reused == len(first.tokens) - 1


def test_target_and_drafter_lanes_keep_one_limit_together() -> None:
    draft = ToyModel(17, order=3)
    limit = 6 * 320 * COLUMN
    one = Engine(
        ToyModel(17, order=3),
        ModelDrafter(draft, 17),
        AdaptiveController(Budget.chain(4)),
        config=EngineConfig(8, 64, 32, kv_memory=limit),
    )
    random = Random(1)
    requests = [one.add(PROMPT[: random.randint(5, 150)], replace(GREEDY, max_tokens=40)) for _ in range(12)]
    while one.busy:
        one.step()
        assert one.model.lanes.bytes + draft.lanes.bytes <= limit
    assert one.model.lanes.in_use == draft.lanes.in_use == 0
    for request in requests:
        expected = plain_text(draft.next_logits, request.prompt, replace(GREEDY, max_tokens=40))[0]
        assert request.tokens[len(request.prompt) :] == expected


def test_a_long_request_gives_its_room_back_to_many_short_ones() -> None:
    """A store is a rectangle: after 900 tokens every lane would be as long, and only two would fit."""
    one = engine(config=EngineConfig(8, 256, 128, kv_memory=8 * 256 * COLUMN, reuse_prefixes=False))
    finish(one, one.add(PROMPT[:900], GREEDY))
    requests = [one.add([i] * 20, GREEDY) for i in range(8)]
    one.step()
    assert sum(request.lane is not None for request in requests) == 8
    finish(one, *requests)


def test_a_prompt_that_can_never_fit_is_refused_by_name() -> None:
    one = engine(config=EngineConfig(kv_memory=512 * COLUMN))
    with pytest.raises(RequestError, match="context"):
        one.add(PROMPT, GREEDY)
    assert str(512 * COLUMN) in str(one.memory)


def test_a_limit_too_small_for_anything_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="kv_memory"):
        engine(config=EngineConfig(kv_memory=100))


def test_the_urgent_are_admitted_first_and_the_patient_make_room() -> None:
    one = engine(config=EngineConfig(2, 64, 32))
    names = {0: "first", 5: "patient", -1: "urgent"}
    requests = {names[p]: one.add([1, 2, 3], replace(GREEDY, priority=p)) for p in (0, 5, -1)}
    order = []
    while one.busy:
        order += [event.request for event in one.step() if event.finish is not None]
    assert order[-1] is requests["patient"]


def test_a_deadline_ends_a_text_with_what_is_written() -> None:
    now = [0.0]
    one = engine(clock=lambda: now[0])
    running = one.add([1, 2, 3], replace(GREEDY, max_tokens=500, deadline_s=5.0))
    forever = one.add([1, 2, 3], replace(GREEDY, max_tokens=30))
    for _ in range(3):
        one.step()
    now[0] = 5.0
    [event, *_] = [event for event in one.step() if event.request is running]
    assert (event.finish, running.finish, running.written > 0) == ("deadline", "deadline", True)
    assert running.lane is None
    finish(one, forever)


def test_a_waiting_request_misses_its_deadline_too() -> None:
    now = [0.0]
    one = engine(clock=lambda: now[0], config=EngineConfig(1, 64, 32))
    one.add([1, 2, 3], replace(GREEDY, max_tokens=30))
    late = one.add([4, 5], replace(GREEDY, deadline_s=1.0))
    one.step()
    now[0] = 2.0
    assert late in [event.request for event in one.step()]
    assert (late.finish, late.written) == ("deadline", 0)


def test_many_short_requests_leave_nothing_behind() -> None:
    one = engine(config=EngineConfig(16, 128, 64))
    random = Random(0)

    def serve(count: int) -> int:
        """Bytes that Python holds after so many more requests."""
        for _ in range(count // 16):
            for _ in range(16):
                prompt = [random.randrange(17) for _ in range(random.randint(1, 60))]
                one.add(prompt, replace(GREEDY, max_tokens=random.randint(1, 3)))
            while one.busy:
                one.step()
            one.check()
            assert one.model.lanes.in_use == 0
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = serve(320)
        assert serve(640) - before < 0.64 * 2**20
    finally:
        tracemalloc.stop()
