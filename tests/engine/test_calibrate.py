"""Costs are known before the first request, and nothing stays behind of how they were found."""

from __future__ import annotations

import itertools

from sooner.control.cost import Load, PassCost
from sooner.engine.calibrate import SIZES, calibrate
from sooner.testing import ToyModel


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
    model, passes = ToyModel(17), PassCost()
    room = model.lanes.bytes_for(1, 128)
    widest = 0
    forward = model.forward

    def watched(step, **options):  # type: ignore[no-untyped-def]
        nonlocal widest
        widest = max(widest, len(step.segments))
        return forward(step, **options)

    model.forward = watched  # type: ignore[method-assign]
    calibrate(model, passes, room=room)
    assert passes.known
    assert widest == 1


def test_a_slow_machine_is_not_kept_waiting_for_long() -> None:
    """The clock says that every look at it takes a second: one size is begun, its first pass alone counts."""
    passes, clock = PassCost(), itertools.count()
    calibrate(ToyModel(17), passes, seconds=1.0, clock=lambda: float(next(clock)))
    assert passes.seen == 1


def test_a_short_context_leaves_out_what_has_no_place_in_it() -> None:
    model, passes = ToyModel(17), PassCost()
    model.context_limit = 24  # type: ignore[misc]
    calibrate(model, passes)
    assert passes.known
    assert model.lanes.in_use == 0
