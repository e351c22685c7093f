"""Where the time goes: the parts sum to the whole, and every step is counted."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from torch import Tensor

from sooner.config import Budget
from sooner.control.fixed import FixedController
from sooner.control.protocol import StepRecord
from sooner.core.step import Step
from sooner.core.tree import Draft, chain
from sooner.draft.protocol import Context
from sooner.engine.engine import Engine
from sooner.measure.profile import Split, split
from sooner.measure.report import profile
from sooner.model.protocol import Output
from sooner.params import SamplingParams
from sooner.testing import ScriptedDrafter, ToyModel

PASS, DRAFT = 0.02, 0.01  # seconds, far above what anything else takes here


class SlowModel(ToyModel):
    def forward(self, step: Step, *, rows: Tensor, taps: Sequence[int] = ()) -> Output:
        time.sleep(PASS)
        return super().forward(step, rows=rows, taps=taps)


def slow_draft(context: Context, budget: Budget) -> Draft:
    time.sleep(DRAFT)
    return chain([1])


def test_slow_passes_and_slow_drafts_are_found_where_they_are() -> None:
    engine = Engine(SlowModel(), ScriptedDrafter(slow_draft), FixedController(Budget.chain(3)))
    records: list[StepRecord] = []
    engine.watch = records.append
    request = engine.add([1, 2, 3], SamplingParams(max_tokens=6))
    began = time.perf_counter()
    while request.finish is None:
        engine.step()
    found = split(records, time.perf_counter() - began)
    asked = sum(record.drafted > 0 for record in records)
    assert found.steps == len(records) > 2
    assert asked >= 2
    assert found.pass_s >= found.steps * PASS
    assert found.draft_s >= asked * DRAFT
    beside = (found.judge_s, found.write_s, found.settle_s, found.control_s, found.schedule_s, found.stream_s)
    for part in beside:
        assert 0 < part < found.pass_s  # a busy machine may halt any of them for a while
    assert sum(found.parts().values()) == pytest.approx(found.wall_s)
    assert found.outside == pytest.approx(1 - found.pass_s / found.wall_s)
    assert found.levels == asked


def test_an_engine_nobody_watches_keeps_no_records() -> None:
    engine = Engine(ToyModel(), ScriptedDrafter(lambda *_: chain([1])), FixedController(Budget.chain(2)))
    assert engine.watch is None
    engine.add([1, 2], SamplingParams(max_tokens=3))
    assert engine.step()


def test_splits_add_up_part_by_part() -> None:
    one = Split(2, 1.0, 0.9, 0.6, 0.1, 0.05, 0.05, 0.02)
    both = one + one
    assert both.steps == 4
    assert both.outside == pytest.approx(one.outside) == pytest.approx(0.4)
    assert both.parts() == pytest.approx({name: 2 * seconds for name, seconds in one.parts().items()})
    assert Split().outside == 0.0


def test_what_a_level_of_drafting_costs_beside_a_pass_of_plain_decoding() -> None:
    plain = Split(10, 1.0, 1.0, pass_s=0.8)
    assert Split(4, 1.0, 1.0, pass_s=0.7, draft_s=0.2, levels=20).cost(plain) == pytest.approx(0.125)
    assert plain.cost(plain) is None
    assert Split(4, levels=3).cost(Split()) is None


def test_the_table_shows_shares_and_milliseconds_a_step() -> None:
    table = profile({"lookup": Split(2, 1.0, 0.9, 0.6, 0.1, 0.05, 0.05, 0.02)})
    cells = dict(zip(table.columns[0].cells, table.columns[1].cells, strict=True))
    assert cells["target's pass"] == "60.0% 300.000 ms"
    assert cells["outside the pass"] == "40.0% 200.000 ms"
