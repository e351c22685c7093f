"""Log-probabilities of tokens as they are reported. Knows no verdicts and no modes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token: its natural-log probability, and the likeliest ids with theirs, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def report(logs: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """logs [n, V]: log-probabilities of the row that token i was chosen from."""
    own = [logs[i, token].item() for i, token in enumerate(tokens)]
    values, ids = logs.topk(min(top, logs.shape[-1]), dim=-1)
    return [
        TokenLogprob(token, own[i], tuple(zip(ids[i].tolist(), values[i].tolist(), strict=True)))
        for i, token in enumerate(tokens)
    ]
