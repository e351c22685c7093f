"""The laws of native/law.c against those of torch, their oracle: survivors, masses, draws, broken rows."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

from sooner.core import law as laws
from sooner.core import noise
from sooner.core.edit import Edit, LawParams, edit
from sooner.core.sparse import Sparse, sparse
from sooner.core.tree import Draft
from sooner.engine.history import History
from sooner.native import law as native


def rows(dice: random.Random, count: int, vocab: int) -> torch.Tensor:
    """Peaked, flat and tied rows, some ids forbidden."""
    generator = torch.Generator().manual_seed(dice.randrange(1 << 30))
    table = torch.randn((count, vocab), generator=generator) * torch.tensor(
        [[dice.choice([0.01, 1.0, 6.0])] for _ in range(count)]
    )
    for r in range(count):
        if dice.random() < 0.5:
            table[r] = (table[r] * 2).round() / 2
        if dice.random() < 0.3:
            table[r, : vocab // 3] = -torch.inf
    return table


def params(dice: random.Random) -> LawParams:
    return LawParams(
        dice.choice([0.1, 0.8, 1.0, 5.0]),
        top_k=dice.choice([0, 0, 1, 3, 50, 10**6]),
        top_p=dice.choice([1.0, 0.951237, 0.50123, 0.010007, 0.9871]),
        min_p=dice.choice([0.0, 0.0, 0.05, 1.0, 1e-6]),
    )


def in_torch(logits: torch.Tensor, chosen: list[LawParams], monkeypatch: pytest.MonkeyPatch) -> laws.Law:
    with monkeypatch.context() as patch:
        patch.setattr(native, "serves", lambda logits: False)
        return laws.law(logits, chosen)


@pytest.mark.parametrize("vocab", [1, 7, 97, 1000, 5003])
def test_survivors_and_masses_are_those_of_torch(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(vocab)
    for _ in range(40):
        chosen = [params(dice) for _ in range(5)] + [LawParams()]
        logits = rows(dice, len(chosen), vocab)
        assert native.serves(logits)
        got, want = laws.law(logits, chosen), in_torch(logits, chosen, monkeypatch)
        assert got.best == want.best
        assert got.place == want.place
        for r, one in enumerate(chosen):
            ours, theirs = got.row(r), want.row(r)
            if ours is None or theirs is None:
                assert one.greedy
                continue
            torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-4)
            tiny = 1e-37  # below about this a float32 may as well be 0
            assert torch.equal(ours > tiny, theirs > tiny)


def test_a_row_is_the_same_alone_and_among_others() -> None:
    dice = random.Random(3)
    logits = rows(dice, 16, 4099)
    chosen = [LawParams(0.8, top_p=0.95)] * 16
    together = laws.law(logits, chosen)
    for r in range(16):
        alone = laws.law(logits[r : r + 1].contiguous(), chosen[:1])
        assert torch.equal(alone.row(0), together.row(r))  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_without_a_law_are_told(bad: float) -> None:
    logits = torch.zeros((3, 100))
    logits[1, 57] = bad
    logits[2] = -math.inf
    for one in (LawParams(), LawParams(0.7, top_p=0.9), LawParams(0.7)):
        assert laws.law(logits, [one] * 3).broken == [False, True, True]


def test_draws_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(8)
    for count in (1, 3, 64, 65, 4099):
        table = rows(dice, 20, count).softmax(-1)
        ids = torch.stack([torch.randperm(100_000)[:count] for _ in range(20)])
        keys = [dice.getrandbits(64) for _ in range(20)]
        for names in (None, ids):
            got = noise.race(table, keys, names)
            with monkeypatch.context() as patch:
                patch.setattr(native, "races", lambda mass, ids: False)
                assert torch.equal(got, noise.race(table, keys, names))


def test_an_id_without_mass_is_never_drawn() -> None:
    table = torch.zeros((1, 1000))
    table[0, 421] = 1e-30
    assert all(noise.race(table, [key]).item() == 421 for key in range(200))


def test_edits_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(4)
    for trial in range(40):
        logits = torch.randn((6, 50), generator=torch.Generator().manual_seed(trial))
        text = [dice.randrange(50) for _ in range(dice.randrange(1, 30))]
        past = History(text, dice.randrange(len(text))).past()
        paths = [tuple(dice.randrange(50) for _ in range(r)) for r in range(6)]
        chosen = LawParams(
            1.0, repetition_penalty=1.3, presence_penalty=-0.4, frequency_penalty=0.7,
            bias=((3, 0.5), (dice.randrange(4, 50), -7.25)), until=dice.randrange(20), forbidden=(9, 11),
            bad_words=((5,), (paths[1][0], 8)),
        )  # fmt: skip
        if trial % 4 == 0:
            chosen = replace(chosen, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
        got = edit(logits, [Edit(0, chosen, past, paths)])
        with monkeypatch.context() as patch:
            patch.setattr(native, "serves", lambda logits: False)
            want = edit(logits, [Edit(0, chosen, past, paths)])
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)
        assert not torch.equal(got, logits)


def test_sparse_laws_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(6)
    logits = rows(dice, 5, 300)
    law = laws.law(logits, [LawParams(0.9, top_p=0.951237)] * 5)
    draft = Draft((3, 7, 3, 11), (-1, -1, 0, 2))
    got = sparse(law, range(5), draft)
    with monkeypatch.context() as patch:
        patch.setattr(native, "races", lambda mass, ids: False)
        want = sparse(law, range(5), draft)
    assert got is not None
    assert want is not None
    for ours, theirs in zip(got, want, strict=True):
        assert ours.sum() == pytest.approx(theirs.sum(), abs=1e-12)
    for parent, token in zip((0, 0, 1, 3), draft.tokens, strict=True):
        assert got[parent][token] == pytest.approx(want[parent][token], abs=1e-12)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 7.0])
def test_unfiltered_laws_are_those_of_torch(temperature: float) -> None:
    dice = random.Random(8)
    logits = rows(dice, 5, 331)
    law = laws.law(logits, [LawParams(temperature)] * 5)
    want = (logits.double() / temperature).softmax(-1)
    draft = Draft((301, 320, 301, 330), (-1, -1, 0, 2))
    got = sparse(law, range(5), draft)
    assert got is not None
    for parent, token in zip((0, 0, 1, 3), draft.tokens, strict=True):
        assert got[parent][token] == pytest.approx(want[parent, token].item(), rel=1e-5)
        left = got[parent].without(token)
        assert left.sum() == pytest.approx(1 - want[parent, token].item(), rel=1e-4)
        assert all(left.draw(key) != token for key in range(200))
    for r in range(5):
        drawn = laws.draw(law, [r] * 300, range(300))
        assert drawn == noise.race(want[r].float().expand(300, -1), range(300)).tolist()


def test_a_row_whose_guesses_have_all_failed_has_nothing_left() -> None:
    """What rounding leaves of a sum is not mass: nothing may be drawn by it."""
    mass = torch.tensor([[0.1, 0.2, 0.3, 0.4]])
    row = Sparse(
        laws.Few(torch.arange(4)[None], mass, 0), float(mass.double().sum()), dict(enumerate(mass[0].tolist()))
    )
    left = row.without(3).without(2).without(1)
    assert left.sum() == pytest.approx(0.1)
    assert left.without(0).sum() == 0.0
    off = Sparse(laws.Few(torch.arange(4)[None], mass, 0), 1.0 + 1e-13, {0: 0.6, 1: 0.4})
    assert off.without(0).without(1).sum() == 0.0
