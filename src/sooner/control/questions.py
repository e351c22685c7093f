"""When to ask those who seem not worth asking, so that "off" is never for ever. Knows no request and no belief.

A small share of the time is saved up for it. Waking up to ask anybody costs more than asking one more, so many are
asked at once; a question that takes as long as many passes is as rare.
"""

from __future__ import annotations

from sooner.control.cost import Costs

# Shares of the time: half a percent where that pays for a question within SOON passes, else a percent.
_SHARE, _MORE, _SOON = 0.005, 0.01, 20
_SAVE = 12  # passes whose share is saved up to ask more than one
_REWARD = 0.5  # of a question's cost comes back for each token it knew


class Questions:
    """costs: what asking takes."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        # Seconds to spend, and to be earned by right answers; what the last question took for each.
        self._credit = self._bonus = self._each = 0.0
        self._rate = self._most = 0.0  # what is saved up in a pass, and may be at most
        self._one = 0.0  # what asking one takes if nobody else is asked

    def earn(self, plain: float, passes: int, usual: float) -> float:
        """So many passes went by, of `plain` seconds without guesses; answers are `usual` levels deep. Returns the
        seconds that asking one takes."""
        self._one = self._costs.asking(1, usual)
        self._rate = (_SHARE if self._one <= _SOON * _SHARE * plain else _MORE) * plain
        self._most = max(_SAVE * self._rate, self._one)
        self._credit = min(self._credit + passes * self._rate, self._most)
        self._bonus = min(self._bonus + passes * self._rate, plain)
        return self._one

    def ask(self, waiting: int, among: int, usual: float) -> int:
        """How many of those waiting to ask now, together with `among` others who are asked anyhow."""
        if not waiting or not (among or self._credit >= self._one):
            return 0
        before = self._costs.asking(among, usual) if among else 0.0
        first = self._costs.asking(among + 1, usual) - before if among else self._one
        more = self._costs.asking(among + 2, usual) - before - first
        room = max(self._most - first, 0.0)
        count = 1 + min(waiting - 1, int(room / more) if more > 0 else waiting)
        needed = first + (count - 1) * more
        if self._credit < needed:
            return 0
        self._credit, self._each = self._credit - needed, needed / count
        return count

    def wait(self) -> int:
        """Passes until somebody can be asked."""
        return int((self._one - self._credit) / self._rate)

    def skip(self, passes: int) -> None:
        """So many passes will go by unasked."""
        self._credit += passes * self._rate

    def reward(self, right: int) -> None:
        """An answer knew so many tokens: that earns the next question, so that a change is followed up at once."""
        earned = min(_REWARD * right * self._each, self._bonus)
        self._credit, self._bonus = self._credit + earned, self._bonus - earned
