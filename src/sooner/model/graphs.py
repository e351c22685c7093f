"""Passes recorded once on a GPU and replayed, so that a pass costs the host one launch. Knows no model.

What is recorded reads its numbers from a buffer that is always the same, and the lanes where they lay; when these
have moved, all recordings are dropped. A layout is recorded when it first comes, after a pass as it is: that loads
and sets up what cannot be recorded.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from sooner.core.host import moved

logger = logging.getLogger("sooner")

OFF = "SOONER_CUDA_GRAPHS"  # 0 in the environment: nothing is recorded
_MOST = 32  # recordings kept, those used last; rows, lanes and columns come in few tiles

Body = Callable[[Tensor], tuple[Tensor, ...]]
"""A pass over numbers on the device: a function of them and of the lanes alone, of fixed shapes."""


class Recorder(Protocol):
    """A device's way to record work and to do it again."""

    def capture(self, work: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Record the work; its results hold nothing before the first replay. Raises RuntimeError."""

    def replay(self) -> None:
        """Do what was recorded."""


class CudaRecorder:
    """A CUDA graph. Recordings of one `pool` share their memory: what one wrote, the next may overwrite."""

    def __init__(self, stream: torch.cuda.Stream, pool: Any) -> None:
        self._graph, self._stream, self._pool = torch.cuda.CUDAGraph(), stream, pool

    def capture(self, work: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        # torch.cuda.graph does not leave its stream when recording fails: the blocks around it do. Other threads
        # may go on using the device meanwhile.
        with (
            torch.cuda.device(self._stream.device),
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(self._graph, self._pool, self._stream, capture_error_mode="thread_local"),
        ):
            return work()

    def replay(self) -> None:
        with torch.cuda.device(self._stream.device):
            self._graph.replay()


@dataclass(frozen=True, slots=True)
class _Recording:
    numbers: Tensor
    recorder: Recorder
    results: tuple[Tensor, ...]


class Graphs:
    """Runs passes, and replays those it has recorded. make: a new recorder; None = every pass runs as it is."""

    def __init__(self, make: Callable[[], Recorder] | None, most: int = _MOST) -> None:
        self._make, self._most = make, most
        self._kept: dict[Hashable, _Recording] = {}
        self._lanes: tuple[object, ...] = ()

    def run(self, key: Hashable, lanes: Tensor, numbers: Tensor, body: Body) -> tuple[Tensor, ...]:
        """The results of `body` for these numbers, the caller's own.

        key: what passes must have in common to share a recording; None: this one is not worth it. lanes: what the
        body reads beside the numbers. numbers: on the host.
        """
        if self._make is None:
            return body(moved(numbers, lanes.device))
        place = (lanes.data_ptr(), lanes.shape)
        if place != self._lanes:
            self._kept.clear()
            self._lanes = place
        kept = self._kept.pop(key, None)
        if kept is None:
            results = body(moved(numbers, lanes.device))
            if key is not None:
                self._record(key, self._make, lanes.device, numbers, body)
            return results
        self._kept[key] = kept  # the last used comes last
        kept.numbers.copy_(moved(numbers, lanes.device))
        kept.recorder.replay()
        return tuple(result.clone() for result in kept.results)

    def _record(
        self, key: Hashable, make: Callable[[], Recorder], device: torch.device, numbers: Tensor, body: Body
    ) -> None:
        """Keep a recording; where the device refuses, nothing is recorded any more."""
        if len(self._kept) >= self._most:
            del self._kept[next(iter(self._kept))]
        own, recorder = moved(numbers, device).clone(), make()
        try:
            results = recorder.capture(lambda: body(own))
        except RuntimeError as error:
            self._make = None
            self._kept.clear()
            logger.warning(
                "passes are not recorded as CUDA graphs, so each costs the host some milliseconds: %s "
                "(%s=0 does without from the start)",
                _why(error),
                OFF,
            )
        else:
            self._kept[key] = _Recording(own, recorder, results)


def graphs_for(device: torch.device) -> Callable[[], Recorder] | None:
    """How passes are recorded on that device; None where they are not."""
    if device.type != "cuda" or os.environ.get(OFF) == "0":
        return None
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch
    return lambda: CudaRecorder(stream, pool)


def _why(error: BaseException) -> str:
    """The first error: what ends a failed recording only says that it failed."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
