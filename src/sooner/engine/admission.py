"""Which waiting request may begin, where its lane comes from, and who makes room when memory is short.

Knows lengths, lanes and scopes; nothing of laws, drafts or texts.
"""

from __future__ import annotations

from collections.abc import Callable

from sooner.engine.memory import Memory
from sooner.engine.prefix import Placement
from sooner.engine.request import Request
from sooner.engine.scheduler import Scheduler


class Admission:
    """The gate of the scheduler. reuse: whether beginnings are shared. forget: drops what the drafter keeps for a
    request."""

    def __init__(
        self, scheduler: Scheduler, memory: Memory, *, reuse: bool, forget: Callable[[str], None]
    ) -> None:
        self._scheduler, self._memory, self._forget = scheduler, memory, forget
        self._placement = Placement(memory.target, reuse)

    def waits(self, request: Request) -> bool:
        return self._placement.waits(request, self._scheduler.running)

    def fits(self, request: Request) -> bool:
        return self._memory.fits([len(r.tokens) for r in (*self._scheduler.running, request)])

    def admit(self, request: Request) -> None:
        self._placement.place(request, self._scheduler.running)

    def leave(self, request: Request) -> None:
        """Give up the lane of a request."""
        self._placement.leave(request)

    def make_room(self, preempt: Callable[[Request], None]) -> None:
        """Before a pass: preempt until what runs can grow within the limit, and bring lanes together."""
        running = self._scheduler.running
        if not self._memory.limited or not running:
            return
        while len(running) > 1 and not self._memory.fits([len(r.tokens) for r in running]):
            preempt(self._scheduler.victim())
        columns = max(len(r.tokens) for r in running)
        lanes = self._memory.target
        if self._memory.scattered(lanes, columns) and lanes.in_use == len(running):
            moved = lanes.gather()
            for request in running:
                request.lane = moved.get(request.lane or 0, request.lane)
        for cache in self._memory.drafting:
            if self._memory.scattered(cache, columns):
                for request in running:
                    self._forget(request.id)
