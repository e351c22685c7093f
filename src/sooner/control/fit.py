"""A linear cost whose coefficients are learnt from single measurements. Knows not what costs so much.

A Kalman filter keeps the coefficients: it needs no phase of its own to calibrate, and an outlier moves it by a
bounded amount; several surprises of one kind are a change, and are followed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import mul

import numpy as np
from numpy.typing import NDArray

from sooner.errors import ConfigError

TIMER = 2e-5  # seconds no measurement is better than
STALE = 0.3  # saved costs may be off by so much when they are read again
CLIP = 2.5  # standard deviations beyond which a surprise counts no more
_SURPRISE, _STREAK = 1.5, 3  # deviations of a surprise, and how many of them in a row are a change
_NOISE = 0.08  # what a single time is expected to be off by, as a share of it
_SCALE_DRIFT = 0.02  # of all costs together, a step
_SHAPE_DRIFT = 0.002  # of each coefficient, as a share of what was thought possible at first
_JUMP = 0.5  # by what share of it a cost may have changed when it is another one


class Surprises:
    """Surprises in a row: one is noise, some of one kind are a change."""

    def __init__(self) -> None:
        self._streak = 0

    def add(self, off: float, deviation: float) -> bool:
        """A measurement was so far off what was expected, where `deviation` is usual. Is that a change?"""
        way = 0 if abs(off) <= _SURPRISE * deviation else 1 if off > 0 else -1
        self._streak = self._streak + way if way * self._streak > 0 else way
        if abs(self._streak) < _STREAK:
            return False
        self._streak = 0
        return True


def not_negative(mean: NDArray[np.float64], cov: NDArray[np.float64], which: slice) -> None:
    """Raise the estimates `which` to 0 where they are below; what one gives up the others take over, so that what
    is known of their sums stays true. In place."""
    part, first = mean[which], which.start or 0
    for _ in range(len(part)):
        worst = int(part.argmin())
        if part[worst] >= 0:
            return
        along = cov[:, first + worst]
        mean -= along * (part[worst] / along[first + worst])
        part[worst] = 0.0
    np.maximum(part, 0.0, out=part)


class Fit:
    """Non-negative coefficients of a linear cost. mean, spread: first guess and how far it may be off.

    like: how alike the errors of the coefficients are at first, 0 to 1, by pairs.
    """

    def __init__(self, mean: Sequence[float], spread: Sequence[float], like: float = 0.0) -> None:
        self.mean = list(mean)
        self.seen = 0
        self._room = np.array(spread, dtype=np.float64) ** 2
        self._cov = np.outer(spread, spread) * (like + (1 - like) * np.eye(len(self.mean)))
        self._surprises = Surprises()

    def predict(self, x: Sequence[float]) -> float:
        return float(sum(map(mul, self.mean, x)))

    def observe(self, x: Sequence[float], seconds: float) -> None:
        """Learn from one measurement."""
        mean, features = np.array(self.mean), np.array(x)
        self._cov += np.outer(mean, _SCALE_DRIFT**2 * mean)
        self._cov.flat[:: len(mean) + 1] += _SHAPE_DRIFT**2 * self._room
        expected = float(mean @ features)
        noise = (_NOISE * max(expected, TIMER) + TIMER) ** 2
        along = self._cov @ features
        if self._surprises.add(seconds - expected, math.sqrt(float(along @ features) + noise)):
            self._cov += np.outer(mean, _JUMP**2 * mean) + np.diag((_JUMP * mean) ** 2)
            along = self._cov @ features
        total = float(along @ features) + noise
        bound = CLIP * math.sqrt(total)
        gain = along / total
        mean += gain * min(max(seconds - expected, -bound), bound)
        self._cov -= np.outer(gain, along)
        self._cov.flat[:: len(mean) + 1] = np.maximum(self._cov.diagonal(), 1e-18)
        not_negative(mean, self._cov, slice(0, len(mean)))
        self.mean = mean.tolist()
        self.seen += 1

    def saved(self) -> dict[str, object]:
        return {"mean": self.mean, "cov": self._cov.tolist(), "room": self._room.tolist(), "seen": self.seen}

    @staticmethod
    def restored(saved: object, size: int) -> Fit:
        """Read what `saved` wrote, trusting it a little less. Raises ConfigError if it is not that."""
        if not isinstance(saved, Mapping):
            raise ConfigError("a saved cost must be an object.")
        mean, cov, room = floats(saved.get("mean"), size), saved.get("cov"), floats(saved.get("room"), size)
        if not isinstance(cov, list) or len(cov) != size:
            raise ConfigError(f"a saved cost needs {size} rows of covariance.")
        fit = Fit(mean, [math.sqrt(max(r, 0.0)) for r in room])
        fit._cov = np.array([floats(row, size) for row in cov]) + np.outer(mean, STALE**2 * np.array(mean))
        fit.seen = 1
        return fit


def floats(value: object, size: int) -> list[float]:
    """Numbers that a file gave. Raises ConfigError if they are not so many finite ones."""
    if not isinstance(value, list) or len(value) != size:
        raise ConfigError(f"a saved cost needs lists of {size} numbers, got {value!r}.")
    if not all(isinstance(v, int | float) and math.isfinite(v) for v in value):
        raise ConfigError("a saved cost holds something that is not a finite number.")
    return [float(v) for v in value]
