"""Lanes for requests that begin to run: where another one has written the same beginning, theirs is used.

Knows tokens and scopes, nothing of laws or drafts. A lane is keyed by content, so a beginning that is shared is
shared whatever became of the request that wrote it; only the same scope (`cache_salt`) may see it, since a quick
first token would tell a stranger what others have asked.
"""

from __future__ import annotations

from collections.abc import Iterable

from sooner.engine.request import Request
from sooner.model.lanes import LaneCache, common_prefix

LEAST = 16  # tokens that are worth a copy
_AWAITED = 32  # tokens that are worth waiting for


class Placement:
    """reuse: whether beginnings are shared at all."""

    def __init__(self, lanes: LaneCache, reuse: bool) -> None:
        self._lanes, self._reuse = lanes, reuse

    def waits(self, request: Request, running: Iterable[Request]) -> bool:
        """Whether a running request is just computing a beginning that this one shares: then it had better wait
        until it is there. Nobody waits for ever, since whoever is waited for runs in every pass."""
        if not self._sharing(request):
            return False
        wanted = request.tokens[:-1]
        held = self._best(request, wanted, running)[0]
        for other in running:
            if other.lane is not None and _scope(other) == _scope(request) and other.missing > 1:
                common = common_prefix(other.tokens[:-1], wanted)
                if common >= held + _AWAITED and other.held < common:
                    return True
        return False

    def place(self, request: Request, running: Iterable[Request]) -> None:
        """Give a request a lane, with as much of its beginning in it as there is."""
        length, source, live = 0, None, False
        if self._sharing(request):
            length, source, live = self._best(request, request.tokens[:-1], running)
        if source is None or length < LEAST:
            request.lane, request.held = self._lanes.open(), 0
            return
        mostly = not live and 2 * length >= self._lanes.remembered_length(source)
        request.lane = self._lanes.reopen(source, length) if mostly else self._lanes.fork(source, length)
        request.held = length
        if not request.written:
            request.tally.reused = length

    def leave(self, request: Request) -> None:
        """Give the lane back; its content is remembered."""
        if request.lane is not None:
            scope = _scope(request) if self._reuse and request.error is None else None
            self._lanes.close(request.lane, scope)
            request.lane, request.held = None, 0

    def _sharing(self, request: Request) -> bool:
        # Scores of the prompt need the laws of all its rows.
        unscored = request.params.prompt_logprobs is None
        return self._reuse and unscored and len(request.tokens) > LEAST

    def _best(
        self, request: Request, wanted: list[int], running: Iterable[Request]
    ) -> tuple[int, int | None, bool]:
        """Tokens of `wanted` that some lane holds, the lane, and whether it belongs to a running request."""
        best: tuple[int, int | None, bool] = (0, None, False)
        for other in running:
            if other.lane is not None and _scope(other) == _scope(request):
                best = max(best, (self._lanes.shared(other.lane, wanted), other.lane, True), key=lambda b: b[0])
        for lane in self._lanes.remembered(_scope(request)):
            best = max(best, (self._lanes.shared(lane, wanted), lane, False), key=lambda b: b[0])
        return best


def _scope(request: Request) -> str:
    return request.params.cache_salt or ""
