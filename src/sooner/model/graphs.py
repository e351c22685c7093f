"""Passes recorded once on a GPU and replayed, so that a pass costs the host one launch. Knows no model.

What is recorded reads its numbers from a buffer that is always the same, and the lanes where they lay; when these
have moved, all recordings are dropped. A layout is recorded when it comes the second time: many come but once.
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
_MOST = 64  # recordings kept, those used last; rows, lanes and columns come in few tiles
_SEEN = 1024  # layouts remembered as seen once

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

    def __init__(self, pool: Any) -> None:
        self._graph, self._pool = torch.cuda.CUDAGraph(), pool

    def capture(self, work: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        # torch.cuda.graph does not leave its stream when recording fails: the outer block does. Other threads
        # may go on using the device meanwhile.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            return work()

    def replay(self) -> None:
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
        self._seen: set[Hashable] = set()
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
        if kept is None and (key is None or not self._again(key)):
            return body(moved(numbers, lanes.device))
        if kept is None:
            kept = self._record(self._make, lanes.device, numbers, body)
        if kept is None:
            return body(moved(numbers, lanes.device))
        self._kept[key] = kept  # the last used comes last
        if len(self._kept) > self._most:
            del self._kept[next(iter(self._kept))]
        kept.numbers.copy_(moved(numbers, lanes.device))
        kept.recorder.replay()
        return tuple(result.clone() for result in kept.results)

    def _again(self, key: Hashable) -> bool:
        """Whether a key has been seen before; now it has."""
        if key in self._seen:
            return True
        if len(self._seen) >= _SEEN:
            self._seen.clear()
        self._seen.add(key)
        return False

    def _record(
        self, make: Callable[[], Recorder], device: torch.device, numbers: Tensor, body: Body
    ) -> _Recording | None:
        """A recording, or None where the device refused: then nothing is recorded any more."""
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
            return None
        return _Recording(own, recorder, results)


def graphs_for(device: torch.device) -> Callable[[], Recorder] | None:
    """How passes are recorded on that device; None where they are not."""
    if device.type != "cuda" or os.environ.get(OFF) == "0":
        return None
    pool = torch.cuda.graph_pool_handle()
    return lambda: CudaRecorder(pool)


def _why(error: BaseException) -> str:
    """The first error: what ends a failed recording only says that it failed."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
