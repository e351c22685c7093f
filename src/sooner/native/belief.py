"""Python's side of belief.c: chances of guesses of requests known by numbers. Knows no policy and no costs."""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Sequence
from ctypes import Structure, c_double, c_int64, c_void_p
from dataclasses import astuple, dataclass
from typing import Any

from sooner.native import build

PLAIN, SCORED, DRAWN = range(3)  # kinds of guesses: without scores, with them, drawn at random
RANKS, BUCKETS, SAID = 4, 10, 4  # as in belief.c


@dataclass(frozen=True, slots=True)
class Terms:
    """The constants of control/belief.py, in the order of belief.c."""

    memory: float
    prior: float
    enough: float
    first: float
    later: float
    doubt: float
    drift: float
    scored_doubt: float
    scored_drift: float
    pull: float
    against: float
    bound: float
    sure: float


class _Terms(Structure):
    _fields_ = [(name, c_double) for name in Terms.__dataclass_fields__]


class Told:
    """Guesses of requests, one after another, as belief.c reads them."""

    def __init__(self) -> None:
        self.count = 0
        self.row: list[int] = []
        self.scores: list[float] = []

    def guess(
        self, request: int, kind: int, tokens: Sequence[int], parents: Sequence[int], scores: Sequence[float]
    ) -> None:
        """scores: of a scored one, one for each token."""
        self.count += 1
        self.row += (request, kind, len(tokens), *tokens, *parents)
        self.scores += scores

    def came(self, tokens: Sequence[int], kept: Sequence[int], path: Sequence[int]) -> None:
        """What a pass brought of the guess that was told last: new tokens, nodes verified, nodes accepted."""
        self.row += (len(tokens), len(kept), len(path), *tokens, *kept, *path)


def serves() -> bool:
    """Whether there is a library."""
    return _library() is not None


class BeliefsInC:
    """Raises MemoryError where there is none."""

    def __init__(self, terms: Terms) -> None:
        self._library = _library()
        self._weigh, self._learn = self._library.beliefs_weigh, self._library.beliefs_learn
        self._value, self._where = _doubles(0), array("q")
        self._at = self._library.beliefs_new(ctypes.byref(_Terms(*astuple(terms))))
        if not self._at:
            raise MemoryError(_NO_MEMORY)

    def __del__(self) -> None:
        if getattr(self, "_at", None):
            self._library.beliefs_free(self._at)

    def weigh(self, told: Told, most: int, floor: float) -> tuple[array[float], array[int], array[int]]:
        """Of nodes that have a chance, best first: minus it, whose guess, which node. most: nodes told."""
        if most > len(self._value):
            self._value, self._where = _doubles(2 * most), array("q", bytes(32 * most))
        row, scores = array("q", told.row), array("d", told.scores)
        value, where = self._value, self._where
        found = self._weigh(self._at, told.count, _place(row), _place(scores), floor, _place(value), _place(where))
        if found < 0:
            raise MemoryError(_NO_MEMORY)
        return value[:found], where[0 : 2 * found : 2], where[1 : 2 * found : 2]

    def learn(self, told: Told) -> list[int]:
        """Of each request how many guesses not verified were right, then whether one is still being compared."""
        row, scores = array("q", told.row), array("d", told.scores)
        learnt = array("q", bytes(16 * told.count))
        if not self._learn(self._at, told.count, _place(row), _place(scores), _place(learnt)):
            raise MemoryError(_NO_MEMORY)
        return learnt.tolist()

    def levels(self, depth: int) -> list[float]:
        """Log odds that a draft is accepted down to depth 1, 2, ..., given that it was to the one above."""
        odds = _doubles(depth)
        self._library.beliefs_levels(self._at, depth, _place(odds))
        return odds.tolist()

    def shift(self, request: int) -> float:
        """How a request departs from the rest, in log odds."""
        return float(self._library.beliefs_shift(self._at, request))

    def forget(self, request: int) -> None:
        """The number is free again."""
        self._library.beliefs_forget(self._at, request)


_NO_MEMORY = "no memory to judge guesses by"


def _doubles(count: int) -> array[float]:
    return array("d", bytes(8 * count))


def _place(values: Any) -> int:
    """Where an array lies."""
    return int(values.buffer_info()[0])


@functools.cache
def _library() -> Any:
    found = build.library("belief.c")
    if found is not None:
        found.beliefs_new.argtypes, found.beliefs_new.restype = [c_void_p], c_void_p
        found.beliefs_free.argtypes, found.beliefs_free.restype = [c_void_p], None
        found.beliefs_forget.argtypes, found.beliefs_forget.restype = [c_void_p, c_int64], None
        found.beliefs_levels.argtypes, found.beliefs_levels.restype = [c_void_p, c_int64, c_void_p], None
        found.beliefs_shift.argtypes, found.beliefs_shift.restype = [c_void_p, c_int64], c_double
        found.beliefs_weigh.argtypes = [c_void_p, c_int64, c_void_p, c_void_p, c_double, c_void_p, c_void_p]
        found.beliefs_learn.argtypes = [c_void_p, c_int64, c_void_p, c_void_p, c_void_p]
        found.beliefs_weigh.restype = found.beliefs_learn.restype = c_int64
    return found
