"""EAGLE-3 with training-time test: the head meets its own outputs, step by step, as in drafting. Knows no data.

Step s of slot i reads the token i + 1 + s and what step s - 1 of slot i gave, and predicts token i + 2 + s. It
sees the first step's slots up to i and the later steps of slot i alone (arXiv 2503.01840).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sooner.heads.eagle import EagleHead
from sooner.train.loss import wide
from sooner.train.windows import Batch

_BLOCK = 128  # queries; shorter blocks leave out more of the future, longer ones make larger products


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
            scores = wide(scores) * scale
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
        d_query, d_key, d_value = [], torch.zeros_like(wide(key)), torch.zeros_like(wide(value))
        taken = ((wide(d_out) * wide(out)).sum(-1, keepdim=True) - d_logsum[..., None]).to(out.dtype)
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
            own = [wide(q * k).sum(-1) / math.sqrt(q.shape[-1]) for k in self._keys[1:]]
            weights = torch.softmax(torch.stack([wide(logsum), *own]), dim=0).to(out.dtype)[..., None]
            out = weights[0] * out
            for weight, v in zip(weights[1:], self._values[1:], strict=True):
                out = out + weight * v
        return out.transpose(1, 2).reshape(len(query), -1)

    def _laid_out(self, x: Tensor, share: int) -> Tensor:
        x = x.view(*self._shape, *x.shape[1:]).transpose(1, 2)
        return x.repeat_interleave(share, dim=1) if share > 1 else x


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
