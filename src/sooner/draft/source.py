"""Where guesses of one more token come from, and what they turned out to be worth. Knows no tree.

A *source* names tokens that may follow a text and a path below its root; each guess carries a *code*, the kind
of evidence behind it (how long the match was, what share the token had, its rank). `Chances` learns online how
often guesses of each code survive, so that guesses of different sources can be compared.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol

from sooner.config import Budget
from sooner.draft.protocol import Context, Outcome

Guess = tuple[int, int]
"""A token, and the code of the evidence for it."""

REACH = 4  # tokens of text and path that a source is shown
GRADES = 10  # grades of a probability
RANKS = 4  # first, second, third, later
_LONG = 1000.0
STRENGTH = 6.0  # how many judged guesses a prior is worth
_PER_HALF = 1.5  # grades a halving of the probability takes
_FALLS = [grade * math.log(2) / _PER_HALF for grade in range(1, GRADES)]  # of -log, where a grade begins


class Source(Protocol):
    """Names tokens that may come next.

    name: how reports call it. taps, tops: what of the target it wants to observe, as in Drafter.
    priors: for each code the chance of a guess of it before anything is known.
    """

    name: str
    taps: tuple[int, ...]
    tops: int
    priors: tuple[float, ...]

    def begin(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> None:
        """Guesses for these texts are about to be asked for."""

    def after(self, request_id: str, path: tuple[int, ...], tail: tuple[int, ...]) -> Sequence[Guess]:
        """What may follow `path` below the root. tail: the last REACH tokens of text and path together."""

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Called after every pass."""

    def forget(self, request_id: str) -> None:
        """The request has ended."""


def grade(probability: float) -> int:
    """0 for a probability of about 1, one more for every fall by a factor of 1.6."""
    if probability <= 0:
        return GRADES - 1
    return min(GRADES - 1, max(0, int(-math.log2(probability) * _PER_HALF)))


def grade_of_log(log: float) -> int:
    """`grade` of a natural logarithm."""
    return bisect_right(_FALLS, -log)


def graded(probabilities: Sequence[float]) -> list[int]:
    """Codes of probabilities in descending order: grade and rank."""
    return [grade(p) * RANKS + min(rank, RANKS - 1) for rank, p in enumerate(probabilities)]


def graded_priors(trust: float, ranks: int = RANKS) -> list[float]:
    """Prior chances of the codes of `graded`: the middle of the grade, discounted by `trust`."""
    return [trust * 2 ** (-(g + 0.5) / _PER_HALF) for g in range(GRADES) for _ in range(ranks)]


class Chances:
    """How often guesses of each code survived where it was seen whether they do.

    `value[code]` is (survived + strength * prior) / (seen + strength), kept up to date; when a code was seen
    `_LONG` times its counts are halved, so that what is learned follows the text.
    """

    def __init__(self, priors: Sequence[float], strength: float = STRENGTH) -> None:
        self.value = list(priors)
        self._survived = [strength * prior for prior in priors]
        self._seen = [strength] * len(self.value)

    def learn(self, code: int, survived: bool) -> None:
        """One more guess of this code was judged."""
        seen = self._seen[code] + 1
        if survived:
            self._survived[code] += 1
        if seen > _LONG:
            seen /= 2
            self._survived[code] /= 2
        self._seen[code] = seen
        self.value[code] = self._survived[code] / seen
