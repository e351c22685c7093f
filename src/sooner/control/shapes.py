"""How deep drafts turn out when so much is asked for, and how deep it is safe to ask. Knows no costs.

What a drafter takes for a deep draft is not known at first, and may be a lot: so the first are short, and each
time they were cheap they may be twice as deep.
"""

from __future__ import annotations

from collections.abc import Collection

from sooner.control.protocol import Guess

_FIRST = 2  # depth of the first drafts
_TRIES = 3  # calls before a depth counts as tried
_PACE, _LEAST = 0.1, 0.04  # how fast what is usual follows


class Shapes:
    """limit: the deepest that may ever be asked for."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.safe = min(_FIRST, limit)  # depth that may be asked for without a thought
        self.usual = 0.0  # depth that is reached then, on average
        self._tries = 0
        self._nodes: dict[int, float] = {}  # nodes kept at a depth that was asked for, fading mean
        self._reach: dict[int, float] = {}  # how often that depth was reached
        self._seen: dict[int, int] = {}

    def tried(self, asked: int, reached: int, cheap: bool) -> None:
        """A call asked for `asked` levels and brought `reached`; was it cheap for what a pass costs?"""
        if asked < self.safe:
            return
        self._tries += 1
        self.usual += max(1 / self._tries, _PACE) * (reached - self.usual)
        if cheap and self._tries >= _TRIES and self.safe < self._limit:
            self.safe, self._tries = min(2 * self.safe, self._limit), 0

    def add(self, guess: Guess, kept: Collection[int], asked: int) -> None:
        """Of a draft that was asked for so many levels, these nodes were worth their rows. None at all says more
        of the price than of the drafter, so it counts for nothing unless there was no draft."""
        if len(guess) and not kept:
            return
        found: dict[int, int] = {}
        depths = levels(guess)
        for node in kept:
            found[depths[node]] = found.get(depths[node], 0) + 1
        for depth in range(1, asked + 1):
            seen_before = self._seen[depth] = self._seen.get(depth, 0) + 1
            weight = max(_LEAST, 1 / (1 + seen_before))
            for table, seen in ((self._nodes, found.get(depth, 0)), (self._reach, float(depth in found))):
                table[depth] = table.get(depth, 1.0) * (1 - weight) + weight * seen

    def fill(self, depth: int) -> list[float]:
        """How often an answer reaches depth 1, 2, ...; a depth not seen is reached as often as the one above."""
        found, above = [], 1.0
        for d in range(1, depth + 1):
            above = min(self._reach.get(d, above), above)
            found.append(above)
        return found

    def nodes(self, depth: int) -> list[float]:
        """Nodes of an answer that are worth their rows, level by level."""
        return [self._nodes.get(d, reached) for d, reached in enumerate(self.fill(depth), 1)]


def levels(guess: Guess) -> list[int]:
    """The depth of every node."""
    depths: list[int] = []
    for parent in guess.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths
