"""The same budget for every request at every step. Learns nothing."""

from __future__ import annotations

from collections.abc import Sequence

from sooner.config import Budget
from sooner.control.protocol import Guess, Note, StepRecord, View
from sooner.params import Speculation

NOTHING = Budget(0, 0, 0)


class FixedController:
    """Always answers with one budget, unless a request asks for its own."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._asked: dict[str, Speculation] = {}

    def budgets(self, views: Sequence[View]) -> list[Budget]:
        self._asked.update((view.request_id, view.speculation) for view in views)
        return [self._budget if view.speculation == "auto" else wished(view, self._budget) for view in views]

    def keep(self, views: Sequence[View], guesses: Sequence[Guess]) -> list[tuple[int, ...] | None]:
        return [None] * len(guesses)

    def observe(self, record: StepRecord) -> None:
        """A fixed budget has nothing to learn."""

    def leave(self, request_id: str) -> Note:
        asked = self._asked.pop(request_id, "auto")
        if asked != "auto":
            return wished_note(asked)
        return Note(f"k={self._budget.depth}", "" if not self._budget.empty else "k is 0")


def wished(view: View, limit: Budget) -> Budget:
    """The budget of a request that chose for itself: nothing, or a depth as wide as the limit allows."""
    if isinstance(view.speculation, str):
        return NOTHING
    width = max(limit.width, 1)
    return Budget(view.speculation, width, view.speculation * width)


def wished_note(asked: Speculation) -> Note:
    """The note of a request that chose for itself."""
    return Note("off", "the request asked for none") if asked == "off" else Note(f"k={asked}")
