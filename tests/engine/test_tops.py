"""The likeliest ids of rows, in C and in torch: the same values, ties and NaN included."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from sooner.config import Budget
from sooner.control.fixed import FixedController
from sooner.core.edit import LawParams
from sooner.core.law import law
from sooner.core.step import Segment, Step, pack
from sooner.core.tree import chain
from sooner.draft.combine import CombineDrafter
from sooner.draft.none import NoDrafter
from sooner.draft.protocol import Tops
from sooner.draft.recycle import RecycleSource
from sooner.engine.engine import Engine
from sooner.engine.tops import firsts, tops
from sooner.model.protocol import Output
from sooner.native import law as native
from sooner.params import SamplingParams
from sooner.testing import ToyModel


def both(logits: torch.Tensor, count: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Tops, Tops]:
    step = pack([Segment(0, 0, (1,), chain([2] * (len(logits) - 1)))])
    (ours,) = tops(logits, step, count)()
    with monkeypatch.context() as patch:
        patch.setattr(native, "serves", lambda logits: False)
        (theirs,) = tops(logits, step, count)()
    assert ours is not None
    assert theirs is not None
    return ours, theirs


@pytest.mark.parametrize("vocab", [1, 5, 40, 3000, 20_011])
@pytest.mark.parametrize("count", [1, 8, 64])
def test_they_are_those_of_torch(vocab: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(vocab + count)
    for turn in range(6):
        logits = torch.randn((5, vocab), generator=torch.Generator().manual_seed(dice.randrange(1 << 30)))
        if turn % 2:
            logits = (logits * 2).round() / 2
        if turn % 3 == 2:
            logits[1, vocab // 3 :] = -torch.inf
            logits[2] = -torch.inf
        ours, theirs = both(logits, count, monkeypatch)
        assert ours.logits == theirs.logits
        for r, (ids, values) in enumerate(zip(ours.ids, ours.logits, strict=True)):
            assert len(set(ids)) == len(ids) == min(count, vocab)
            assert tuple(logits[r, list(ids)].tolist()) == values


def test_a_row_with_nan_has_no_likeliest_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn((3, 500), generator=torch.Generator().manual_seed(1))
    logits[1, 400] = torch.nan
    ours, theirs = both(logits, 8, monkeypatch)
    assert ours.logits[1][0] != ours.logits[1][0]
    assert theirs.logits[1][0] != theirs.logits[1][0]
    assert (ours.logits[0], ours.logits[2]) == (theirs.logits[0], theirs.logits[2])


class Single(ToyModel):
    """Its logits are of the type that the C kernels serve."""

    def forward(self, step: Step, *, rows: Tensor, taps: Sequence[int] = ()) -> Output:
        out = super().forward(step, rows=rows, taps=taps)
        return Output(out.logits.float(), out.features)


@pytest.mark.parametrize("shaping", [{"repetition_penalty": 3.0}, {"logit_bias": {3: 4.0}}, {"min_tokens": 20}])
def test_likeliest_ids_from_before_an_edit_decide_nothing(shaping: dict[str, Any]) -> None:
    """They are found before penalties, bias and bans act; a request beside it that has none does not matter."""
    texts: list[list[list[int]]] = []
    for drafter in (NoDrafter(), CombineDrafter("recycle", [RecycleSource()])):
        one = Engine(Single(17), drafter, FixedController(Budget(4, 2, 8)), eos_ids=(3, 5))
        wanted = (SamplingParams(max_tokens=24, **shaping), SamplingParams(max_tokens=24))
        requests = [one.add([1, 2, 3, 1, 2], params) for params in wanted]
        while one.busy:
            one.step()
        texts.append([request.tokens for request in requests])
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][1]


@pytest.mark.parametrize("count", [1, 8])
def test_greedy_laws_are_the_same_from_ids_that_are_known(count: int) -> None:
    logits = (torch.randn((7, 3000), generator=torch.Generator().manual_seed(count)) * 2).round()  # many equals
    logits[1, 7], logits[2, 2000], logits[4, 100:] = torch.nan, torch.inf, -torch.inf
    logits[3] = -torch.inf
    step = pack([Segment(0, 0, (1,), chain([2] * 3)), Segment(1, 0, (1,), chain([2] * 2))])
    known = firsts(tops(logits, step, count), logits)
    assert known is not None
    params = [LawParams(temperature=0.0)] * 7
    ours, theirs = law(logits, params, firsts=known), law(logits, params)
    assert (list(ours.best), list(ours.broken)) == (list(theirs.best), list(theirs.broken))
    assert (ours.place, ours.vocab) == (theirs.place, theirs.vocab)
    assert [odd for odd in ours.broken] == [False, True, True, True, False, False, False]


def test_nothing_is_known_of_rows_that_are_only_scored() -> None:
    step = pack([Segment(0, 0, (1, 2, 3), chain([2]), scored=True)])
    logits = torch.randn((4, 50), generator=torch.Generator().manual_seed(0))
    assert firsts(tops(logits, step, 8), logits) is None
