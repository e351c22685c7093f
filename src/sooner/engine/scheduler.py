"""Who runs in the next pass, and with how many rows. Knows lengths only: no tensors, no model."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sooner.config import Budget, EngineConfig
from sooner.engine.request import Request

_LOOK_AHEAD = 64  # waiting requests that are looked at behind those that wait for a beginning to share
MOST_NODES = 64  # of one draft where memory is limited, so that what a pass needs is known before it


@dataclass(frozen=True, slots=True)
class Share:
    """A request's part of the next pass: how many of its missing tokens are run.

    whole: the last of them is the root, so its law is wanted and a draft may hang off it.
    """

    request: Request
    certain: int

    @property
    def whole(self) -> bool:
        return self.certain == self.request.missing


class Gate(Protocol):
    """What admission depends on beside the number of requests."""

    def waits(self, request: Request) -> bool:
        """Whether it had better wait, and others may go before it."""

    def fits(self, request: Request) -> bool:
        """Whether there is memory for it; if not, nobody goes before it."""

    def admit(self, request: Request) -> None:
        """It is running now."""


class Scheduler:
    """By priority, then first come, first served; running requests before waiting ones, roots before chunks.

    waiting: in the order of admission.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self.waiting: list[Request] = []
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        """Behind those of its priority."""
        self.waiting.insert(bisect_right(self.waiting, request.params.priority, key=_priority), request)

    def find(self, request_id: str) -> Request | None:
        return next((r for r in [*self.running, *self.waiting] if r.id == request_id), None)

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is."""
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)

    def preempt(self, request: Request) -> None:
        """Back to the queue, before all others of its priority; it comes again with all its tokens missing."""
        self.running.remove(request)
        self.waiting.insert(bisect_left(self.waiting, request.params.priority, key=_priority), request)

    def victim(self) -> Request:
        """Whose lane is taken when memory is short: of the least urgent, who came last."""
        return max(reversed(self.running), key=_priority)

    def plan(self, gate: Gate | None = None) -> list[Share]:
        """Admit what there is room for, then share out the rows of one pass."""
        self._admit(gate)
        rows = self._config.step_rows
        shares = []
        for request in sorted(self.running, key=lambda r: (r.missing > 1, r.params.priority)):
            certain = min(request.missing, self._config.chunk_rows, rows)
            if certain:
                shares.append(Share(request, certain))
                rows -= certain
        return shares

    def trim(self, shares: Sequence[Share], budgets: Sequence[Budget], limit: int | None) -> list[Budget]:
        """Cut the wished budgets to what each request can still use and what the pass has room for.

        A pass emits one token more than it accepts, so a request with n tokens to go uses n - 1 guesses.
        limit: context length of the target; a guess at position `limit` or beyond has no place.
        """
        spare = self._config.step_rows - sum(share.certain for share in shares)
        each = spare // max(sum(share.whole for share in shares), 1)
        if self._config.kv_memory is not None:
            each = min(each, MOST_NODES)
        trimmed = []
        for share, budget in zip(shares, budgets, strict=True):
            request = share.request
            depth = budget.depth if share.whole else 0
            if request.params.max_tokens is not None:
                depth = min(depth, request.params.max_tokens - request.written - 1)
            if limit is not None:
                depth = min(depth, limit - len(request.tokens) - 1)
            trimmed.append(budget.within(depth, each))
        return trimmed

    def _admit(self, gate: Gate | None) -> None:
        for request in self.waiting[: self._config.max_requests + _LOOK_AHEAD]:
            if len(self.running) >= self._config.max_requests:
                return
            if gate is not None and gate.waits(request):
                continue
            if gate is not None and not gate.fits(request):
                return
            self.waiting.remove(request)
            self.running.append(request)
            if gate is not None:
                gate.admit(request)


def _priority(request: Request) -> int:
    return request.params.priority
