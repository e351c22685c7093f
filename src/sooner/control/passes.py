"""What a pass of the target costs in seconds, learnt from those that ran. Knows no policy and no model.

A cost is a broken line in rows, requests and keys read, times how much passes of just so many rows depart from it
(kernels work in tiles, so costs rise in steps), times the pace of the machine. One Kalman filter keeps all of it
together: passes of one size, many in a row, could be slow because they are of that size or because the machine is,
and only the doubt about both at once lets the next pass of another size tell.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from operator import mul
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sooner.control.filter import TIMER, Filter, Prior, begin
from sooner.control.saved import STALE, floats
from sooner.errors import ConfigError
from sooner.native.control import serves
from sooner.native.price import RowsInC, Shape

KNOTS = (0, 4, 8, 16, 32, 64, 128, 512)  # rows at which the slope may change
_COUNTED = 64  # rows up to which every number of them is looked at by itself
_TILE = 8  # rows over which departures are alike, if anywhere
_ALIKE = 64  # tokens of context a request by which passes may differ and count as one
_LITTLE = 8  # passes of just so many rows, below which little is known of them
_LEAST_RISE = 0.25  # of what the line says of a row, that it costs at least
# What may be, as shares of a cost: noise of one pass; departures of a number of rows, how alike neighbours are,
# and what they change by from pass to pass; the same for the pace, and for the coefficients of the line.
_NOISE = 0.05
_APART, _NEAR, _APART_DRIFT = 0.03, 0.8, 0.0005
_PACE_DRIFT, _SHAPE_DRIFT = 0.003, 0.002
_ALIKE_ERRORS = 0.3  # how alike the errors of the first guess of two coefficients are
# After several surprises of one kind the machine is another one: all costs may have changed by so much, and what a
# pass costs before its first row (memory) apart from that.
_JUMP, _BASE_JUMP = 0.2, 0.3


_NONE = array("d")


class Load(NamedTuple):
    """What a pass has to do: rows, requests they belong to, and tokens in all lanes."""

    rows: int
    requests: int
    context: int


_SEGMENTS = tuple((low, high - low) for low, high in pairwise((*KNOTS, 2**31)))
_SIZE = len(KNOTS) + 3  # coefficients of the line
_BASE = 1  # where they begin among what is estimated; the pace comes before, departures by rows after them
_LINE = slice(_BASE, _BASE + _SIZE)
_SHAPE = Shape(KNOTS, _BASE + 1, _COUNTED, _TILE, _NEAR, _LEAST_RISE)
_JUMPS = (_JUMP, _BASE_JUMP, *[0.0] * (_SIZE - 1))


def _features(load: Load) -> list[float]:
    rows = load.rows
    steps = [float(min(max(rows - low, 0), width)) for low, width in _SEGMENTS]
    return [1.0, *steps, float(load.requests), _read(load)]


def _read(load: Load) -> float:
    """Thousands of keys that attention reads: each row those of its own lane."""
    return load.rows * load.context / (1000 * max(load.requests, 1))


def _nowhere() -> array[int]:
    return array("q", [-1] * (_COUNTED + 1))


def _alike(load: Load) -> tuple[int, int, int]:
    return load.rows, load.requests, load.context // (_ALIKE * max(load.requests, 1))


class PassCost:
    """Seconds of one pass of the target, everything that depends on its rows included."""

    def __init__(self) -> None:
        self._filter: Filter = begin(Prior((), np.zeros((0, 0)), (), _SIZE, _JUMPS))
        self._mean = self._filter.mean  # the log of the pace, the line, the log of each departure
        self._times = [0] * (_COUNTED + 1)  # passes of just so many rows that were measured
        self._apart = _nowhere()  # by rows: where its departure is, -1 where none was seen
        self._rows = RowsInC(_SHAPE, self._apart) if serves() else None
        self._found: dict[tuple[int, int, int], float] = {}  # until more is learnt
        self._further: dict[tuple[int, int, int], array[float]] = {}
        self.seen = 0
        self.plain = 0  # passes measured that held no guesses and no prompts

    @property
    def known(self) -> bool:
        """Whether any pass has been measured."""
        return bool(self._mean)

    def little(self, rows: int) -> bool:
        """Whether passes of just so many rows were hardly seen, so that the next one is worth learning from."""
        return rows <= _COUNTED and self._times[rows] < _LITTLE

    def seconds(self, load: Load) -> float:
        """Of one pass; 1.0 plus a little for each row while nothing is known."""
        if not self._mean:
            return 1.0 + load.rows / 64
        key = _alike(load)
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = max(self._line(_features(load)) * self._share(load.rows), TIMER)
        return found

    def further(self, load: Load, count: int) -> array[float]:
        """Seconds of each row more than the pass has, `count` of them at least. Never next to nothing: where more
        rows were seen to take less time, it is the fewer that were unlucky."""
        key = _alike(load)
        found = self._further.get(key, _NONE)
        if len(found) < count:
            found = self._further[key] = self._rise(load, max(count, 2 * len(found), 16))
        return found

    def _line(self, features: Sequence[float]) -> float:
        return float(sum(map(mul, self._mean[_LINE], features)))

    def _share(self, rows: int) -> float:
        """What passes of so many rows take now, of what the line says."""
        at = self._apart[rows] if rows <= _COUNTED else -1
        return math.exp(self._mean[0] + (self._expected(rows) if at < 0 else self._mean[at]))

    def _expected(self, rows: int) -> float:
        """The departure of so many rows, by that of the nearest number of the same tile that was seen."""
        first = (rows - 1) // _TILE * _TILE + 1
        last = min(first + _TILE - 1, _COUNTED)
        near = [seen for seen in range(first, last + 1) if self._apart[seen] >= 0] if rows <= _COUNTED else []
        if not near:
            return 0.0
        nearest = min(near, key=lambda seen: abs(seen - rows))
        return self._mean[self._apart[nearest]] * _NEAR ** abs(nearest - rows)

    def _rise(self, load: Load, count: int) -> array[float]:
        if not self._mean:
            return array("d", [1 / 64] * count)
        line = self._line(_features(load))
        keys = self._mean[_BASE + _SIZE - 1] * load.context / (1000 * max(load.requests, 1))
        if self._rows is not None and isinstance(self._mean, array):
            return self._rows.rise(self._mean, load.rows, line, keys, count)
        slopes = self._mean[_SHAPE.slope : _SHAPE.slope + len(KNOTS)]
        segment, pace = bisect_right(KNOTS, load.rows) - 1, math.exp(self._mean[0])
        totals, least = [], []
        for rows in range(load.rows, load.rows + count + 1):
            totals.append(line * (self._share(rows) if rows <= _COUNTED else pace))
            if segment + 1 < len(KNOTS) and rows >= KNOTS[segment + 1]:
                segment += 1
            row = slopes[segment] + keys
            line += row
            least.append(_LEAST_RISE * pace * row)
        for i in range(count - 1, -1, -1):
            totals[i] = min(totals[i], totals[i + 1] - least[i])
        return array("d", [after - before for before, after in pairwise(totals)])

    def observe(self, load: Load, seconds: float) -> None:
        """Learn from one measurement."""
        if not math.isfinite(seconds) or seconds <= 0:
            return
        if not self._mean:
            self._begin(*_first(load, seconds))
        self.plain += load.rows == load.requests
        self.seen += 1
        features = _features(load)
        line = max(self._line(features), TIMER)
        at, weights = list(range(_BASE + _SIZE)), [1.0, *(x / line for x in features)]
        if load.rows <= _COUNTED:
            self._times[load.rows] += 1
            at.append(self._departure(load.rows))
            weights.append(1.0)
        off = math.log(seconds / line) - math.log(self._share(load.rows))
        self._filter.learn(at, weights, off, _NOISE**2 + (TIMER / seconds) ** 2)
        self._found.clear()
        self._further.clear()

    def _departure(self, rows: int, mean: float | None = None) -> int:
        """Where that of so many rows is, from now on; at first `mean`, or as those of its tile suggest."""
        found = self._apart[rows]
        if found < 0:
            first = self._expected(rows) if mean is None else mean
            found = self._apart[rows] = self._filter.add(first, _APART**2, _APART_DRIFT**2)
        return found

    def _begin(
        self, line: Sequence[float], cov: NDArray[np.float64], room: Sequence[float], pace: float = 0.0
    ) -> None:
        """line, cov: the coefficients and the doubt about them; room: what was thought possible at first; pace:
        the deviation of its log."""
        whole = np.zeros((_BASE + _SIZE, _BASE + _SIZE))
        whole[0, 0] = pace**2
        whole[_LINE, _LINE] = cov
        drift = [_PACE_DRIFT**2, *((_SHAPE_DRIFT * r) ** 2 for r in room)]
        self._filter, self._room = begin(Prior((0.0, *line), whole, drift, _SIZE, _JUMPS)), list(room)
        self._mean = self._filter.mean
        self._times = [0] * (_COUNTED + 1)
        self._apart[:] = _nowhere()

    def saved(self) -> dict[str, object] | None:
        if not self._mean:
            return None
        pace = math.exp(self._mean[0])
        return {
            "knots": list(KNOTS),
            "plain": self.plain,
            "line": [pace * one for one in self._mean[_LINE]],
            "room": [pace * one for one in self._room],
            "apart": [[rows, self._mean[at], self._times[rows]] for rows, at in enumerate(self._apart) if at >= 0],
        }

    def restore(self, saved: object) -> None:
        """Take over what `saved` wrote, each number for about right. Raises ConfigError if it is not that."""
        if not isinstance(saved, Mapping) or saved.get("knots") != list(KNOTS) or "line" not in saved:
            raise ConfigError("the saved cost of passes has another form.")
        line, room = floats(saved["line"], _SIZE), floats(saved.get("room"), _SIZE)
        apart = saved.get("apart")
        known = [floats(one, 3) for one in apart] if isinstance(apart, list) else []
        odd = any(not 1 <= rows <= _COUNTED or count < 0 for rows, _, count in known)
        if min(line) < 0 or min(room) <= 0 or odd:
            raise ConfigError("the saved cost of passes holds what no measurement gives.")
        self._begin(line, np.diag((STALE * np.array(line)) ** 2), room, pace=STALE)
        for rows, mean, count in known:
            self._departure(int(rows), mean)
            self._times[int(rows)] = int(count)
        plain = saved.get("plain")
        self.seen, self.plain = 1, plain if isinstance(plain, int) else 0


def _first(load: Load, seconds: float) -> tuple[list[float], NDArray[np.float64], list[float]]:
    """A first guess from one pass: a row costs a fortieth of the pass itself, a request a hundredth. The
    coefficients, the doubt about them, and the room of each."""
    base = seconds / (1 + load.rows / 40 + load.requests / 100 + _read(load) / 40)
    line = [base, *[base / 40] * len(KNOTS), base / 100, base / 40]
    spread = np.array([base, *[base / 30] * len(KNOTS), base / 50, base / 20])
    cov = np.outer(spread, spread) * (_ALIKE_ERRORS + (1 - _ALIKE_ERRORS) * np.eye(_SIZE))
    return line, cov, spread.tolist()
