"""What a pass and a draft cost in seconds, learnt from those that ran. Knows no policy and no model.

A cost is linear in features of the pass, in rows piecewise. A Kalman filter keeps the coefficients: it needs no
phase of its own to calibrate, follows a machine that gets slower or faster (that scales all costs alike, so
the noise it expects is mostly of that kind), and an outlier moves it by a bounded amount.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import mul

from sooner.errors import ConfigError

KNOTS = (0, 4, 8, 16, 32, 64, 128, 512)  # rows at which the slope may change
_NOISE = 0.08  # what a single time is expected to be off by, as a share of it
_SCALE_DRIFT = 0.02  # of all costs together, a step
_SHAPE_DRIFT = 0.002  # of each coefficient, as a share of what was thought possible at first
_CLIP = 2.5  # standard deviations beyond which a surprise counts no more
_TIMER = 2e-5  # seconds no measurement is better than
_STALE = 0.3  # saved coefficients may be off by so much when they are read again


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
        noise = (_NOISE * max(expected, _TIMER) + _TIMER) ** 2
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
        mean, cov, room = _floats(saved.get("mean"), size), saved.get("cov"), _floats(saved.get("room"), size)
        if not isinstance(cov, list) or len(cov) != size:
            raise ConfigError(f"a saved cost needs {size} rows of covariance.")
        fit = Fit(mean, [math.sqrt(max(r, 0.0)) for r in room])
        rows = [_floats(row, size) for row in cov]
        fit._cov = [[c + _STALE**2 * mean[i] * mean[j] for j, c in enumerate(row)] for i, row in enumerate(rows)]
        fit.seen = 1
        return fit

    def _drift(self) -> None:
        scaled = [_SCALE_DRIFT * m for m in self.mean]
        for i, (row, s) in enumerate(zip(self._cov, scaled, strict=True)):
            self._cov[i] = [c + s * t for c, t in zip(row, scaled, strict=True)]
            self._cov[i][i] += _SHAPE_DRIFT**2 * self._room[i]


def _floats(value: object, size: int) -> list[float]:
    if not isinstance(value, list) or len(value) != size:
        raise ConfigError(f"a saved cost needs lists of {size} numbers, got {value!r}.")
    if not all(isinstance(v, int | float) and math.isfinite(v) for v in value):
        raise ConfigError("a saved cost holds something that is not a finite number.")
    return [float(v) for v in value]


@dataclass(frozen=True, slots=True)
class Load:
    """What a pass has to do: rows, requests they belong to, and tokens in all lanes."""

    rows: int
    requests: int
    context: int


_SEGMENTS = tuple((low, high - low) for low, high in pairwise((*KNOTS, 2**31)))


def _features(load: Load) -> list[float]:
    rows = load.rows
    steps = [min(max(rows - low, 0), width) for low, width in _SEGMENTS]
    return [1.0, *steps, load.requests, load.context / 1000]


_SIZE = len(KNOTS) + 3


class PassCost:
    """Seconds of one pass of the target, everything that depends on its rows included."""

    def __init__(self) -> None:
        self._fit: Fit | None = None
        self.plain = 0  # passes measured that held no guesses and no prompts

    @property
    def known(self) -> bool:
        """Whether any pass has been measured."""
        return self._fit is not None

    @property
    def seen(self) -> int:
        return 0 if self._fit is None else self._fit.seen

    def seconds(self, load: Load) -> float:
        """Of one pass; 1.0 plus a little for each row while nothing is known."""
        return 1.0 + load.rows / 64 if self._fit is None else max(self._fit.predict(_features(load)), _TIMER)

    def slopes(self) -> list[tuple[int, float]]:
        """(rows, seconds of each row from there on), rising in rows."""
        mean = [1 / 64] * len(KNOTS) if self._fit is None else self._fit.mean[1 : 1 + len(KNOTS)]
        return list(zip(KNOTS, mean, strict=True))

    def observe(self, load: Load, seconds: float) -> None:
        if not math.isfinite(seconds) or seconds <= 0:
            return
        if self._fit is None:
            self._fit = _first(load, seconds)
        self.plain += load.rows == load.requests
        self._fit.observe(_features(load), seconds)

    def saved(self) -> dict[str, object] | None:
        return None if self._fit is None else {"knots": list(KNOTS), "plain": self.plain, **self._fit.saved()}

    def restore(self, saved: object) -> None:
        """Raises ConfigError if it is not what `saved` wrote."""
        if not isinstance(saved, Mapping) or saved.get("knots") != list(KNOTS):
            raise ConfigError("the saved cost of passes has another form.")
        self._fit = Fit.restored(saved, _SIZE)
        plain = saved.get("plain")
        self.plain = plain if isinstance(plain, int) else 0


def _first(load: Load, seconds: float) -> Fit:
    """A first guess from one pass: a row costs a fortieth of the pass itself, a request a hundredth."""
    base = seconds / (1 + load.rows / 40 + load.requests / 100 + load.context / 40_000)
    mean = [base, *[base / 40] * len(KNOTS), base / 100, base / 40]
    return Fit(mean, [base, *[base / 30] * len(KNOTS), base / 50, base / 20], like=0.3)


@dataclass(frozen=True, slots=True)
class Asked:
    """What a drafter is asked for at once: drafts for so many requests, the deepest of such a depth."""

    requests: int
    depth: float


class DraftCost:
    """Seconds of one call of a drafter. Unknown is taken for free, so that a drafter is tried."""

    def __init__(self) -> None:
        self._fit = Fit([0.0] * 4, [1e-2, 1e-3, 1e-2, 1e-3])

    @property
    def seen(self) -> int:
        return self._fit.seen

    def seconds(self, asked: Asked) -> float:
        return self._fit.predict(self._features(asked)) if asked.requests else 0.0

    def observe(self, asked: Asked, seconds: float) -> None:
        if asked.requests and math.isfinite(seconds) and seconds >= 0:
            self._fit.observe(self._features(asked), seconds)

    def saved(self) -> dict[str, object]:
        return self._fit.saved()

    def restore(self, saved: object) -> None:
        """Raises ConfigError if it is not what `saved` wrote."""
        self._fit = Fit.restored(saved, 4)

    @staticmethod
    def _features(asked: Asked) -> list[float]:
        return [1.0, float(asked.requests), asked.depth, asked.requests * asked.depth]
