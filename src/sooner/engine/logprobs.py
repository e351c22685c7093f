"""Log-probabilities of emitted tokens, from the raw logits of the rows that chose them. Knows no verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from sooner.core.law import log_probs


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One emitted token: its natural-log probability, and the likeliest ids with theirs, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def report(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """logits [n, V]: row i is the one that token i was chosen from."""
    table = log_probs(logits)
    own = [table[i, token].item() for i, token in enumerate(tokens)]
    values, ids = table.topk(top, dim=-1)
    return [
        TokenLogprob(token, own[i], tuple(zip(ids[i].tolist(), values[i].tolist(), strict=True)))
        for i, token in enumerate(tokens)
    ]
