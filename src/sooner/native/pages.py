"""Zeros that take memory once they are written to, and give it back part by part. Knows not what lies in them."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from math import prod

import torch


class Pages:
    """tensor: zeros of that shape. On CPU no page of it is resident before it is written."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        size = prod(shape) * dtype.itemsize
        self._memory: mmap.mmap | None = None
        if torch.device(device).type != "cpu" or not size:
            self.tensor = torch.zeros(tuple(shape), dtype=dtype, device=device)
            return
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
        self._memory = mmap.mmap(-1, size, **private)
        self.tensor = torch.frombuffer(self._memory, dtype=dtype).view(tuple(shape))

    def give_back(self, index: int) -> None:
        """Let go of the pages of `tensor[index]`, which is not to be read again."""
        if self._memory is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        part = self.tensor[index].numel() * self.tensor.element_size()
        start = -(-index * part // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (index + 1) * part // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start:
            self._memory.madvise(mmap.MADV_DONTNEED, start, end - start)
