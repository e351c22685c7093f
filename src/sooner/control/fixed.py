"""The same budget for every request at every step. Learns nothing."""

from __future__ import annotations

from collections.abc import Sequence

from sooner.config import Budget
from sooner.control.protocol import StepRecord, View


class FixedController:
    """Always answers with one budget."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget

    def budgets(self, views: Sequence[View]) -> list[Budget]:
        return [self._budget] * len(views)

    def observe(self, record: StepRecord) -> None:
        """A fixed budget has nothing to learn."""
