"""A stand-in for a CUDA graph: as strict while it records, and as careless with its results afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# What a device cannot do while it records: tell the host a number, or take one from it.
_READS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal", "lift_fresh")


class NothingRead(TorchDispatchMode):
    """Raises RuntimeError at an operation that needs the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in _READS:
            raise RuntimeError(f"{name} cannot be recorded")
        return func(*args, **(kwargs or {}))


class Tape:
    """Recorded work, done again into the same tensors. made: where all tapes are listed."""

    def __init__(self, made: list[Tape], fault: Exception | None = None) -> None:
        self._fault, self.replays = fault, 0
        made.append(self)

    def capture(self, work: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        if self._fault is not None:
            raise self._fault
        with NothingRead():
            self._results = work()
        for result in self._results:
            result.fill_(torch.nan)  # nothing is there before the first replay
        self._work = work
        return self._results

    def replay(self) -> None:
        self.replays += 1
        for result, new in zip(self._results, self._work(), strict=True):
            result.copy_(new)


class Tapes:
    """Makes tapes, and counts them. fault: what they raise."""

    def __init__(self, fault: Exception | None = None) -> None:
        self.made: list[Tape] = []
        self._fault = fault

    def __call__(self) -> Tape:
        return Tape(self.made, self._fault)

    @property
    def replays(self) -> int:
        return sum(tape.replays for tape in self.made)
