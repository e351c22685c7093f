"""What a pass and a draft cost in seconds, learnt from those that ran. Knows no policy and no model.

A cost is linear in features of the pass, in rows piecewise. A Kalman filter keeps the coefficients: it needs no
phase of its own to calibrate, and an outlier moves it by a bounded amount. A machine that gets slower or faster
scales all costs alike, so that is followed apart from them, and quickly.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from operator import mul
from typing import NamedTuple

from sooner.errors import ConfigError

KNOTS = (0, 4, 8, 16, 32, 64, 128, 512)  # rows at which the slope may change
_COUNTED = 64  # rows up to which every number of them is looked at by itself
_PRIOR, _LONG = 6, 60  # passes after which half a departure counts, and that are remembered
_WELL_KNOWN, _THIN = 200, 8  # passes after which the line learns from every eighth one
_ALIKE = 64  # tokens of context a request by which passes may differ and count as one
_TILE = 8  # rows over which costs are expected to be level, if anywhere
_PACE = 0.04  # how far the machine's own speed may change from one pass to the next, as a share
_MOST = 0.5  # the largest change and departure that counts
_NOISE = 0.08  # what a single time is expected to be off by, as a share of it
_SCALE_DRIFT = 0.02  # of all costs together, a step
_SHAPE_DRIFT = 0.002  # of each coefficient, as a share of what was thought possible at first
_CLIP = 2.5  # standard deviations beyond which a surprise counts no more
_TIMER = 2e-5  # seconds no measurement is better than
_STALE = 0.3  # saved costs may be off by so much when they are read again


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


class Load(NamedTuple):
    """What a pass has to do: rows, requests they belong to, and tokens in all lanes."""

    rows: int
    requests: int
    context: int


_SEGMENTS = tuple((low, high - low) for low, high in pairwise((*KNOTS, 2**31)))


def _features(load: Load) -> list[float]:
    rows = load.rows
    steps = [float(min(max(rows - low, 0), width)) for low, width in _SEGMENTS]
    return [1.0, *steps, float(load.requests), _read(load)]


def _read(load: Load) -> float:
    """Thousands of keys that attention reads: each row those of its own lane."""
    return load.rows * load.context / (1000 * max(load.requests, 1))


def _alike(load: Load) -> tuple[int, int, int]:
    return load.rows, load.requests, load.context // (_ALIKE * max(load.requests, 1))


_SIZE = len(KNOTS) + 3


class PassCost:
    """Seconds of one pass of the target, everything that depends on its rows included.

    scale * broken line in rows, requests and keys read * (1 + what passes of just so many rows depart from it).
    The scale follows a machine that gets slower or faster within some passes; the line says what rows cost that
    were hardly seen; the departures are there because kernels work in tiles, so that costs rise in steps.
    """

    def __init__(self) -> None:
        self._fit: Fit | None = None
        self._scale, self._scale_doubt = 1.0, 0.0
        self._apart: dict[int, tuple[float, int]] = {}  # by rows: mean departure, passes it was seen in
        self._found: dict[tuple[int, int, int], float] = {}  # unscaled, until the line changes
        self._further: dict[tuple[int, int, int], list[float]] = {}
        self.seen = 0
        self.plain = 0  # passes measured that held no guesses and no prompts

    @property
    def known(self) -> bool:
        """Whether any pass has been measured."""
        return self._fit is not None

    def seconds(self, load: Load) -> float:
        """Of one pass; 1.0 plus a little for each row while nothing is known."""
        if self._fit is None:
            return 1.0 + load.rows / 64
        key = _alike(load)
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._fit.predict(_features(load)) * self._step(load.rows)
        return max(self._scale * found, _TIMER)

    def further(self, load: Load, count: int) -> Sequence[float]:
        """Seconds of each row more than the pass has, `count` of them at least, on a machine at its usual pace:
        times `pace` it is what they take now. Never negative: where more rows were seen to take less time, it is
        the fewer that were unlucky."""
        key = _alike(load)
        found = self._further.get(key, [])
        if len(found) < count:
            found = self._further[key] = self._rise(load, max(count, 2 * len(found), 16))
        return found

    @property
    def pace(self) -> float:
        """What times of now are to usual ones."""
        return self._scale

    def _rise(self, load: Load, count: int) -> list[float]:
        if self._fit is None:
            return [1 / 64] * count
        mean = self._fit.mean
        keys = mean[-1] * load.context / (1000 * max(load.requests, 1))
        line, totals, step = self._fit.predict(_features(load)), [], self._step(load.rows)
        segment = bisect_right(KNOTS, load.rows) - 1
        for rows in range(load.rows, load.rows + count + 1):
            if rows in self._apart or rows % _TILE == 1:
                step = self._step(rows)
            totals.append(line * step)
            if segment + 1 < len(KNOTS) and rows >= KNOTS[segment + 1]:
                segment += 1
            line += mean[1 + segment] + keys
        for i in range(count - 1, -1, -1):
            totals[i] = min(totals[i], totals[i + 1])
        return [after - before for before, after in pairwise(totals)]

    def observe(self, load: Load, seconds: float) -> None:
        """Learn from one measurement."""
        if not math.isfinite(seconds) or seconds <= 0:
            return
        if self._fit is None:
            self._fit = _first(load, seconds)
        self.plain += load.rows == load.requests
        self.seen += 1
        step = self._step(load.rows)
        line = max(self.seconds(load) / (self._scale * step), _TIMER)
        # One pass that is off is noise; several in a row, whatever their rows, are the machine.
        self._scale_doubt += _PACE**2
        follow = self._scale_doubt / (self._scale_doubt + 2 * _NOISE**2)
        change = seconds / (self._scale * line * step) - 1
        self._scale *= 1 + follow * min(max(change, -_MOST), _MOST)
        self._scale_doubt *= 1 - follow
        if self.seen < _WELL_KNOWN or self.seen % _THIN == 0:
            self._fit.observe(_features(load), seconds / (self._scale * step))
            self._found.clear()
            self._further.clear()
        if load.rows <= _COUNTED:
            mean, count = self._apart.get(load.rows, (0.0, 0))
            apart = min(max(seconds / (self._scale * line) - 1, -_MOST), _MOST)
            count = min(count + 1, _LONG)
            self._apart[load.rows] = (mean + (apart - mean) / count, count)

    def _step(self, rows: int) -> float:
        """How far passes of so many rows depart from the line; what was not seen is as its neighbour below."""
        least = (rows - 1) // _TILE * _TILE
        while rows not in self._apart and rows > least:
            rows -= 1
        mean, count = self._apart.get(rows, (0.0, 0)) if rows > least else (0.0, 0)
        return 1 + mean * count / (count + _PRIOR)

    def saved(self) -> dict[str, object] | None:
        if self._fit is None:
            return None
        apart = [[float(rows), mean, float(count)] for rows, (mean, count) in self._apart.items()]
        return {
            "knots": list(KNOTS),
            "plain": self.plain,
            "scale": [self._scale],
            "apart": apart,
            **self._fit.saved(),
        }

    def restore(self, saved: object) -> None:
        """Take over what `saved` wrote, trusting it a little less. Raises ConfigError if it is not that."""
        if not isinstance(saved, Mapping) or saved.get("knots") != list(KNOTS) or "scale" not in saved:
            raise ConfigError("the saved cost of passes has another form.")
        fit = Fit.restored(saved, _SIZE)
        [scale] = _floats(saved["scale"], 1)
        apart = saved.get("apart")
        known = [_floats(one, 3) for one in apart] if isinstance(apart, list) else []
        if scale <= 0 or any(abs(mean) > _MOST or count < 0 for _, mean, count in known):
            raise ConfigError("the saved cost of passes holds what no measurement gives.")
        self._apart = {int(rows): (mean, min(int(count), _LONG)) for rows, mean, count in known}
        self._fit, self._scale, self._scale_doubt = fit, scale, _STALE**2
        self._found.clear()
        self._further.clear()
        plain = saved.get("plain")
        self.seen, self.plain = 1, plain if isinstance(plain, int) else 0


def _first(load: Load, seconds: float) -> Fit:
    """A first guess from one pass: a row costs a fortieth of the pass itself, a request a hundredth."""
    base = seconds / (1 + load.rows / 40 + load.requests / 100 + _read(load) / 40)
    mean = [base, *[base / 40] * len(KNOTS), base / 100, base / 40]
    return Fit(mean, [base, *[base / 30] * len(KNOTS), base / 50, base / 20], like=0.3)


class Asked(NamedTuple):
    """What a drafter is asked for at once: drafts for so many requests, the deepest of such a depth."""

    requests: int
    depth: float


_PARTS = (0.1, 0.1, 0.4, 0.4)  # of a first draft's time: for the call, each request, each level, each of both


class DraftCost:
    """Seconds of one call of a drafter. Unknown is taken for free, so that a drafter is tried."""

    def __init__(self) -> None:
        self._fit: Fit | None = None

    @property
    def seen(self) -> int:
        return 0 if self._fit is None else self._fit.seen

    def seconds(self, asked: Asked) -> float:
        return self._fit.predict(self._features(asked)) if asked.requests and self._fit is not None else 0.0

    def observe(self, asked: Asked, seconds: float) -> None:
        if not asked.requests or not math.isfinite(seconds) or seconds < 0:
            return
        features = self._features(asked)
        if self._fit is None:  # a first guess: most of it is for the levels
            whole = [max(seconds, _TIMER) / max(x, 1.0) for x in features]
            self._fit = Fit([part * one for part, one in zip(_PARTS, whole, strict=True)], whole)
        self._fit.observe(features, seconds)

    def saved(self) -> dict[str, object] | None:
        return None if self._fit is None else self._fit.saved()

    def restore(self, saved: object) -> None:
        """Raises ConfigError if it is not what `saved` wrote."""
        self._fit = Fit.restored(saved, 4)

    @staticmethod
    def _features(asked: Asked) -> list[float]:
        return [1.0, float(asked.requests), asked.depth, asked.requests * asked.depth]


class Costs:
    """What is known of the machine; shared by controllers over one model if they like."""

    def __init__(self) -> None:
        self.passes, self.drafts = PassCost(), DraftCost()
