"""Python's side of price.h: what more rows cost. Knows no request and no guess."""

from __future__ import annotations

import ctypes
from array import array
from ctypes import Structure, c_double, c_int64, c_void_p
from typing import NamedTuple

from sooner.native.control import library, place


class Shape(NamedTuple):
    """How costs of rows are built, as control/passes.py says: rows where the slope may change, where among the
    estimates the slopes begin, the most rows that depart by their number, rows over which departures are alike and
    how alike neighbours are, and the least share of a slope that a row costs."""

    knots: tuple[int, ...]
    slope: int
    counted: int
    tile: int
    near: float
    least: float


class _Costs(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("mean", "apart", "knot")),
        *((name, c_int64) for name in ("knots", "slope", "counted", "tile")),
        *((name, c_double) for name in ("near", "least")),
    ]


class RowsInC:
    """Costs of rows. apart: [1 + counted], where the departure of so many rows is among the estimates, or -1."""

    def __init__(self, shape: Shape, apart: array[int]) -> None:
        self._kept = apart, array("q", shape.knots)
        self._told = _Costs(
            apart=place(apart), knot=place(self._kept[1]), knots=len(shape.knots), slope=shape.slope,
            counted=shape.counted, tile=shape.tile, near=shape.near, least=shape.least,
        )  # fmt: skip
        self._at, self._rise = ctypes.addressof(self._told), library().price_rise

    def rise(self, mean: array[float], rows: int, line: float, keys: float, count: int) -> array[float]:
        """Seconds of each of `count` rows more than `rows`. line: what the line says of those; keys: seconds of
        what one row reads; both without the pace."""
        found = array("d", bytes(8 * (count + 1)))
        self._told.mean = place(mean)
        self._rise(self._at, rows, line, keys, count, place(found))
        return found[:count]
