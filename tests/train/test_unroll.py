"""Training-time test: every unrolled step computes what drafting computes, and its gradients are right."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sooner.heads.eagle import EagleConfig, EagleHead
from sooner.train import loss, unroll
from sooner.train.windows import Batch

H, DIM, HEADS, VOCAB, DRAFT, STREAMS = 16, 4, 4, 40, 12, 3


def tiny_head(kv_heads: int = 2, **switches: bool) -> EagleHead:
    config = EagleConfig(
        version=3, hidden=H, intermediate=24, heads=HEADS, kv_heads=kv_heads, head_dim=DIM, vocab=VOCAB,
        draft_vocab=DRAFT, target_hidden=H, streams=STREAMS, fc_norm=True, **switches,
    )  # fmt: skip
    torch.manual_seed(1)
    return EagleHead(config).double()


def tiny_batch(windows: int = 2, length: int = 9) -> Batch:
    torch.manual_seed(2)
    first = torch.zeros((windows, length), dtype=torch.bool)
    first[:, 0] = True
    return Batch(
        torch.randint(0, VOCAB, (windows, length)),
        torch.randn(windows, length, STREAMS, H, dtype=torch.float64),
        torch.stack([torch.randperm(DRAFT)[:5] for _ in range(windows * length)]).view(windows, length, 5),
        torch.rand(windows, length, 5, dtype=torch.float64).softmax(-1),
        torch.ones_like(first),
        first,
    )


def drafted(head: EagleHead, embedding: Tensor, batch: Batch, window: int, slot: int, steps: int) -> list[Tensor]:
    """What the LM head reads when drafting `steps` tokens after slots 0 to `slot` of a window, one pass a row."""
    keys: list[Tensor] = []
    values: list[Tensor] = []

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys.append(key[0].repeat_interleave(HEADS // len(key[0]), 0))
        values.append(value[0].repeat_interleave(HEADS // len(value[0]), 0))
        scores = torch.einsum("hd,nhd->hn", query[0], torch.stack(keys)) / math.sqrt(DIM)
        return torch.einsum("hn,nhd->hd", scores.softmax(-1), torch.stack(values)).reshape(1, -1)

    tokens = batch.tokens[window]
    read = []
    feature = torch.empty(0)
    for i in range(slot + steps):
        tables = head.rotary(torch.tensor([i]), torch.float64)
        feature = head.fuse(batch.features[window, i : i + 1]) if i <= slot else feature
        feature, seen = head(embedding[tokens[i + 1 : i + 2]], feature, tables, attend)
        if i >= slot:
            read.append(seen[0])
    return read


@pytest.fixture(autouse=True, params=[4, 128], ids=["blocks of 4", "one block"])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unroll, "_BLOCK", request.param)
    for grain in ("_GRAIN", "_ROWS"):
        monkeypatch.setattr(unroll, grain, 2)


@pytest.mark.parametrize("switches", [{}, {"norm_before_residual": True}, {"norm_output": True}], ids=str)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_every_step_of_every_slot_is_what_drafting_from_there_computes(
    switches: dict[str, bool], kv_heads: int
) -> None:
    head, batch = tiny_head(kv_heads, **switches), tiny_batch()
    embedding = torch.randn(VOCAB, H, dtype=torch.float64)
    with torch.no_grad():
        together = unroll.unrolled(head, embedding, batch, 3)
        for window in range(2):
            for slot in (0, 3, 5):
                alone = drafted(head, embedding, batch, window, slot, 3)
                for step in range(3):
                    row = together[step][window * 9 + slot]
                    assert torch.allclose(row, alone[step], atol=1e-6), (window, slot, step)


@pytest.mark.parametrize("share", [0.15, 0.4, 1.0])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_slots_nothing_asked_for_depends_on_can_be_left_out(kv_heads: int, share: float) -> None:
    """Loss and gradients are those of all slots, some of whose outputs are not looked at."""
    head, batch = tiny_head(kv_heads), tiny_batch(3, 40)
    batch.first[1, 17] = True
    embedding = torch.randn(VOCAB, H, dtype=torch.float64)
    assert head.head is not None
    found = []
    for few in (False, True):
        head.zero_grad()
        generator = torch.Generator().manual_seed(8)
        if few:
            wanted = loss.drawn(batch, 3, share, generator)
            read = unroll.unrolled(head, embedding, batch, 3, [these.rows for these in wanted])
            assert [len(x) for x in read] == [len(these.rows) for these in wanted]
            total, shown = loss.loss_of(read, head.head.weight, wanted, 0.8)
        else:
            seen = unroll.unrolled(head, embedding, batch, 3)
            total, shown = loss.loss(seen, head.head.weight, batch, 0.8, share, generator)
        total.backward()  # type: ignore[no-untyped-call]  # torch's own
        found.append(({name: p.grad.clone() for name, p in head.named_parameters() if p.grad is not None}, shown))
    (whole, shown), (some, also) = found
    assert also == pytest.approx(shown, rel=1e-9)
    assert whole.keys() == some.keys()
    for name, gradient in whole.items():
        assert torch.allclose(gradient, some[name], rtol=1e-5, atol=1e-7), name


def test_a_step_runs_the_slots_it_is_asked_for_and_those_later_steps_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted by what the head is handed: all slots once, for they are seen, then ever fewer."""
    head, batch, ran = tiny_head(), tiny_batch(2, 40), []
    forward = head.forward
    monkeypatch.setattr(head, "forward", lambda *given: ran.append(len(given[0])) or forward(*given))
    wanted = [torch.tensor([3, 44]), torch.tensor([9, 20, 41]), torch.tensor([9, 50])]
    unroll.unrolled(head, torch.randn(VOCAB, H, dtype=torch.float64), batch, 3, wanted)
    assert ran == [80, 8, 4]


def test_gradients_agree_with_finite_differences() -> None:
    """Attention in blocks has a backward pass of its own, and the loss makes its own gradient."""
    head, batch = tiny_head(), tiny_batch(1, 7)
    embedding = torch.randn(VOCAB, H, dtype=torch.float64)

    def value() -> Tensor:
        assert head.head is not None
        seen = unroll.unrolled(head, embedding, batch, 3)
        return loss.loss(seen, head.head.weight, batch, 0.8, 1.0, torch.Generator())[0]

    value().backward()
    generator = torch.Generator().manual_seed(5)
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None, name
        way = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            parameter += 1e-5 * way
            above = value()
            parameter -= 2e-5 * way
            below = value()
            parameter += 1e-5 * way
        slope, wanted = float((parameter.grad * way).sum()), float(above - below) / 2e-5
        assert slope == pytest.approx(wanted, rel=1e-3, abs=1e-6), name
