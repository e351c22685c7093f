"""Python's side of joined.c: joined trees of requests known by numbers. Knows no text and no drafter."""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Sequence
from ctypes import Structure, c_double, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

from sooner.native import build

ABSENT = -1
RUN = 3  # tokens of the longest key of a warm table
TOPS = 8  # likeliest ids kept of a row


class _Table(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("vocab", "level")),
        ("keys", c_int64 * RUN),
        ("key", c_void_p * RUN),
        ("at", c_void_p * RUN),
        *((name, c_void_p) for name in ("ends", "ids", "codes")),
    ]


class _Setup(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("lookup", "recycle", "table", "codes", "half")),
        ("floor", c_double),
        ("warm", _Table),
    ]


class _Asked(Structure):
    _fields_ = [
        ("count", c_int64),
        *((name, c_void_p) for name in ("request", "until", "tokens", "depth", "width", "nodes")),
        *((name, c_void_p) for name in ("size", "token", "parent", "score")),
    ]


class _Came(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("count", "width")),
        *((name, c_void_p) for name in ("request", "came", "tokens", "before", "root", "nodes", "rows")),
        *((name, c_void_p) for name in ("token", "parent", "ids", "logits")),
    ]


@dataclass(frozen=True, slots=True)
class Warm:
    """A warm table, as draft/table.py keeps it.

    keys: for runs of three tokens, two and one the sorted keys, int64, and the places of their rows, int32.
    ends, ids: int32. level: what the codes of each kind are higher by than those of the one before.
    """

    vocab: int
    keys: tuple[tuple[array[int], array[int]], ...]
    ends: array[int]
    ids: array[int]
    codes: bytes
    level: int


@dataclass(frozen=True, slots=True)
class Sources:
    """Which there are: the first code of each, or ABSENT. half: keys of the newer half of the recycled rows."""

    lookup: int
    recycle: int
    table: int
    half: int
    warm: Warm | None


@dataclass(slots=True)
class Job:
    """Requests to draft for: numbers, where each one's new tokens end in `tokens`, budgets (nodes 0 = nothing)."""

    request: array[int]
    until: array[int]
    tokens: array[int]
    depth: array[int]
    width: array[int]
    nodes: array[int]


@dataclass(slots=True)
class Came:
    """What passes brought: numbers, where the new tokens of each end in `tokens`, the last two tokens before.

    rows: of each request 1 + its nodes, or 0 where nothing of them is known. ids, logits: `width` of
    every row, int64 and float32.
    """

    request: array[int]
    came: array[int]
    tokens: array[int]
    before: array[int]
    root: array[int]
    nodes: array[int]
    rows: array[int]
    token: array[int]
    parent: array[int]
    ids: array[int]
    logits: array[float]
    width: int


def serves() -> bool:
    """Whether there is a library."""
    return _library() is not None


class JoinedTrees:
    """Joined trees with these sources. priors: chances of all codes. Raises MemoryError where there is none."""

    def __init__(self, sources: Sources, priors: Sequence[float], strength: float, floor: float) -> None:
        self._codes, self._kept = len(priors), sources.warm
        setup = _Setup(sources.lookup, sources.recycle, sources.table, len(priors), sources.half, floor)
        if sources.warm is not None:
            setup.warm = _table(sources.warm)
        chances = array("d", priors)
        self._at = _library().joined_new(ctypes.byref(setup), _place(chances), strength)
        if not self._at:
            raise MemoryError("no memory for a joined draft")

    def __del__(self) -> None:
        if getattr(self, "_at", None):
            _library().joined_free(self._at)

    @property
    def keys(self) -> int:
        """Keys of recycled rows that are held."""
        return int(_library().joined_keys(self._at))

    def values(self) -> list[float]:
        """What guesses of each code are worth by now."""
        values = array("d", bytes(8 * self._codes))
        _library().joined_values(self._at, _place(values))
        return values.tolist()

    def propose(self, job: Job) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]]:
        """Of every request tokens, parents (-1 = root) and scores of its tree, parents first."""
        most = sum(job.nodes)
        size = array("q", bytes(8 * len(job.request)))
        token, parent, score = (
            array("i", bytes(4 * most)),
            array("i", bytes(4 * most)),
            array("d", bytes(8 * most)),
        )
        told = (job.request, job.until, job.tokens, job.depth, job.width, job.nodes, size, token, parent, score)
        asked = _Asked(len(job.request), *map(_place, told))
        if not _library().joined_propose(self._at, ctypes.byref(asked)):
            raise MemoryError("no memory for a joined draft")
        trees, end = [], 0
        for count in size:
            here, end = slice(end, end + count), end + count
            trees.append((tuple(token[here]), tuple(parent[here]), tuple(score[here])))
        return trees

    def observe(self, came: Came) -> None:
        """Learn from what came; later trees know it."""
        told = (came.request, came.came, came.tokens, came.before, came.root, came.nodes, came.rows)
        rows = (came.token, came.parent, came.ids, came.logits)
        job = _Came(len(came.request), came.width, *map(_place, told), *map(_place, rows))
        if not _library().joined_observe(self._at, ctypes.byref(job)):
            raise MemoryError("no memory for a joined draft")

    def restart(self, request: int) -> None:
        """The text of a request begins anew."""
        _library().joined_restart(self._at, request)

    def forget(self, request: int) -> None:
        """The number is free again."""
        _library().joined_forget(self._at, request)


def _place(values: Any) -> int:
    """Where an array lies."""
    return int(values.buffer_info()[0])


def _table(warm: Warm) -> _Table:
    told = _Table(warm.vocab, warm.level, ends=_place(warm.ends), ids=_place(warm.ids))
    told.codes = ctypes.cast(ctypes.c_char_p(warm.codes), c_void_p).value
    for kind, (keys, places) in enumerate(warm.keys):
        told.keys[kind], told.key[kind], told.at[kind] = len(keys), _place(keys), _place(places)
    return told


@functools.cache
def _library() -> Any:
    found = build.library("joined.c")
    if found is not None:
        found.joined_new.argtypes = [c_void_p, c_void_p, c_double]
        found.joined_new.restype = c_void_p
        found.joined_keys.restype = found.joined_propose.restype = found.joined_observe.restype = c_int64
        for name in ("keys", "free"):
            getattr(found, f"joined_{name}").argtypes = [c_void_p]
        for name in ("values", "propose", "observe"):
            getattr(found, f"joined_{name}").argtypes = [c_void_p, c_void_p]
        for name in ("restart", "forget"):
            getattr(found, f"joined_{name}").argtypes = [c_void_p, c_int64]
    return found
