"""Python's side of law.c: float32 logits to candidates, and draws. Knows what core/law.py means by them."""

from __future__ import annotations

import ctypes
import functools
import struct
from array import array
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from sooner.native import build

_ROOM = 1024  # candidates a row has room for at first; flat laws come back for all of theirs


_LAWS = struct.Struct("=4q6Q")
_EDITS = struct.Struct("=7q8Q3d")


Filter = bytes
"""How one row is truncated, as law.c reads it: of softmax(logits / temperature) top-k, then top-p and min-p."""
LIKELIEST: Filter = struct.pack("dddqq", 1.0, 1.0, 0.0, 0, 0)
"""Of a row whose likeliest id alone is wanted."""
FEW, SUMS = 1, 2
"""Of a row whose candidates are wanted; of one that has no filter, whose norm is."""


def packed(temperature: float, top_k: int, top_p: float, min_p: float, wanted: int) -> Filter:
    return struct.pack("dddqq", temperature, top_p, min_p, top_k, wanted)


NOTHING = torch.empty((0, 0), dtype=torch.int64), torch.empty((0, 0))
"""No candidates: ids and mass."""


def serves(logits: Tensor) -> bool:
    """Whether `shape` can take these logits."""
    plain = logits.dtype == torch.float32 and logits.is_cpu and logits.is_contiguous()
    return plain and logits.shape[-1] > 0 and _library() is not None


def _tables(rows: int, room: int) -> tuple[Tensor, Tensor]:
    if not rows:
        return NOTHING
    return torch.empty((rows, room), dtype=torch.int64), torch.empty((rows, room))


def shape(
    logits: Tensor, filters: Sequence[Filter], few: Sequence[int]
) -> tuple[list[int], list[bool], Tensor, Tensor, list[tuple[float, float]]]:
    """Of every row of `logits` [n, V] the likeliest id and whether it is broken; of the rows `few`, those that
    have a filter, the candidates and their mass [s, K]; of those whose sums are wanted, the highest logit and the
    sum of exp((x - highest) / temperature)."""
    count, vocab = logits.shape
    told = array("b", b"".join(filters))
    wrote = array("q", bytes(8 * (3 * count + 1)))  # best, broken, candidates of each row; the most of them
    read, write = told.buffer_info()[0], wrote.buffer_info()[0]
    sums = array("d", bytes(16 * count))
    room = min(_ROOM, vocab) if few else 0
    while True:
        ids, mass = _tables(count if few else 0, room)
        everything = _LAWS.pack(
            count, vocab, room, torch.get_num_threads(), logits.data_ptr(), read, ids.data_ptr(), mass.data_ptr(),
            write, sums.buffer_info()[0],
        )  # fmt: skip
        _library().shape_rows(everything)
        if (most := wrote[-1]) <= room:
            break
        room = most
    best, broken = wrote[:count].tolist(), [odd != 0 for odd in wrote[count : 2 * count]]
    norms = list(zip(sums[::2], sums[1::2], strict=True))
    if few:
        ids, mass = ids.narrow(1, 0, most), mass.narrow(1, 0, most)
        if len(few) < count:
            ids, mass = ids[few], mass[few]
    return best, broken, ids, mass, norms


def likeliest(logits: Tensor, count: int) -> tuple[array[float], array[int]]:
    """The `count` likeliest ids of every row of `logits` [n, V], best first: values and ids, row after row. A row
    with NaN has NaN alone."""
    rows, vocab = logits.shape
    ids, values = array("q", bytes(8 * rows * count)), array("f", bytes(4 * rows * count))
    _library().likeliest_rows(
        logits.data_ptr(),
        rows,
        vocab,
        count,
        torch.get_num_threads(),
        ids.buffer_info()[0],
        values.buffer_info()[0],
    )
    return values, ids


def race(mass: Tensor, row: int, key: int, ids: Tensor | None) -> int:
    """One id drawn from row `row` of float32 `mass` [n, K]: core/noise.py says how. ids: [n, K] or None."""
    where = None if ids is None else ids.data_ptr() + 8 * row * ids.stride(0)
    return int(_library().race_row(mass.data_ptr() + 4 * row * mass.stride(0), where, mass.shape[1], key))


def race_logits(logits: Tensor, row: int, top: float, temperature: float, key: int) -> int:
    """The same with mass exp((x - top) / temperature) of row `row` of `logits` [n, V]."""
    where = logits.data_ptr() + 4 * row * logits.stride(0)
    return int(_library().race_logits(where, logits.shape[1], top, 1 / temperature, key))


def races(mass: Tensor, ids: Tensor | None) -> bool:
    """Whether `race` can take these rows."""
    plain = mass.dtype == torch.float32 and mass.is_cpu and mass.stride(-1) == 1
    return plain and (ids is None or ids.stride(-1) == 1) and _library() is not None


def look_up(
    ids: Tensor, mass: Tensor, rows: Sequence[int], above: Sequence[int], tokens: Sequence[int]
) -> tuple[list[float], list[float]]:
    """Sums of some rows of `mass` [n, K], and the masses of some tokens, each in row `above` of it."""
    asked = array("q", [*rows, *above, *tokens])
    told = array("d", bytes(8 * (len(rows) + len(tokens))))
    _library().look_up(
        ids.data_ptr(), mass.data_ptr(), ids.stride(0), ids.shape[1], len(rows), len(tokens),
        asked.buffer_info()[0], told.buffer_info()[0],
    )  # fmt: skip
    both = told.tolist()
    return both[: len(rows)], both[len(rows) :]


@dataclass(frozen=True, slots=True)
class Penalties:
    """counts: how often the text holds each of the past `ids`. fresh: further ids. pairs: sightings beside the
    past, (row, column of ids and fresh), ordered by row."""

    ids: array[int]
    counts: array[float]
    fresh: Sequence[int]
    pairs: Sequence[tuple[int, int]]
    repeat: float
    presence: float
    frequency: float


_NO_PENALTIES = Penalties(array("q"), array("f"), (), (), 1.0, 0.0, 0.0)


def edit(
    rows: Tensor, bias: Sequence[tuple[int, float]], known: Penalties | None, banned: Sequence[tuple[int, int]]
) -> None:
    """Bias, penalties and bans (row, id) on `rows` [n, V], in place."""
    p = known or _NO_PENALTIES
    told: list[array[Any]] = [
        array("q", [token for token, _ in bias]), array("d", [added for _, added in bias]), p.ids, p.counts,
        array("q", p.fresh), array("q", chain.from_iterable(p.pairs)), array("q", chain.from_iterable(banned)),
    ]  # fmt: skip
    sizes = (rows.shape[1], len(rows), len(bias), len(p.ids), len(p.fresh), len(p.pairs), len(banned))
    where = (rows.data_ptr(), *(part.buffer_info()[0] for part in told))
    _library().edit_rows(_EDITS.pack(*sizes, *where, p.repeat, p.presence, p.frequency))


@functools.cache
def _library() -> Any:
    made = build.library("law.c")
    if made is not None:
        made.shape_rows.restype = None
        made.race_row.restype = made.race_logits.restype = c_int64
        made.race_logits.argtypes = [c_void_p, c_int64, c_float, c_float, c_uint64]
        made.look_up.restype = made.edit_rows.restype = None
        made.likeliest_rows.restype = None
        made.likeliest_rows.argtypes = [c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p, c_void_p]
        made.look_up.argtypes = [c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p, c_void_p]
        made.shape_rows.argtypes = made.edit_rows.argtypes = [ctypes.c_char_p]
        made.race_row.argtypes = [c_void_p, c_void_p, c_int64, c_uint64]
    return made
