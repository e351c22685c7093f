"""Who runs in the next pass, and with how many rows. Knows lengths only: no tensors, no model."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from sooner.config import Budget, EngineConfig
from sooner.engine.request import Request


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


class Scheduler:
    """First come, first served; running requests before waiting ones, roots before prompt chunks."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def find(self, request_id: str) -> Request | None:
        return next((r for r in [*self.running, *self.waiting] if r.id == request_id), None)

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is."""
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)

    def preempt(self, request: Request) -> None:
        """Back to the head of the queue; it comes again with all its tokens missing."""
        self.running.remove(request)
        self.waiting.appendleft(request)

    def plan(self) -> list[Share]:
        """Admit what there is room for, then share out the rows of one pass."""
        while self.waiting and len(self.running) < self._config.max_requests:
            self.running.append(self.waiting.popleft())
        rows = self._config.step_rows
        shares = []
        for request in sorted(self.running, key=lambda r: r.missing > 1):
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
