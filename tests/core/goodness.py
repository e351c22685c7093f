"""Goodness of fit: how well counts and numbers agree with the law they should have. Knows no law.

Every statistic is taken on fixed seeds, so a test is passed or failed for good, not now and then. A
p-value above LIMIT passes: a right program fails one test in ten thousand, once, when it is written.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LIMIT = 1e-4
_LEAST = 5.0  # expected count below which bins are joined


def chi_square(counts: Tensor, probs: Tensor) -> float:
    """p-value of `counts` (any shape) against `probs` of the same shape, which sum to 1.

    Raises AssertionError if anything without probability was counted. Bins with an expected count
    below 5 are joined into one.
    """
    seen, law = counts.flatten().double(), probs.flatten().double()
    assert seen.shape == law.shape
    assert abs(float(law.sum()) - 1) < 1e-6, "expected probabilities must sum to 1"
    impossible = ((law == 0) & (seen > 0)).nonzero().flatten().tolist()
    assert not impossible, f"outcomes {impossible} have no probability but were seen"
    expected = law * seen.sum()
    small = expected < _LEAST
    seen = torch.cat([seen[~small], seen[small].sum()[None]])
    expected = torch.cat([expected[~small], expected[small].sum()[None]])
    used = expected > 0
    statistic = float(((seen - expected)[used] ** 2 / expected[used]).sum())
    return chi_square_tail(statistic, int(used.sum()) - 1)


def chi_square_tail(statistic: float, freedom: int) -> float:
    """Chance that a chi-square variable exceeds `statistic`."""
    if freedom == 0:
        return 1.0
    half = torch.tensor(freedom / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, torch.tensor(statistic / 2, dtype=torch.float64)))


def uniform_fit(values: Tensor) -> float:
    """p-value (Kolmogorov-Smirnov, asymptotic) of `values` against the uniform law on [0, 1]."""
    found = values.flatten().double().sort().values
    n = len(found)
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    gap = float(torch.maximum((steps[1:] - found).max(), (found - steps[:-1]).max()))
    scaled = gap * (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n))
    tail = 2 * sum((-1) ** (j - 1) * math.exp(-2 * (j * scaled) ** 2) for j in range(1, 101))
    return float(min(max(tail, 0.0), 1.0))


def independent(left: Tensor, right: Tensor, bins: int = 8) -> float:
    """p-value of the pairs (left[i], right[i]), each uniform on [0, 1), being independent.

    Finds what a correlation would miss: the pairs are counted in bins x bins squares.
    """
    squares = (left.flatten() * bins).long() * bins + (right.flatten() * bins).long()
    counts = torch.bincount(squares, minlength=bins * bins)
    return chi_square(counts, torch.full((bins * bins,), 1 / bins**2))


def off_by(measured: float, expected: float, count: int) -> float:
    """How many standard errors a frequency out of `count` trials lies from its probability."""
    return abs(measured - expected) / math.sqrt(max(expected * (1 - expected), 1e-12) / count)
