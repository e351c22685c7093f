"""Costs are known before the first request, and nothing stays behind of how they were found."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor

from sooner.control.passes import Load, PassCost
from sooner.core.step import Step
from sooner.engine.calibrate import SIZES, calibrate
from sooner.model.protocol import Output
from sooner.testing import ToyModel


class Watched(ToyModel):
    """Remembers the most requests that shared a pass."""

    widest = 0

    def forward(self, step: Step, *, rows: Tensor, taps: Sequence[int] = ()) -> Output:
        self.widest = max(self.widest, len(step.segments))
        return super().forward(step, rows=rows, taps=taps)


def test_wide_passes_are_known_before_the_first_request() -> None:
    model, passes = ToyModel(17), PassCost()
    calibrate(model, passes, seconds=60)
    assert passes.seen >= 2 * len(SIZES)
    assert passes.plain >= 4
    assert passes.seconds(Load(16, 1, 50)) > 0


def test_no_lane_stays_open_and_nothing_is_remembered() -> None:
    model = ToyModel(17)
    calibrate(model, PassCost())
    assert model.lanes.in_use == 0
    assert model.lanes.remembered("") == []
    assert model.lanes.store.numel() == 0
    model.lanes.check()


def test_what_does_not_fit_into_the_memory_limit_is_left_out() -> None:
    model, passes = Watched(17), PassCost()
    calibrate(model, passes, room=model.lanes.bytes_for(1, 128))
    assert passes.known
    assert model.widest == 1
    calibrate(model, passes)
    assert model.widest == 8


def test_a_slow_machine_is_not_kept_waiting_for_long() -> None:
    """The clock says that every look at it takes a second: one size is begun, its first pass alone counts."""
    passes, clock = PassCost(), itertools.count()
    calibrate(ToyModel(17), passes, seconds=1.0, clock=lambda: float(next(clock)))
    assert passes.seen == 1


def test_a_short_context_leaves_out_what_has_no_place_in_it() -> None:
    model, passes = ToyModel(17, context_limit=24), PassCost()
    calibrate(model, passes)
    assert passes.known
    assert passes.seen < len(SIZES)
    assert model.lanes.in_use == 0
