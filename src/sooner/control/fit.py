"""A linear cost whose coefficients are learnt from single measurements. Knows not what costs so much.

A Kalman filter keeps the coefficients: it needs no phase of its own to calibrate, and an outlier moves it by a
bounded amount.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import mul

from sooner.errors import ConfigError

TIMER = 2e-5  # seconds no measurement is better than
STALE = 0.3  # saved costs may be off by so much when they are read again
_NOISE = 0.08  # what a single time is expected to be off by, as a share of it
_SCALE_DRIFT = 0.02  # of all costs together, a step
_SHAPE_DRIFT = 0.002  # of each coefficient, as a share of what was thought possible at first
_CLIP = 2.5  # standard deviations beyond which a surprise counts no more


class Fit:
    """Non-negative coefficients of a linear cost. mean, spread: first guess and how far it may be off.

    like: how alike the errors of the coefficients are at first, 0 to 1, by pairs.
    """

    def __init__(self, mean: Sequence[float], spread: Sequence[float], like: float = 0.0) -> None:
        self.mean = list(mean)
        self.seen = 0
        self._room = [s * s for s in spread]
        self._cov = [
            [a * b * (1.0 if i == j else like) for j, b in enumerate(spread)] for i, a in enumerate(spread)
        ]

    def predict(self, x: Sequence[float]) -> float:
        return float(sum(map(mul, self.mean, x)))

    def observe(self, x: Sequence[float], seconds: float) -> None:
        """Learn from one measurement."""
        self._drift()
        px = [sum(map(mul, row, x)) for row in self._cov]
        expected = self.predict(x)
        noise = (_NOISE * max(expected, TIMER) + TIMER) ** 2
        total = sum(map(mul, px, x)) + noise
        bound = _CLIP * math.sqrt(total)
        surprise = min(max(seconds - expected, -bound), bound)
        gain = [p / total for p in px]
        self.mean = [max(m + g * surprise, 0.0) for m, g in zip(self.mean, gain, strict=True)]
        for i, g in enumerate(gain):
            row = self._cov[i]
            self._cov[i] = [c - g * p for c, p in zip(row, px, strict=True)]
            self._cov[i][i] = max(self._cov[i][i], 1e-18)
        self.seen += 1

    def saved(self) -> dict[str, object]:
        return {"mean": self.mean, "cov": self._cov, "room": self._room, "seen": self.seen}

    @staticmethod
    def restored(saved: object, size: int) -> Fit:
        """Read what `saved` wrote, trusting it a little less. Raises ConfigError if it is not that."""
        if not isinstance(saved, Mapping):
            raise ConfigError("a saved cost must be an object.")
        mean, cov, room = floats(saved.get("mean"), size), saved.get("cov"), floats(saved.get("room"), size)
        if not isinstance(cov, list) or len(cov) != size:
            raise ConfigError(f"a saved cost needs {size} rows of covariance.")
        fit = Fit(mean, [math.sqrt(max(r, 0.0)) for r in room])
        rows = [floats(row, size) for row in cov]
        fit._cov = [[c + STALE**2 * mean[i] * mean[j] for j, c in enumerate(row)] for i, row in enumerate(rows)]
        fit.seen = 1
        return fit

    def _drift(self) -> None:
        scaled = [_SCALE_DRIFT * m for m in self.mean]
        for i, (row, s) in enumerate(zip(self._cov, scaled, strict=True)):
            self._cov[i] = [c + s * t for c, t in zip(row, scaled, strict=True)]
            self._cov[i][i] += _SHAPE_DRIFT**2 * self._room[i]


def floats(value: object, size: int) -> list[float]:
    if not isinstance(value, list) or len(value) != size:
        raise ConfigError(f"a saved cost needs lists of {size} numbers, got {value!r}.")
    if not all(isinstance(v, int | float) and math.isfinite(v) for v in value):
        raise ConfigError("a saved cost holds something that is not a finite number.")
    return [float(v) for v in value]
