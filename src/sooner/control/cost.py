"""What a call of a drafter costs in seconds, learnt from those that ran. Knows no policy and no drafter."""

from __future__ import annotations

import math
from typing import NamedTuple

from sooner.control.fit import TIMER, Fit
from sooner.control.passes import PassCost


class Asked(NamedTuple):
    """What a drafter is asked for at once: drafts for so many requests, the deepest of such a depth."""

    requests: int
    depth: float


_THOUGHTS = 2.0  # thinking of a draft before the pass, which is measured, and once more after it
_PARTS = (0.1, 0.1, 0.4, 0.4)  # of a first draft's time: for the call, each request, each level, each of both


class DraftCost:
    """Seconds of one call of a drafter. Unknown is taken for free, so that a drafter is tried."""

    def __init__(self) -> None:
        self._fit: Fit | None = None

    @property
    def seen(self) -> int:
        return 0 if self._fit is None else self._fit.seen

    def seconds(self, asked: Asked) -> float:
        return self._fit.predict(self._features(asked)) if asked.requests and self._fit is not None else 0.0

    def observe(self, asked: Asked, seconds: float) -> None:
        if not asked.requests or not math.isfinite(seconds) or seconds < 0:
            return
        features = self._features(asked)
        if self._fit is None:  # a first guess: most of it is for the levels
            whole = [max(seconds, TIMER) / max(x, 1.0) for x in features]
            self._fit = Fit([part * one for part, one in zip(_PARTS, whole, strict=True)], whole)
        self._fit.observe(features, seconds)

    def saved(self) -> dict[str, object] | None:
        return None if self._fit is None else self._fit.saved()

    def restore(self, saved: object) -> None:
        """Raises ConfigError if it is not what `saved` wrote."""
        self._fit = Fit.restored(saved, 4)

    @staticmethod
    def _features(asked: Asked) -> list[float]:
        return [1.0, float(asked.requests), asked.depth, asked.requests * asked.depth]


class Costs:
    """What is known of the machine; shared by controllers over one model if they like.

    thinking: what a controller takes to ask requests for drafts and to weigh the answers, twice a step; depth 0.
    """

    def __init__(self) -> None:
        self.passes, self.drafts, self.thinking = PassCost(), DraftCost(), DraftCost()

    def asking(self, requests: int, depth: float) -> float:
        """Seconds for drafts of so many requests and all that they make to think about."""
        return self.drafts.seconds(Asked(requests, depth)) + _THOUGHTS * self.thinking.seconds(
            Asked(requests, 0.0)
        )
