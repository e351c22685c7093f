"""The drafter that never guesses: plain decoding. Knows nothing."""

from __future__ import annotations

from collections.abc import Sequence

from sooner.config import Budget
from sooner.core.tree import EMPTY, Draft
from sooner.draft.protocol import Context, Outcome


class NoDrafter:
    """Answers every context with the empty draft."""

    name = "none"
    taps: tuple[int, ...] = ()

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        return [EMPTY] * len(contexts)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Nothing to learn."""

    def forget(self, request_id: str) -> None:
        """Nothing kept."""
