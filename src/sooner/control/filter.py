"""A Kalman filter that learns from one measurement at a time. Knows not what its estimates stand for.

It needs no phase of its own to calibrate; an outlier moves it by a bounded amount, and several surprises of one
kind are a change and are followed.

In numpy, and in C (native/control.c) where there is a compiler: learning comes between two passes of the target,
when nothing of it is in the processor's caches, and then a dozen calls of numpy take longer than their work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sooner.native.control import serves
from sooner.native.filter import Bounds, FilterInC

TIMER = 2e-5  # seconds no measurement is better than
# Deviations of a surprise, how many of them in a row are a change, and deviations beyond which one counts no more.
_BOUNDS = Bounds(surprise=1.5, streak=3, clip=2.5, far=1.0)


@dataclass(frozen=True, slots=True)
class Prior:
    """What estimates begin as: mean, the doubt about them, and what is added to their variances with each
    measurement. The first is the log of a pace, which multiplies the line; then come `line` estimates that are
    never negative, then others. jumps: when several surprises show that things have changed, the pace may have by
    so much, and each of the line by such a share of itself."""

    mean: Sequence[float]
    cov: NDArray[np.float64]
    drift: Sequence[float]
    line: int
    jumps: Sequence[float]


class Filter(Protocol):
    @property
    def mean(self) -> Sequence[float]:
        """The estimates: one sequence, changed in place."""

    @property
    def doubt(self) -> NDArray[np.float64]:
        """The covariance of the estimates."""

    def learn(self, at: Sequence[int], weights: Sequence[float], off: float, noise: float) -> None:
        """A measurement was `off` from the sum of weights * mean[at]; `noise` is the variance of such ones."""

    def add(self, mean: float, variance: float, drift: float) -> int:
        """One estimate more; where it is."""


def begin(prior: Prior) -> Filter:
    """The one in C if it can be had."""
    if not serves():
        return PlainFilter(prior)
    return FilterInC(prior.mean, prior.cov.ravel().tolist(), prior.drift, prior.line, prior.jumps, _BOUNDS)


class PlainFilter:
    """The filter in numpy."""

    def __init__(self, prior: Prior) -> None:
        self.mean = list(prior.mean)
        self._cov = prior.cov.copy()
        self._drift = np.array(prior.drift)
        self._line, self._jumps = slice(1, 1 + prior.line), np.array(prior.jumps)
        self._streak = 0

    @property
    def doubt(self) -> NDArray[np.float64]:
        return self._cov

    def learn(self, at: Sequence[int], weights: Sequence[float], off: float, noise: float) -> None:
        self._cov.flat[:: len(self.mean) + 1] += self._drift
        places, factors = np.array(at), np.array(weights)
        along = self._cov[:, places] @ factors
        total = float(along[places] @ factors) + noise
        if self._changed(off, math.sqrt(total)):
            room = self._jumps.copy()
            room[1:] *= self.mean[self._line]
            self._cov.flat[: len(room) * (len(self.mean) + 1) : len(self.mean) + 1] += room**2
            along = self._cov[:, places] @ factors
            total = float(along[places] @ factors) + noise
        most = _BOUNDS.clip * math.sqrt(total)
        gain = along / total
        self._cov -= np.outer(along, gain)
        mean = np.array(self.mean) + gain * min(max(off, -most), most)
        _not_negative(mean, self._cov, self._line)
        # Nothing says how much is pace and how much the line, so they would go apart for ever.
        if abs(mean[0]) > _BOUNDS.far:
            scale = np.ones(len(mean))
            scale[self._line] = math.exp(mean[0])
            mean *= scale
            mean[0] = 0.0
            self._cov *= np.outer(scale, scale)
        self.mean[:] = mean.tolist()

    def add(self, mean: float, variance: float, drift: float) -> int:
        size = len(self.mean)
        self._cov, self._drift = np.pad(self._cov, ((0, 1), (0, 1))), np.append(self._drift, drift)
        self._cov[size, size] = variance
        self.mean.append(mean)
        return size

    def _changed(self, off: float, deviation: float) -> bool:
        """One surprise is noise, some of one kind in a row are a change."""
        way = 0 if abs(off) <= _BOUNDS.surprise * deviation else 1 if off > 0 else -1
        self._streak = self._streak + way if way * self._streak > 0 else way
        if abs(self._streak) < _BOUNDS.streak:
            return False
        self._streak = 0
        return True


def _not_negative(mean: NDArray[np.float64], cov: NDArray[np.float64], which: slice) -> None:
    """Raise the estimates `which` to 0 where they are below; what one gives up the others take over, so that what
    is known of their sums stays true. In place."""
    part, first = mean[which], which.start
    for _ in range(len(part)):
        worst = int(part.argmin())
        if part[worst] >= 0:
            return
        along = cov[:, first + worst]
        mean -= along * (part[worst] / along[first + worst])
        part[worst] = 0.0
    np.maximum(part, 0.0, out=part)
