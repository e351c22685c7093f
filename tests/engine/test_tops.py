"""The likeliest ids of rows, in C and in torch: the same values, ties and NaN included."""

from __future__ import annotations

import random

import pytest
import torch

from sooner.core.step import Segment, pack
from sooner.core.tree import chain
from sooner.draft.protocol import Tops
from sooner.engine.tops import tops
from sooner.native import law as native


def both(logits: torch.Tensor, count: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Tops, Tops]:
    step = pack([Segment(0, 0, (1,), chain([2] * (len(logits) - 1)))])
    (ours,) = tops(logits, step, count)
    with monkeypatch.context() as patch:
        patch.setattr(native, "serves", lambda logits: False)
        (theirs,) = tops(logits, step, count)
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
