"""Python's side of price.c: what more rows cost, and how many guesses are worth theirs. Knows no request."""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Sequence
from ctypes import Structure, c_double, c_int64, c_void_p
from typing import Any, NamedTuple

from sooner.native import build


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
            apart=_place(apart), knot=_place(self._kept[1]), knots=len(shape.knots), slope=shape.slope,
            counted=shape.counted, tile=shape.tile, near=shape.near, least=shape.least,
        )  # fmt: skip
        self._at, self._rise = ctypes.addressof(self._told), _library().price_rise

    def rise(self, mean: array[float], rows: int, line: float, keys: float, count: int) -> array[float]:
        """Seconds of each of `count` rows more than `rows`. line: what the line says of those; keys: seconds of
        what one row reads; both without the pace."""
        found = array("d", bytes(8 * (count + 1)))
        self._told.mean = _place(mean)
        self._rise(self._at, rows, line, keys, count, _place(found))
        return found[:count]


def worth(
    values: array[float], costs: array[float], alone: array[float], terms: Sequence[float]
) -> tuple[int, float, float]:
    """How many nodes are worth their rows, the price of a second, and the seconds of these rows.

    values: minus the chances, best first; costs, alone: of each row, in this pass and in one without prompts.
    terms: tokens and seconds of that one without guesses, what a second is worth at most and at least, the margin.
    """
    said, told = array("d", terms), array("d", (0.0, 0.0))
    places = _place(values), len(values), _place(costs), _place(alone), _place(said), _place(told)
    return _library().price_worth(*places), told[0], told[1]


def serves() -> bool:
    """Whether there is a library."""
    return _library() is not None


def _place(values: array[Any]) -> int:
    return values.buffer_info()[0]


@functools.cache
def _library() -> Any:
    found = build.library("price.c")
    if found is not None:
        found.price_rise.argtypes = [c_void_p, c_int64, c_double, c_double, c_int64, c_void_p]
        found.price_rise.restype = None
        found.price_worth.argtypes = [c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_void_p]
        found.price_worth.restype = c_int64
    return found
