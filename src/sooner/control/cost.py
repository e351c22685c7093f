"""What a call of a drafter costs in seconds, learnt from those that ran. Knows no policy and no drafter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import mul
from typing import NamedTuple

import numpy as np

from sooner.control.filter import TIMER, Filter, Prior, begin
from sooner.control.passes import PassCost
from sooner.control.saved import STALE, floats
from sooner.errors import ConfigError


class Asked(NamedTuple):
    """What a drafter is asked for at once: drafts for so many requests, the deepest of such a depth."""

    requests: int
    depth: float


_THOUGHTS = 2.0  # thinking of a draft before the pass, which is measured, and once more after it
_PARTS = (0.1, 0.1, 0.4, 0.4)  # of a first draft's time: for the call, each request, each level, each of both
_NOISE = 0.08  # what a single time is expected to be off by, as a share of it
_PACE_DRIFT = 0.02  # of all parts together, a call
_SHAPE_DRIFT = 0.002  # of each part, as a share of what was thought possible at first
_ALL = range(1 + len(_PARTS))
_JUMPS = (0.5, *[0.5] * len(_PARTS))  # by what shares it may have changed when it is another one


class DraftCost:
    """Seconds of one call of a drafter. Unknown is taken for free, so that a drafter is tried."""

    def __init__(self) -> None:
        self._filter: Filter | None = None  # the log of the pace, and the parts
        self._room: list[float] = []
        self.seen = 0

    def seconds(self, asked: Asked) -> float:
        if not asked.requests or self._filter is None:
            return 0.0
        return math.exp(self._filter.mean[0]) * self._line(self._filter.mean, _features(asked))

    def observe(self, asked: Asked, seconds: float) -> None:
        if not asked.requests or not math.isfinite(seconds) or seconds < 0:
            return
        features = _features(asked)
        if self._filter is None:  # a first guess: most of it is for the levels
            room = [max(seconds, TIMER) / max(x, 1.0) for x in features]
            self._filter = self._begin([part * one for part, one in zip(_PARTS, room, strict=True)], room, room)
        mean = self._filter.mean
        line = max(self._line(mean, features), TIMER)
        expected = math.exp(mean[0]) * line
        weights = [1.0, *(x / line for x in features)]
        self._filter.learn(_ALL, weights, seconds / expected - 1, (_NOISE + TIMER / expected) ** 2)
        self.seen += 1

    def saved(self) -> dict[str, object] | None:
        if self._filter is None:
            return None
        pace, *parts = self._filter.mean
        return {"parts": [math.exp(pace) * part for part in parts], "room": self._room}

    def restore(self, saved: object) -> None:
        """Take over what `saved` wrote, for about right. Raises ConfigError if it is not that."""
        if not isinstance(saved, Mapping):
            raise ConfigError("a saved cost must be an object.")
        parts, room = floats(saved.get("parts"), len(_PARTS)), floats(saved.get("room"), len(_PARTS))
        if min(parts) < 0 or min(room) <= 0:
            raise ConfigError("the saved cost of drafts holds what no measurement gives.")
        self._filter = self._begin(parts, [STALE * part for part in parts], room)
        self.seen = 1

    def _begin(self, parts: Sequence[float], doubt: Sequence[float], room: Sequence[float]) -> Filter:
        """doubt: deviations of the parts; room: what was thought possible at first."""
        self._room = list(room)
        drift = [_PACE_DRIFT**2, *((_SHAPE_DRIFT * one) ** 2 for one in room)]
        cov = np.diag([0.0, *doubt]) ** 2
        return begin(Prior((0.0, *parts), cov, drift, len(_PARTS), _JUMPS))

    @staticmethod
    def _line(mean: Sequence[float], features: Sequence[float]) -> float:
        return float(sum(map(mul, mean[1:], features)))


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
