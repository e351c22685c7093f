"""Python's side of filter.h. Knows not what is estimated."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from ctypes import Structure, c_double, c_int64, c_void_p
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sooner.native.control import library, place


class _Filter(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("size", "line", "streak", "enough")),
        *((name, c_void_p) for name in ("mean", "cov", "drift", "along", "jump")),
        *((name, c_double) for name in ("surprise", "clip", "far")),
    ]


@dataclass(frozen=True, slots=True)
class Bounds:
    """Deviations of a surprise, how many in a row are a change, deviations beyond which one counts no more; how
    far the log of the pace may be from 0 before it goes into the line."""

    surprise: float
    streak: int
    clip: float
    far: float


class FilterInC:
    """control/filter.py says what it does. cov: row after row."""

    def __init__(
        self, mean: Sequence[float], cov: Sequence[float], drift: Sequence[float], line: int,
        jumps: Sequence[float], bounds: Bounds,
    ) -> None:  # fmt: skip
        self.mean = array("d", mean)
        self._cov, self._drift, self._jumps = array("d", cov), array("d", drift), array("d", jumps)
        self._told = _Filter(
            line=line, enough=bounds.streak, surprise=bounds.surprise, clip=bounds.clip, far=bounds.far
        )
        self._point()
        self._learn = library().filter_learn

    def learn(self, at: Sequence[int], weights: Sequence[float], off: float, noise: float) -> None:
        places, factors = array("q", at), array("d", weights)
        self._learn(self._at, place(places), place(factors), len(places), off, noise)

    def add(self, mean: float, variance: float, drift: float) -> int:
        size = len(self.mean)
        cov: array[float] = array("d")
        for i in range(size):
            cov.extend(self._cov[i * size : (i + 1) * size])
            cov.append(0.0)
        cov.extend((*[0.0] * size, variance))
        self._cov = cov
        self.mean.append(mean)
        self._drift.append(drift)
        self._point()
        return size

    @property
    def doubt(self) -> NDArray[np.float64]:
        return np.array(self._cov).reshape(len(self.mean), -1)

    def _point(self) -> None:
        """Say where everything lies."""
        self._along = array("d", bytes(8 * len(self.mean)))
        told, parts = self._told, (self.mean, self._cov, self._drift, self._along, self._jumps)
        told.size = len(self.mean)
        told.mean, told.cov, told.drift, told.along, told.jump = map(place, parts)
        self._at = ctypes.addressof(told)
