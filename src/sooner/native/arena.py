"""Memory for what every pass reads, in large pages where the system gives them. Knows not what lies in it."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

_CHUNK = 64 << 20  # bytes asked for at once; what is not touched is not resident


class Arena:
    """Hands out int32 tensors; a tensor keeps its chunk alive."""

    def __init__(self) -> None:
        self._free = torch.zeros(0, dtype=torch.int32)

    def take(self, count: int) -> Tensor:
        """`count` int32, 64-byte aligned, not yet written."""
        rounded = -(-count // 16) * 16
        if rounded > len(self._free):
            size = -(-max(rounded * 4, _CHUNK) // _CHUNK) * _CHUNK
            private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
            chunk = mmap.mmap(-1, size, **private)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                chunk.madvise(mmap.MADV_HUGEPAGE)
            self._free = torch.frombuffer(chunk, dtype=torch.int32)
        taken, self._free = self._free[:count], self._free[rounded:]
        return taken
