"""Tensors in safetensors files, read where they lie: mapped, never copied. Knows no model.

Pages that were read can be given back; the system keeps none of this process's memory for them.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_MOST_HEADER = 100_000_000  # bytes; what safetensors itself allows


class NotPlainError(Exception):
    """A file that is not what this reader understands; transformers may well."""


@dataclass(frozen=True, slots=True)
class _Place:
    file: mmap.mmap
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        return prod(self.shape)


class MappedTensors(Mapping[str, Tensor]):
    """Name -> tensor, a view of the file, not to be written to.

    Raises NotPlainError for files that are damaged or hold other types than float32, bfloat16 and float16.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._places: dict[str, _Place] = {}
        for file in files:
            found = _places(file)
            if found.keys() & self._places.keys():
                raise NotPlainError(f"{file.name} repeats tensors of another file")
            self._places |= found

    def __getitem__(self, name: str) -> Tensor:
        place = self._places[name]
        return torch.frombuffer(place.file, dtype=place.dtype, count=place.count, offset=place.start).view(
            place.shape
        )

    def __iter__(self) -> Any:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor, without touching any."""
        return {name: place.shape for name, place in self._places.items()}

    def give_back(self, names: Iterable[str]) -> None:
        """Let go of the pages of these tensors; whoever reads them again reads the file again."""
        for place in (self._places[name] for name in names):
            start = place.start // mmap.PAGESIZE * mmap.PAGESIZE
            if hasattr(mmap, "MADV_DONTNEED"):
                place.file.madvise(
                    mmap.MADV_DONTNEED, start, place.start + place.count * place.dtype.itemsize - start
                )


def _places(file: Path) -> dict[str, _Place]:
    """What a file holds: eight bytes with the length of a JSON header, the header, the numbers."""
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        if size > _MOST_HEADER:
            raise NotPlainError(f"{file.name} is not a safetensors file")
        try:
            header = json.loads(stream.read(size))
            # A private mapping may be written to, which torch asks of memory; nobody does, so nothing is copied.
            whole = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
            header.pop("__metadata__", None)
            return {name: _place(whole, 8 + size, told) for name, told in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise NotPlainError(f"{file.name}: {error}") from error


def _place(file: mmap.mmap, start: int, told: Mapping[str, Any]) -> _Place:
    first, end = told["data_offsets"]
    dtype = _DTYPES[told["dtype"]]
    place = _Place(file, start + first, dtype, tuple(told["shape"]))
    if (
        not 0 <= first <= end <= len(file) - start
        or end - first != place.count * dtype.itemsize
        or not place.count
    ):
        raise ValueError("a tensor lies outside of the file")
    return place
