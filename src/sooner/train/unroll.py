"""EAGLE-3 with training-time test: the head meets its own outputs, step by step, as in drafting. Knows no data.

Step s of slot i reads the token i + 1 + s and what step s - 1 of slot i gave, and predicts token i + 2 + s. It
sees the first step's slots up to i and the later steps of slot i alone (arXiv 2503.01840).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sooner.heads.eagle import EagleHead

_BLOCK = 128  # queries; shorter blocks leave out more of the future, longer ones make larger products


@dataclass(frozen=True, slots=True)
class Batch:
    """Windows side by side: tokens [B, T]; features [B, T, S, H]; ids, probs [B, T, TOP]; answer, first [B, T]."""

    tokens: Tensor
    features: Tensor
    ids: Tensor
    probs: Tensor
    answer: Tensor
    first: Tensor


@dataclass(frozen=True, slots=True)
class Labels:
    """What one step has to say: rows (of B * T) that have a label, and the target's law there."""

    rows: Tensor
    ids: Tensor
    probs: Tensor


def _wide(x: Tensor) -> Tensor:
    """At least float32."""
    return x if x.dtype == torch.float64 else x.float()


class _Causal(torch.autograd.Function):
    """Causal attention with the log of its normaliser, so that further keys can join afterwards.

    In blocks of queries, each against the keys up to it: on CPU half the time of torch's own kernel.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        scale, outs, logsums, weights = query.shape[-1] ** -0.5, [], [], []
        for begin, end in _blocks(query.shape[-2]):
            scores = query[..., begin:end, :] @ key[..., :end, :].transpose(-1, -2)
            future = torch.ones((end - begin,) * 2, dtype=torch.bool, device=query.device).triu(1)
            scores[..., begin:].masked_fill_(future, -torch.inf)
            scores = _wide(scores) * scale
            logsum = scores.logsumexp(-1, keepdim=True)
            weight = (scores - logsum).exp().to(value.dtype)
            outs.append(weight @ value[..., :end, :])
            logsums.append(logsum[..., 0])
            weights.append(weight)
        out = torch.cat(outs, -2)
        ctx.save_for_backward(query, key, value, out, *weights)
        return out, torch.cat(logsums, -1)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_logsum: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, out, *weights = ctx.saved_tensors
        scale, length = query.shape[-1] ** -0.5, query.shape[-2]
        d_query, d_key, d_value = [], torch.zeros_like(_wide(key)), torch.zeros_like(_wide(value))
        taken = ((_wide(d_out) * _wide(out)).sum(-1, keepdim=True) - d_logsum[..., None]).to(out.dtype)
        for (begin, end), weight in zip(_blocks(length), weights, strict=True):
            mine = d_out[..., begin:end, :].contiguous()
            d_value[..., :end, :] += weight.transpose(-1, -2) @ mine
            d_scores = mine @ value[..., :end, :].transpose(-1, -2)
            d_scores = d_scores.sub_(taken[..., begin:end, :]).mul_(weight).mul_(scale)
            d_query.append(d_scores @ key[..., :end, :])
            d_key[..., :end, :] += d_scores.transpose(-1, -2) @ query[..., begin:end, :]
        return torch.cat(d_query, -2), d_key.to(key.dtype), d_value.to(value.dtype)


def _blocks(length: int) -> list[tuple[int, int]]:
    return [(begin, min(begin + _BLOCK, length)) for begin in range(0, length, _BLOCK)]


def _causal(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """[B, H, T, D] each -> (attention, log of the normaliser [B, H, T])."""
    out, logsum = _Causal.apply(query, key, value)  # type: ignore[no-untyped-call]  # torch's own
    return out, logsum


class Memory:
    """Keys and values of the steps so far, [B, H, T, D]; the attention of each step."""

    def __init__(self, batch: int, length: int) -> None:
        self._shape = (batch, length)
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Rows [B * T, H, D]: a slot sees the first step's slots up to itself, and its own in later steps."""
        share = query.shape[1] // key.shape[1]
        q = self._laid_out(query, 1)
        self._keys.append(self._laid_out(key, share))
        self._values.append(self._laid_out(value, share))
        out, logsum = _causal(q, self._keys[0], self._values[0])
        if len(self._keys) > 1:
            own = [_wide(q * k).sum(-1) / math.sqrt(q.shape[-1]) for k in self._keys[1:]]
            weights = torch.softmax(torch.stack([_wide(logsum), *own]), dim=0).to(out.dtype)[..., None]
            out = weights[0] * out
            for weight, v in zip(weights[1:], self._values[1:], strict=True):
                out = out + weight * v
        return out.transpose(1, 2).reshape(len(query), -1)

    def _laid_out(self, x: Tensor, share: int) -> Tensor:
        x = x.view(*self._shape, *x.shape[1:]).transpose(1, 2)
        return x.repeat_interleave(share, dim=1) if share > 1 else x


