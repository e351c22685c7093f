"""EAGLE-3 with training-time test: the head meets its own outputs, step by step, as in drafting. Knows no data.

Step s of slot i reads the token i + 1 + s and what step s - 1 of slot i gave, and predicts token i + 2 + s. It
sees the first step's slots up to i and the later steps of slot i alone (arXiv 2503.01840).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sooner.heads.eagle import EagleHead
from sooner.train.loss import wide
from sooner.train.windows import Batch

_BLOCK = 128  # queries; shorter blocks leave out more of the future, longer ones make larger products
_GRAIN, _ROWS = 64, 32  # numbers of keys, and of rows of a window, are multiples of these


class _Causal(torch.autograd.Function):
    """Causal attention of queries at some places, in ascending order, with the log of its normaliser, so that
    further keys can join afterwards.

    In blocks of queries, each against the keys up to it: on CPU half the time of torch's own kernel.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        scale, outs, logsums, weights = query.shape[-1] ** -0.5, [], [], []
        blocks = _blocks(places, key.shape[-2])
        for begin, end, low, high in blocks:
            scores = query[..., begin:end, :] @ key[..., :high, :].transpose(-1, -2)
            columns = torch.arange(low, high, device=query.device)
            future = columns > places[:, None, begin:end, None].to(query.device)
            scores[..., low:].masked_fill_(future, -torch.inf)
            scores = wide(scores) * scale
            logsum = scores.logsumexp(-1, keepdim=True)
            weight = (scores - logsum).exp().to(value.dtype)
            outs.append(weight @ value[..., :high, :])
            logsums.append(logsum[..., 0])
            weights.append(weight)
        out = torch.cat(outs, -2)
        ctx.blocks = blocks
        ctx.save_for_backward(query, key, value, out, *weights)
        return out, torch.cat(logsums, -1)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_logsum: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, out, *weights = ctx.saved_tensors
        scale = query.shape[-1] ** -0.5
        d_query, d_key, d_value = [], torch.zeros_like(wide(key)), torch.zeros_like(wide(value))
        taken = ((wide(d_out) * wide(out)).sum(-1, keepdim=True) - d_logsum[..., None]).to(out.dtype)
        for (begin, end, _, high), weight in zip(ctx.blocks, weights, strict=True):
            mine = d_out[..., begin:end, :].contiguous()
            d_value[..., :high, :] += weight.transpose(-1, -2) @ mine
            d_scores = mine @ value[..., :high, :].transpose(-1, -2)
            d_scores = d_scores.sub_(taken[..., begin:end, :]).mul_(weight).mul_(scale)
            d_query.append(d_scores @ key[..., :high, :])
            d_key[..., :high, :] += d_scores.transpose(-1, -2) @ query[..., begin:end, :]
        return torch.cat(d_query, -2), d_key.to(key.dtype), d_value.to(value.dtype), None


