"""Log-probabilities of tokens as they are reported. Knows no verdicts and no modes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sooner.core.host import fetched, sent


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token: its natural-log probability, and the likeliest ids with theirs, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def report(logs: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """logs [n, V]: log-probabilities of the row that token i was chosen from."""
    values, ids = logs.topk(min(top, logs.shape[-1]), dim=-1)
    named = sent(tokens, torch.int64, logs.device)[:, None]
    own, values, ids = fetched(logs[: len(tokens)].gather(1, named)[:, 0], values, ids)
    best = zip(ids.tolist(), values.tolist(), strict=True)
    return [
        TokenLogprob(token, logprob, tuple(zip(some, theirs, strict=True)))
        for token, logprob, (some, theirs) in zip(tokens, own.tolist(), best, strict=False)
    ]
