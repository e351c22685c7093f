"""What the engine asks of a controller. Knows no policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sooner.config import Budget


@dataclass(frozen=True, slots=True)
class View:
    """What a controller may know of a request that could draft in this step."""

    request_id: str
    prompt: int
    written: int


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one pass cost and brought, over all its requests.

    rows: rows of the pass. draft_s, pass_s: seconds spent drafting and in the target. judge_s: in laws and
    verification. write_s: in appending tokens, stop rules and text. settle_s: in the cache. step_s: in all.
    drafted, accepted, emitted: tokens; emitted counts corrections and bonus tokens too.
    """

    rows: int
    requests: int
    draft_s: float
    pass_s: float
    judge_s: float
    write_s: float
    settle_s: float
    step_s: float
    drafted: int
    accepted: int
    emitted: int


class Controller(Protocol):
    """Chooses the budgets. It must never make the text depend on load: it decides speed alone."""

    def budgets(self, views: Sequence[View]) -> list[Budget]:
        """One budget for each request."""

    def observe(self, record: StepRecord) -> None:
        """Called after every pass."""