def _blocks(places: Tensor, length: int) -> list[tuple[int, int, int, int]]:
    """Of queries at `places` [B, Q]: first and end of each block, keys that all of it see, keys that some see.

    The latter is rounded up: kernels are compiled for each number.
    """
    starts = range(0, places.shape[1], _BLOCK)
    low = places[:, ::_BLOCK].amin(0).tolist()
    high = [int(places[:, min(begin + _BLOCK, places.shape[1]) - 1].max()) + 1 for begin in starts]
    return [
        (begin, min(begin + _BLOCK, places.shape[1]), least, min(-(-most // _GRAIN) * _GRAIN, length))
        for begin, least, most in zip(starts, low, high, strict=True)
    ]


def _causal(query: Tensor, key: Tensor, value: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """[B, H, Q or T, D] each, places [B, Q] -> (attention, log of the normaliser [B, H, Q])."""
    out, logsum = _Causal.apply(query, key, value, places)  # type: ignore[no-untyped-call]  # torch's own
    return out, logsum


class Memory:
    """Keys and values of the steps so far, [B, H, slots, D]; the attention of each step.

    places: of the slots of this step, int64 [B, Q], ascending, on the CPU; a part of those of the step before.
    """

    def __init__(self, places: Tensor) -> None:
        self._places = places
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def narrow(self, places: Tensor, rows: Tensor) -> None:
        """The next step has these slots alone. rows: which rows of the step before they are, int64 [B * Q]."""
        self._places = places
        self._keys[1:] = [self._some(x, rows) for x in self._keys[1:]]
        self._values[1:] = [self._some(x, rows) for x in self._values[1:]]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, kept: Tensor | None = None) -> Tensor:
        """Rows [B * Q, H, D]: a slot sees the first step's slots up to itself, and its own in later steps.

        kept: in the first step, which of all the slots are those of `places`.
        """
        share = query.shape[1] // key.shape[1]
        q = self._laid_out(query if kept is None else query.index_select(0, kept), 1)
        self._keys.append(self._laid_out(key, share))
        self._values.append(self._laid_out(value, share))
        out, logsum = _causal(q, self._keys[0], self._values[0], self._places)
        if len(self._keys) > 1:
            own = [wide(q * k).sum(-1) / math.sqrt(q.shape[-1]) for k in self._keys[1:]]
            weights = torch.softmax(torch.stack([wide(logsum), *own]), dim=0).to(out.dtype)[..., None]
            out = weights[0] * out
            for weight, v in zip(weights[1:], self._values[1:], strict=True):
                out = out + weight * v
        return out.transpose(1, 2).reshape(self._places.numel(), -1)

    def _laid_out(self, x: Tensor, share: int) -> Tensor:
        x = x.view(len(self._places), -1, *x.shape[1:]).transpose(1, 2)
        return x.repeat_interleave(share, dim=1) if share > 1 else x

    def _some(self, x: Tensor, rows: Tensor) -> Tensor:
        """[B, H, Q', D] -> [B, H, Q, D]: those rows of [B * Q', H, D]."""
        flat = x.transpose(1, 2).flatten(0, 1).index_select(0, rows)
        return flat.view(*self._places.shape, *flat.shape[1:]).transpose(1, 2)


def unrolled(
    head: EagleHead, embedding: Tensor, batch: Batch, steps: int, wanted: Sequence[Tensor] | None = None
) -> Sequence[Tensor]:
    """What the LM head reads at every step, [rows, h] each.

    wanted: for each step the rows (of B * T) that are asked for; all by default. A slot on which nothing that is
    asked for depends is left out: after the first step none is seen by another.
    """
    count, length = batch.tokens.shape
    device, slots = batch.features.device, torch.arange(count * length)
    plan = _plan(wanted, count, length, steps)
    memory = Memory(plan[0])
    feature = head.fuse(batch.features.flatten(0, 1))
    run, read = slots, []  # run: the slots whose feature there is
    for step, places in enumerate(plan):
        asked = (places + torch.arange(count)[:, None] * length).flatten()
        kept = None if len(asked) == len(run) else _where(asked, run, len(slots)).to(device)
        attend = memory.attend
        if step == 0:  # all are seen, some go on
            attend = partial(memory.attend, kept=kept)
        elif kept is not None:
            memory.narrow(places, kept)
            feature, run, kept = feature.index_select(0, kept), asked, None
        tokens = torch.roll(batch.tokens, -1 - step, dims=1).flatten()[run.to(device)]
        tables = head.rotary(run.to(device) % length + step, feature.dtype)
        feature, seen = head(embedding[tokens], feature, tables, attend, kept)
        run = asked
        read.append(
            seen
            if wanted is None
            else seen.index_select(0, _where(wanted[step].cpu(), run, len(slots)).to(device))
        )
    return read


def _plan(wanted: Sequence[Tensor] | None, count: int, length: int, steps: int) -> list[Tensor]:
    """For each step the places of the slots to run, [B, Q], ascending: those asked for now or later, and in every
    window as many, a round number: kernels are compiled for each."""
    if wanted is None:
        return [torch.arange(length).repeat(count, 1)] * steps
    plan: list[Tensor] = []
    needed = torch.zeros((count, length), dtype=torch.bool)
    for rows in reversed(wanted):
        needed.view(-1)[rows.cpu()] = True
        most = int(needed.sum(1).max())
        size = min(-(-most // _ROWS) * _ROWS, length)
        places = needed.byte().argsort(dim=1, descending=True, stable=True)[:, :size].sort(dim=1).values
        needed.scatter_(1, places, True)
        plan.insert(0, places)
    return plan


def _where(rows: Tensor, among: Tensor, count: int) -> Tensor:
    """The places of `rows` in `among`, which holds them; all below `count`."""
    places = torch.zeros(count, dtype=torch.int64)
    places[among] = torch.arange(len(among))
    return places[rows]
