"""Rows alone and in company: rounding is measured, a mistake in a pass is told from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sooner.core.step import Step
from sooner.measure.rows import Noise, after, probe
from sooner.model.protocol import Output
from sooner.testing import ShiftedModel, ToyModel

TEXTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [2, 7, 1, 8, 2, 8, 1, 8]]


class NoisyModel(ShiftedModel):
    """Adds `size` to the logit of id 0 wherever a pass holds a draft."""

    def __init__(self, model: ToyModel, size: float) -> None:
        super().__init__(model)
        self.size = size

    def forward(self, step: Step, *, rows: Tensor, taps: Sequence[int] = ()) -> Output:
        out = self._model.forward(step, rows=rows, taps=taps)
        drafted = any(len(segment.draft) for segment in step.segments)
        logits = out.logits.clone()
        logits[:, 0] += self.size * drafted
        return replace(out, logits=logits)


def test_a_model_whose_rows_do_not_depend_on_company_shows_no_noise() -> None:
    model = ToyModel()
    found = probe(model, model, TEXTS, 5, trees=True)
    assert (found.chain, found.tree, found.measured, found.broken) == (0.0, 0.0, 0.0, False)
    assert found.bound == found.least == torch.finfo(torch.float64).eps * found.scale
    assert model.lanes.in_use == 0


def test_rows_are_scored_as_plain_decoding_scores_them_one_a_pass() -> None:
    model = ToyModel()
    rows = after(model, TEXTS[0], 4)
    for i, row in enumerate(rows):
        assert torch.equal(row, model.next_logits(TEXTS[0][: len(TEXTS[0]) - 3 + i]))


def test_a_shifted_position_is_no_rounding_and_does_not_widen_the_bound() -> None:
    model = ToyModel()
    found = probe(model, ShiftedModel(model), TEXTS, 5, trees=False)
    assert found.chain > 0.1
    assert found.broken
    assert found.bound == found.least


def test_a_fault_of_trees_alone_shows_where_trees_are_looked_at() -> None:
    class Blind(ShiftedModel):
        def forward(self, step: Step, *, rows: Tensor, taps: Sequence[int] = ()) -> Output:
            tree = any(
                len(s.draft) and s.draft.parents != tuple(range(-1, len(s.draft) - 1)) for s in step.segments
            )
            return (super().forward if tree else self._model.forward)(step, rows=rows, taps=taps)

    model = ToyModel()
    assert not probe(model, Blind(model), TEXTS, 5, trees=False).broken
    found = probe(model, Blind(model), TEXTS, 5, trees=True)
    assert found.broken
    assert found.chain == 0


@pytest.mark.parametrize("size", [math.nan, math.inf])
def test_logits_that_are_not_numbers_are_broken_rows(size: float) -> None:
    model = ToyModel()
    assert probe(model, NoisyModel(model, size), TEXTS, 5, trees=False).broken


def test_the_bound_is_twice_what_was_measured_within_what_the_dtype_explains() -> None:
    noise = Noise("bfloat16", scale=10.0, least=0.1, most=0.4, chain=0.0, tree=None)
    assert noise.bound == 0.1
    assert replace(noise, chain=0.08).bound == 0.16
    assert replace(noise, tree=0.08).bound == 0.16
    assert replace(noise, chain=0.3).bound == 0.4
    assert replace(noise, chain=0.41).bound == 0.1  # broken: no measure of rounding


def test_small_noise_in_drafted_rows_is_measured_as_the_margin_it_moves() -> None:
    model = ToyModel()
    found = probe(model, NoisyModel(model, 1e-15), TEXTS, 5, trees=True)
    assert found.chain == pytest.approx(1e-15, rel=0.5)
    assert not found.broken
