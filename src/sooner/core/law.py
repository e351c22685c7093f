"""From logits to the law a token is drawn from. Knows neither the model nor how the law is used.

Everything that shapes the distribution is here and only here. The order is that of transformers:
temperature, top-k, top-p, min-p. A greedy law is one-hot and kept as an id, not as a V-wide row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Nucleus candidates tried before a full sort; covers top_p of all but very flat laws.
_NUCLEUS_FIRST = 256


@dataclass(frozen=True, slots=True)
class LawParams:
    """What shapes a law; ranges as in SamplingParams. temperature 0 = greedy, top_k 0 = all."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True, slots=True)
class Law:
    """The laws of n rows.

    best: int64 [n], the likeliest id (lowest id among equals); the whole law of a greedy row.
    broken: bool [n], rows whose logits hold NaN or +inf, or nothing but -inf.
    probs: [m, V] float, one row for each row that is sampled; `index[r]` is its row, -1 if r is greedy.
    """

    best: Tensor
    broken: Tensor
    probs: Tensor
    index: tuple[int, ...]

    def row(self, r: int) -> Tensor | None:
        """The law of row r, [V], or None when it is greedy."""
        return None if self.index[r] < 0 else self.probs[self.index[r]]


def law(logits: Tensor, params: Sequence[LawParams]) -> Law:
    """The laws of `logits` [n, V], each row shaped by its own parameters.

    Works in float32 (float64 stays float64), whatever the model's type.
    """
    top, best = logits.max(dim=-1)
    index: list[int] = []
    sampled: list[int] = []
    for r, p in enumerate(params):
        index.append(-1 if p.greedy else len(sampled))
        if not p.greedy:
            sampled.append(r)
    chosen = [params[r] for r in sampled]
    wide = logits[sampled]
    wide = wide if wide.dtype == torch.float64 else wide.float()
    return Law(best, ~torch.isfinite(top), shape(wide, chosen), tuple(index))


def shape(logits: Tensor, params: Sequence[LawParams]) -> Tensor:
    """Probabilities [n, V] of sampled rows (temperature > 0), each row with its own parameters."""
    if not len(params):
        return logits
    temperature = logits.new_tensor([p.temperature for p in params])[:, None]
    # Shifting by the maximum first keeps tiny temperatures finite.
    scores = (logits - logits.amax(-1, keepdim=True)) / temperature
    for count in sorted({p.top_k for p in params if p.top_k > 0}):
        rows = [r for r, p in enumerate(params) if p.top_k == count]
        scores[rows] = _keep_top_k(scores[rows], count)
    probs = scores.softmax(dim=-1)
    for mass in sorted({p.top_p for p in params if p.top_p < 1}):
        rows = [r for r, p in enumerate(params) if p.top_p == mass]
        probs[rows] = _keep_nucleus(probs[rows], mass)
    if any(p.min_p > 0 for p in params):
        floor = probs.new_tensor([p.min_p for p in params])[:, None] * probs.amax(-1, keepdim=True)
        probs = _normalise(torch.where(probs < floor, 0.0, probs))
    return probs


def log_probs(logits: Tensor) -> Tensor:
    """Raw log-probabilities [n, V], before temperature and filters, in float32."""
    return logits.float().log_softmax(dim=-1)


def _normalise(probs: Tensor) -> Tensor:
    return probs / probs.sum(-1, keepdim=True)


def _keep_top_k(scores: Tensor, count: int) -> Tensor:
    """Keep scores at least as high as the count-th highest (equals stay, as in transformers)."""
    if count >= scores.shape[-1]:
        return scores
    floor = scores.topk(count, dim=-1).values[:, -1:]
    return torch.where(scores < floor, -torch.inf, scores)


def _keep_nucleus(probs: Tensor, mass: float) -> Tensor:
    """Keep the likeliest ids, each kept while the mass before it is under `mass`; renormalised.

    Among equal probabilities at the edge the higher ids stay: the result of a stable ascending sort,
    which is what transformers does, found without sorting V values.
    """
    first = min(_NUCLEUS_FIRST, probs.shape[-1])
    high = probs.topk(first, dim=-1).values
    if first < probs.shape[-1] and bool((high.sum(-1) < mass).any()):
        high = probs.sort(dim=-1, descending=True).values
    before = high.cumsum(-1) - high
    kept = (before < mass).sum(-1, keepdim=True).clamp(min=1)
    edge = high.gather(-1, kept - 1)
    above, equal = probs > edge, probs == edge
    spare = equal.sum(-1, keepdim=True) - (kept - above.sum(-1, keepdim=True))
    keep = above | (equal & (equal.cumsum(-1) > spare))
    return _normalise(torch.where(keep, probs, 0.0))
