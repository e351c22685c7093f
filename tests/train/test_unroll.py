"""Training-time test: every unrolled step computes what drafting computes, and its gradients are right."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sooner.heads.eagle import EagleConfig, EagleHead
from sooner.train import unroll
from sooner.train.unroll import Batch

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


def test_gradients_agree_with_finite_differences() -> None:
    """Attention in blocks has a backward pass of its own, and the loss makes its own gradient."""
    head, batch = tiny_head(), tiny_batch(1, 7)
    embedding = torch.randn(VOCAB, H, dtype=torch.float64)

    def value() -> Tensor:
        return unroll.loss(head, embedding, batch, 3, 0.8, 1.0, torch.Generator())[0]

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


def test_labels_are_the_targets_laws_one_token_further_at_each_step() -> None:
    batch = tiny_batch(2, 9)
    for step in range(3):
        found = unroll.labels(batch, step)
        assert found.rows.tolist() == [w * 9 + i for w in range(2) for i in range(9 - 1 - step)]
        for row, ids in zip(found.rows.tolist(), found.ids, strict=True):
            assert ids.tolist() == batch.ids[row // 9, row % 9 + 1 + step].tolist()


def test_no_label_reaches_into_the_next_document() -> None:
    batch = tiny_batch(1, 9)
    batch.first[0, 4] = True
    assert unroll.labels(batch, 0).rows.tolist() == [0, 1, 2, 4, 5, 6, 7]
    assert unroll.labels(batch, 1).rows.tolist() == [0, 1, 4, 5, 6]
    assert unroll.labels(batch, 2).rows.tolist() == [0, 4, 5]


def test_a_head_that_always_names_the_next_token_scores_every_step() -> None:
    """Its LM head reads an embedding that says what comes next; one that names the wrong id scores none."""
    head, batch = tiny_head(), tiny_batch(1, 9)
    vocab = torch.arange(DRAFT)
    batch.tokens[0] = torch.arange(9)

    class Says(torch.nn.Module):
        def __init__(self, ahead: int) -> None:
            super().__init__()
            self.ahead, self.step = ahead, -1

        def forward(self, x: Tensor) -> Tensor:
            self.step += 1
            said = torch.arange(len(x)) + 2 + self.step + self.ahead
            return torch.nn.functional.one_hot(said % DRAFT, DRAFT).double()

    embedding = torch.randn(VOCAB, H, dtype=torch.float64)
    for ahead, chain in ((0, 3.0), (1, 0.0)):
        head.head = Says(ahead)  # type: ignore[assignment]
        found = unroll.score(head, embedding, vocab, batch, 3)
        assert (found.rows, found.chain) == (5, chain)


def test_scores_add_up_by_their_rows() -> None:
    total = unroll.Score(1, 1.0, 2.0, 3.0) + unroll.Score(3, 2.0, 3.0, 4.0)
    assert (total.rows, total.chain, total.tree, total.loss) == (4, 1.75, 2.75, 3.75)