class _ReadLoss(torch.autograd.Function):
    """Cross-entropy of the LM head against the target's candidates, each row by its weight; its gradient is
    made at once, for all steps in one product. The only V-wide rows are of the model's own type."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, matrix: Tensor, ids: Tensor, probs: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        law = torch.softmax(x @ matrix.T, dim=-1)
        own = _wide(law.gather(-1, ids))
        nats = -(_wide(probs) * own.clamp(min=1e-9).log()).sum(-1)
        law.scatter_add_(-1, ids, -probs.to(law.dtype))  # now the gradient by the logits
        weight = weight.to(nats.dtype)
        narrow = weight[:, None].to(law.dtype)
        ctx.save_for_backward((law @ matrix).mul_(narrow), law.T @ (x * narrow))
        mean = nats.mean()
        ctx.mark_non_differentiable(mean)
        return (nats * weight).sum(), mean

    @staticmethod
    def backward(ctx: Any, scale: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        d_x, d_matrix = ctx.saved_tensors
        return d_x.mul_(scale.to(d_x.dtype)), d_matrix.mul_(scale.to(d_x.dtype)), None, None, None


def labels(batch: Batch, step: int, rows: Tensor | None = None) -> Labels:
    """Of slot i at `step`: the target's law after token i + 1 + step. Slots at a document's end have none.

    rows: which of them to take, int64; all by default.
    """
    have = have_label(batch, step).flatten()
    rows = have.nonzero()[:, 0] if rows is None else rows[have[rows]]
    source = rows + 1 + step
    return Labels(rows, batch.ids.flatten(0, 1)[source], batch.probs.flatten(0, 1)[source])


def have_label(batch: Batch, step: int) -> Tensor:
    """bool [B, T]: whether token i + 1 + step is of the same window and document as token i."""
    ahead = 1 + step
    have = torch.ones_like(batch.first)
    have[:, -ahead:] = False
    for distance in range(1, ahead + 1):
        have[:, :-distance] &= ~batch.first[:, distance:]
    return have


def unrolled(head: EagleHead, embedding: Tensor, batch: Batch, steps: int) -> Sequence[Tensor]:
    """What the LM head reads at every step, [B * T, h] each."""
    count, length = batch.tokens.shape
    memory = Memory(count, length)
    feature = head.fuse(batch.features.flatten(0, 1))
    places = torch.arange(length, device=feature.device).repeat(count)
    read = []
    for step in range(steps):
        tokens = torch.roll(batch.tokens, -1 - step, dims=1)
        tables = head.rotary(places + step, feature.dtype)
        feature, seen = head(embedding[tokens.flatten()], feature, tables, memory.attend)
        read.append(seen)
    return read


def loss(
    head: EagleHead,
    embedding: Tensor,
    batch: Batch,
    steps: int,
    decay: float,
    share: float,
    generator: torch.Generator,
) -> tuple[Tensor, float]:
    """(what to descend, mean cross-entropy over all steps).

    share: part of the slots, drawn anew at each step, whose loss is taken: the LM head is most of the work.
    """
    assert head.head is not None  # EAGLE-3
    read, wanted, weights = [], [], []
    count = batch.tokens.numel()
    for step, seen in enumerate(unrolled(head, embedding, batch, steps)):
        drawn = torch.randperm(count, generator=generator)[: max(int(count * share), 1)]
        these = labels(batch, step, None if share >= 1 else drawn.to(seen.device))
        read.append(seen[these.rows])
        wanted.append(these)
        rows = len(these.rows)
        weights.append(torch.full((rows,), decay**step / max(rows, 1), device=seen.device))
    ids, probs = torch.cat([w.ids for w in wanted]), torch.cat([w.probs for w in wanted])
    total, mean = _ReadLoss.apply(  # type: ignore[no-untyped-call]  # torch's own
        torch.cat(read), head.head.weight, ids, probs, torch.cat(weights)
    )
    return total, float(mean)


@dataclass(frozen=True, slots=True)
class Score:
    """Held-out text. rows: slots scored. chain, tree: mean over them of the number of steps in a row at which the
    text's own token was the head's first choice, or among its first four. loss: of the first step."""

    rows: int
    chain: float
    tree: float
    loss: float

    def __add__(self, other: Score) -> Score:
        rows = max(self.rows + other.rows, 1)
        mean = [
            (a * self.rows + b * other.rows) / rows
            for a, b in ((self.chain, other.chain), (self.tree, other.tree), (self.loss, other.loss))
        ]
        return Score(self.rows + other.rows, *mean)


@torch.no_grad()
def score(head: EagleHead, embedding: Tensor, vocab: Tensor, batch: Batch, steps: int) -> Score:
    """Judge a head on a batch, where the target wrote the text. vocab: the target's id of each draft id."""
    assert head.head is not None
    rows = (have_label(batch, steps) & torch.roll(batch.answer, -2, dims=1)).flatten().nonzero()[:, 0]
    flat = batch.tokens.flatten()
    chain = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    tree, chains, trees, nats = chain.clone(), 0.0, 0.0, 0.0
    for step, seen in enumerate(unrolled(head, embedding, batch, steps)):
        logits = head.head(seen[rows])
        best = vocab[logits.topk(min(4, logits.shape[-1]), dim=-1).indices]
        hit = best == flat[rows + 2 + step][:, None]
        chain, tree = chain & hit[:, 0], tree & hit.any(-1)
        chains, trees = chains + float(chain.sum()), trees + float(tree.sum())
        if step == 0:
            own = torch.log_softmax(logits.float(), -1).gather(-1, batch.ids.flatten(0, 1)[rows + 1])
            nats = float(-(own * batch.probs.flatten(0, 1)[rows + 1].float()).sum())
    count = max(len(rows), 1)
    return Score(len(rows), chains / count, trees / count, nats / count)
