"""Python's side of belief.h: chances of guesses of requests known by numbers. Knows no policy and no costs."""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Sequence
from ctypes import Structure, c_double, c_int64, c_void_p
from dataclasses import astuple, dataclass
from typing import NamedTuple

from sooner.native.control import library, place

PLAIN, SCORED, DRAWN = range(3)  # kinds of guesses: without scores, with them, drawn at random
RANKS, BUCKETS, SAID = 4, 10, 4  # as in belief.h


@dataclass(frozen=True, slots=True)
class Terms:
    """The constants of control/belief_plain.py, in the order of belief.h."""

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


class Prices(NamedTuple):
    """What nodes are weighed against: seconds of each row more, in this pass and in one without prompts; tokens
    and seconds of that one without guesses; what a second is worth in tokens, at most and at least; by what
    share a node has to be worth more than its row, for each chance that it is wrong; what share of what is written
    a choice may lose and still be nearly as good."""

    costs: array[float]
    alone: array[float]
    ready: int
    seconds: float
    most: float
    least: float
    doubt: float
    near: float


class _Weighed(Structure):
    _fields_ = [
        ("price", c_double),
        ("seconds", c_double),
        ("worth", c_int64),
        ("few", c_int64),
        ("far", c_int64),
        ("nodes", c_int64),
        ("value", c_void_p),
        ("where", c_void_p),
    ]


class Told:
    """Guesses of requests, one after another, as belief.h reads them."""

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


class BeliefsInC:
    """Raises MemoryError where there is none."""

    def __init__(self, terms: Terms) -> None:
        self._library = library()
        self._weigh, self._learn = self._library.control_weigh, self._library.beliefs_learn
        self._value, self._where = _doubles(0), array("q")
        self._weighed = _Weighed()
        self._found = ctypes.addressof(self._weighed)
        self._at = self._library.beliefs_new(ctypes.byref(_Terms(*astuple(terms))))
        if not self._at:
            raise MemoryError(_NO_MEMORY)

    def __del__(self) -> None:
        if getattr(self, "_at", None):
            self._library.beliefs_free(self._at)

    def weigh(
        self, told: Told, most: int, floor: float, prices: Prices
    ) -> tuple[tuple[array[float], array[int], array[int]], tuple[int, float, float, int, int]]:
        """Of nodes that have a chance, best first: minus it, whose guess, which node; and what state.Worth holds.
        most: nodes told."""
        found = self._weighed
        if most > len(self._value):
            self._value, self._where = _doubles(2 * most), array("q", bytes(32 * most))
            found.value, found.where = place(self._value), place(self._where)
        row, scores = array("q", told.row), array("d", told.scores)
        costs, alone, *plain = prices
        against = _AGAINST.pack(floor, place(costs), place(alone), *plain)
        if not self._weigh(self._at, told.count, place(row), place(scores), against, self._found):
            raise MemoryError(_NO_MEMORY)
        count, value, where = found.nodes, self._value, self._where
        nodes = value[:count], where[0 : 2 * count : 2], where[1 : 2 * count : 2]
        return nodes, (found.worth, found.price, found.seconds, found.few, found.far)

    def learn(self, told: Told) -> list[int]:
        """Of each request how many guesses not verified were right, then whether one is still being compared."""
        row, scores = array("q", told.row), array("d", told.scores)
        learnt = array("q", bytes(16 * told.count))
        if not self._learn(self._at, told.count, place(row), place(scores), place(learnt)):
            raise MemoryError(_NO_MEMORY)
        return learnt.tolist()

    def levels(self, depth: int) -> list[float]:
        """Log odds that a draft is accepted down to depth 1, 2, ..., given that it was to the one above."""
        odds = _doubles(depth)
        self._library.beliefs_levels(self._at, depth, place(odds))
        return odds.tolist()

    def shift(self, request: int) -> float:
        """How a request departs from the rest, in log odds."""
        return float(self._library.beliefs_shift(self._at, request))

    def forget(self, request: int) -> None:
        """The number is free again."""
        self._library.beliefs_forget(self._at, request)


_AGAINST = struct.Struct("=d2Q6d")
_NO_MEMORY = "no memory to judge guesses by"


def _doubles(count: int) -> array[float]:
    return array("d", bytes(8 * count))
