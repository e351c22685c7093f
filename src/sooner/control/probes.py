"""When to verify other guesses than seem best, so that what is known does not go stale. Knows no request."""

from __future__ import annotations

from sooner.control.passes import PassCost
from sooner.control.state import Worth

_DRAFT_EVERY = 40  # passes without a guess before a few are verified to see what rows cost
_DRAWN_EVERY = 12  # the same where the text cannot say whether a guess would have been accepted
_PLAIN_EVERY = 50  # passes with guesses before one goes without; four times as many when the gain is clear
_PLAIN_FIRST = 4  # of those without, before it is known what they cost; every tenth until then
_CLEAR = 1.2
_OTHER_EVERY = 8  # passes with guesses before more or fewer are verified than seem best, if that is nearly as good
_OTHER = 1.5  # times as many rows, or as few: others tell nothing new


class Probes:
    """passes: what they cost."""

    def __init__(self, passes: PassCost) -> None:
        self._passes = passes
        # Passes since one with guesses, one without, one with more or fewer than seemed best.
        self._draft = self._plain = self._other = 0
        self._more = False  # whether the last of these had more

    def count(self, worth: Worth, offered: int, rows: int, gain: float, drawn: bool) -> int:
        """How many of the nodes that were offered are verified, the best first. rows: of the pass
        without them; gain: the speed-up over plain decoding; drawn: whether any were drawn at random."""
        if not offered:
            return 0
        if not worth.nodes:
            self._draft += 1
            if self._draft < (_DRAWN_EVERY if drawn else _DRAFT_EVERY):
                return 0
            self._draft = 0
            return min(3, offered)
        self._plain += 1
        self._other += 1
        known = self._passes.plain >= _PLAIN_FIRST
        if self._plain >= (10 if not known else _PLAIN_EVERY * (1 if gain < _CLEAR else 4)):
            self._plain = 0
            return 0
        if self._other < _OTHER_EVERY:
            return worth.nodes
        more = worth.far + rows >= _OTHER * (worth.nodes + rows)
        fewer = worth.nodes + rows >= _OTHER * (worth.few + rows)
        if not more and not fewer:
            return worth.nodes
        self._more = more and not (fewer and self._more)
        self._other = 0
        return worth.far if self._more else worth.few

    def saw(self, guesses: bool) -> None:
        """A pass went by, with or without guesses."""
        if guesses:
            self._draft = 0
        else:
            self._plain = 0
