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


class _Guesses(Structure):
    _fields_ = [
        ("count", c_int64),
        *((name, c_void_p) for name in ("request", "size", "kind", "token", "parent", "score")),
    ]


class _Came(Structure):
    _fields_ = [
        ("guesses", _Guesses),
        *((name, c_void_p) for name in ("tokens", "kept", "path", "token", "keep", "accepted")),
    ]


class Guesses:
    """Guesses of requests, one after another. Token ids and places are int32 in C."""

    def __init__(self) -> None:
        self.request, self.size, self.kind = array("q"), array("q"), array("q")
        self.token, self.parent, self.score = array("i"), array("i"), array("d")

    def add(
        self, request: int, kind: int, tokens: Sequence[int], parents: Sequence[int], scores: Sequence[float]
    ) -> None:
        """scores: empty, or one for each token."""
        self.request.append(request)
        self.size.append(len(tokens))
        self.kind.append(kind)
        self.token.extend(tokens)
        self.parent.extend(parents)
        self.score.extend(scores or [0.0] * len(tokens))

    def told(self) -> _Guesses:
        """Where they lie; they must not change while that is in use."""
        parts = (self.request, self.size, self.kind, self.token, self.parent, self.score)
        return _Guesses(len(self.request), *map(_place, parts))


class Came:
    """What passes brought: a guess as it was offered, the new tokens, the nodes verified and those accepted."""

    def __init__(self) -> None:
        self.guesses = Guesses()
        self.tokens, self.kept, self.path = array("q"), array("q"), array("q")
        self.token, self.keep, self.accepted = array("i"), array("i"), array("i")

    def add(self, tokens: Sequence[int], kept: Sequence[int], path: Sequence[int]) -> None:
        """Of the guess that was added last."""
        for size, flat, new in (
            (self.tokens, self.token, tokens), (self.kept, self.keep, kept), (self.path, self.accepted, path)
        ):  # fmt: skip
            size.append(len(new))
            flat.extend(new)


def serves() -> bool:
    """Whether there is a library."""
    return _library() is not None


class BeliefsInC:
    """Raises MemoryError where there is none."""

    def __init__(self, terms: Terms) -> None:
        self._library = _library()
        self._at = self._library.beliefs_new(ctypes.byref(_Terms(*astuple(terms))))
        if not self._at:
            raise MemoryError(_NO_MEMORY)

    def __del__(self) -> None:
        if getattr(self, "_at", None):
            self._library.beliefs_free(self._at)

    def survive(self, guesses: Guesses, floor: float) -> list[float]:
        """The chance of each node; what is below `floor` may be 0."""
        chances = _doubles(len(guesses.token))
        if self._library.beliefs_survive(self._at, ctypes.byref(guesses.told()), floor, _place(chances)) < 0:
            raise MemoryError(_NO_MEMORY)
        return chances.tolist()

    def weigh(self, guesses: Guesses, floor: float) -> list[tuple[float, int, int]]:
        """All nodes that have a chance, best first: minus the chance, whose guess, which node."""
        most = len(guesses.token)
        value, whose, node = _doubles(most), array("q", bytes(8 * most)), array("q", bytes(8 * most))
        places = _place(value), _place(whose), _place(node)
        found = self._library.beliefs_weigh(self._at, ctypes.byref(guesses.told()), floor, *places)
        if found < 0:
            raise MemoryError(_NO_MEMORY)
        return list(zip(value[:found], whose[:found], node[:found], strict=True))

    def learn(self, came: Came) -> tuple[array[int], array[int]]:
        """Of each request: how many guesses not verified were right, and whether one is still being compared."""
        guesses, count = came.guesses.told(), len(came.tokens)
        right, waits = array("q", bytes(8 * count)), array("q", bytes(8 * count))
        parts = (came.tokens, came.kept, came.path, came.token, came.keep, came.accepted)
        told = _Came(guesses, *map(_place, parts))
        if not self._library.beliefs_learn(self._at, ctypes.byref(told), _place(right), _place(waits)):
            raise MemoryError(_NO_MEMORY)
        return right, waits

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
        found.beliefs_survive.argtypes = [c_void_p, c_void_p, c_double, c_void_p]
        found.beliefs_weigh.argtypes = [c_void_p, c_void_p, c_double, c_void_p, c_void_p, c_void_p]
        found.beliefs_learn.argtypes = [c_void_p, c_void_p, c_void_p, c_void_p]
        for name in ("survive", "weigh", "learn"):
            getattr(found, f"beliefs_{name}").restype = c_int64
    return found
