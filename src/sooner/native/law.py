"""Python's side of law.c: float32 logits to candidates, and draws. Knows what core/law.py means by them."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import Structure, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sooner.native import build

_ROOM = 256  # candidates a row has room for at first; flat laws come back for all of theirs


class _Laws(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("rows", "vocab", "room", "threads")),
        *((name, c_void_p) for name in ("logits", "temperature", "top_p", "min_p", "top_k", "filter")),
        *((name, c_void_p) for name in ("best", "broken", "ids", "mass", "count")),
    ]


@dataclass(frozen=True, slots=True)
class Filter:
    """How one row is truncated: probabilities of logits / temperature, then top-k, top-p and min-p."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


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
    some = [f or Filter(1.0) for f in filters]
    numbers = [
        (ctypes.c_double * count)(*(getattr(f, n) for f in some)) for n in ("temperature", "top_p", "min_p")
    ]
    top_k = (c_int64 * count)(*(f.top_k for f in some))
    filtered = (ctypes.c_uint8 * count)(*(f is not None for f in filters))
    given: tuple[ctypes.Array[Any], ...] = (*numbers, top_k, filtered)
    kept = torch.empty(count, dtype=torch.int64)
    best, broken = torch.empty(count, dtype=torch.int64), torch.empty(count, dtype=torch.bool)
    room = min(_ROOM, vocab)
    while True:
        ids = torch.empty((count, room), dtype=torch.int64)
        mass = torch.empty((count, room))
        arrays = [ctypes.addressof(a) for a in given]
        told = _Laws(
            count, vocab, room, torch.get_num_threads(), logits.data_ptr(), *arrays,
            best.data_ptr(), broken.data_ptr(), ids.data_ptr(), mass.data_ptr(), kept.data_ptr(),
        )  # fmt: skip
        _library().shape_rows(ctypes.byref(told))
        wanted = max(kept.tolist(), default=0)
        if wanted <= room:
            break
        room = wanted
    rows = [r for r, f in enumerate(filters) if f is not None]
    if len(rows) < count:
        ids, mass, kept = ids[rows], mass[rows], kept[rows]
    ids, mass = ids[:, :wanted], mass[:, :wanted]
    padding = torch.arange(wanted) >= kept[:, None]
    return Shaped(best, broken, ids.masked_fill(padding, 0), mass.masked_fill(padding, 0.0))


def race(mass: Tensor, key: int, ids: Tensor | None) -> int:
    """One id drawn from one row of float32 `mass` [K]: core/noise.py says how."""
    where = None if ids is None else ids.data_ptr()
    return int(_library().race_row(mass.data_ptr(), where, len(mass), key))


def races(mass: Tensor, ids: Tensor | None) -> bool:
    """Whether `race` can take these rows."""
    plain = mass.dtype == torch.float32 and mass.device.type == "cpu" and mass.stride(-1) == 1
    return plain and (ids is None or ids.stride(-1) == 1) and _library() is not None


@functools.cache
def _library() -> Any:
    made = build.library("law.c")
    if made is not None:
        made.shape_rows.restype = None
        made.race_row.restype = c_int64
        made.race_row.argtypes = [c_void_p, c_void_p, c_int64, c_uint64]
    return made
