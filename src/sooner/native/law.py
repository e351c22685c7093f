"""Python's side of law.c: float32 logits to candidates, and draws. Knows what core/law.py means by them."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_double, c_float, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sooner.native import build

_ROOM = 256  # candidates a row has room for at first; flat laws come back for all of theirs


class _Laws(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("rows", "vocab", "room", "threads")),
        ("logits", c_void_p),
        ("filter", ctypes.c_char_p),
        *((name, c_void_p) for name in ("best", "broken", "ids", "mass", "count", "most")),
    ]


@dataclass(frozen=True, slots=True)
class Filter:
    """How one row is truncated: probabilities of logits / temperature, then top-k, top-p and min-p."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@functools.lru_cache
def _packed(f: Filter | None) -> bytes:
    return struct.pack(
        "dddqq", *((1.0, 1.0, 0.0, 0, 0) if f is None else (f.temperature, f.top_p, f.min_p, f.top_k, 1))
    )


@dataclass(frozen=True, slots=True)
class Shaped:
    """best: int64 [n]; broken: bool [n]; ids, mass: [s, K] for the rows that have a filter, in order."""

    best: Tensor
    broken: Tensor
    ids: Tensor
    mass: Tensor


def serves(logits: Tensor) -> bool:
    """Whether `shape` can take these logits."""
    plain = logits.dtype == torch.float32 and logits.device.type == "cpu" and logits.is_contiguous()
    return plain and logits.shape[-1] > 0 and _library() is not None


def shape(logits: Tensor, filters: Sequence[Filter | None]) -> Shaped:
    """The likeliest id of every row of `logits` [n, V], and the candidates of the rows that have a filter."""
    count, vocab = logits.shape
    packed = b"".join([_packed(f) for f in filters])
    kept, most = (c_int64 * count)(), c_int64()
    best, broken = torch.empty(count, dtype=torch.int64), torch.empty(count, dtype=torch.bool)
    rows = [r for r, f in enumerate(filters) if f is not None]
    room = min(_ROOM, vocab) if rows else 0
    while True:
        ids = torch.empty((count, room), dtype=torch.int64)
        mass = torch.empty((count, room))
        told = _Laws(
            count, vocab, room, torch.get_num_threads(), logits.data_ptr(), packed,
            best.data_ptr(), broken.data_ptr(), ids.data_ptr(), mass.data_ptr(),
            ctypes.addressof(kept), ctypes.addressof(most),
        )  # fmt: skip
        _library().shape_rows(ctypes.byref(told))
        if most.value <= room:
            break
        room = most.value
    if len(rows) < count:
        ids, mass = ids[rows], mass[rows]
    return Shaped(best, broken, ids[:, : most.value], mass[:, : most.value])


def race(mass: Tensor, key: int, ids: Tensor | None) -> int:
    """One id drawn from one row of float32 `mass` [K]: core/noise.py says how."""
    where = None if ids is None else ids.data_ptr()
    return int(_library().race_row(mass.data_ptr(), where, len(mass), key))


def races(mass: Tensor, ids: Tensor | None) -> bool:
    """Whether `race` can take these rows."""
    plain = mass.dtype == torch.float32 and mass.device.type == "cpu" and mass.stride(-1) == 1
    return plain and (ids is None or ids.stride(-1) == 1) and _library() is not None


def look_up(
    ids: Tensor, mass: Tensor, above: Sequence[int], tokens: Sequence[int]
) -> tuple[list[float], list[float]]:
    """Sums of the rows of `mass` [n, K], and the masses of some tokens, each in row `above` of it."""
    totals, found = (c_double * len(ids))(), (c_double * len(tokens))()
    rows, names = (c_int64 * len(above))(*above), (c_int64 * len(tokens))(*tokens)
    _library().look_up(
        ids.data_ptr(), mass.data_ptr(), ids.stride(0), ids.shape[1], len(ids), totals,
        len(tokens), rows, names, found,
    )  # fmt: skip
    return list(totals), list(found)


def penalise(
    rows: Tensor, ids: Sequence[int], counts: Tensor, pairs: Sequence[tuple[int, int]],
    repeat: float, presence: float, frequency: float,
) -> None:  # fmt: skip
    """Penalties on `rows` [n, V] in place: `counts` [P] for the first P of `ids`, and pairs of (row, column of
    ids) for further sightings, ordered by row."""
    names, flat = (c_int64 * len(ids))(*ids), (c_int64 * (2 * len(pairs)))(*(i for pair in pairs for i in pair))
    _library().penalise(
        rows.data_ptr(), rows.shape[1], len(rows), names, counts.data_ptr(), len(counts), len(ids),
        flat, len(pairs), repeat, presence, frequency,
    )  # fmt: skip


@functools.cache
def _library() -> Any:
    made = build.library("law.c")
    if made is not None:
        made.shape_rows.restype = None
        made.race_row.restype = c_int64
        made.look_up.restype = made.penalise.restype = None
        made.look_up.argtypes = [
            c_void_p, c_void_p, c_int64, c_int64, c_int64, POINTER(c_double), c_int64,
            POINTER(c_int64), POINTER(c_int64), POINTER(c_double),
        ]  # fmt: skip
        made.penalise.argtypes = [
            c_void_p, c_int64, c_int64, POINTER(c_int64), c_void_p, c_int64, c_int64, POINTER(c_int64), c_int64,
            c_float, c_float, c_float,
        ]  # fmt: skip
        made.race_row.argtypes = [c_void_p, c_void_p, c_int64, c_uint64]
    return made
