"""What the adaptive controller keeps of a request, of a pass, and of what is to be learnt. Knows no policy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import mul
from typing import NamedTuple

from sooner.control.passes import Load
from sooner.control.protocol import StepRecord
from sooner.params import Speculation

FIRST_NODES = 4
SLOW, FAST = 0.12, 0.25  # how fast the worth of a request's answers falls and rises, once there have been some
USUAL = 0.02  # and that of all
MANY = 100  # answers from which it no longer matters how many they were
_RIGHT, _NEWS = 0.05, (0.5, 4.0)  # how fast what is usually right follows; from what on something right is news
FAR = 3.0  # deviations by which guesses may fall short of what was expected and it is still luck


@dataclass(slots=True)
class State:
    """What is kept for one request. turn: when it was asked last, or came; plain_s, taken_s: the controller's sums
    when it came; more_s: what its accepted guesses would have taken without. worth: tokens an answer brought, what
    its rows cost taken off; answers: how many that was learnt from, what was expected among them; right: tokens a
    step that guesses knew which were not verified; wanted: nodes of an answer that were kept lately, at most."""

    asked: Speculation
    turn: int
    plain_s: float
    taken_s: float
    more_s: float = 0.0
    worth: float | None = None
    answers: int = 0
    right: float = 0.0
    wanted: float = float(FIRST_NODES)
    ever: bool = False
    offered: int = 0
    kept: int = 0

    def why_off(self, turn: int) -> str:
        """Why nothing was guessed for it, for people; empty if something was."""
        if self.kept:
            return ""
        if not self.ever:
            return "drafting does not pay at this load" if turn > self.turn else "the text ended first"
        return "the guesses were not worth their rows" if self.offered else "the drafter had no guess"


@dataclass(slots=True)
class Worths:
    """What answers are worth: of each request, and usually, which is what a new one is expected to be. right: the
    same of what guesses knew."""

    usual: float | None = None
    right: float = 0.0

    def begin(self, state: State) -> State:
        """A new one, expected to be as usual."""
        state.worth, state.right = self.usual, self.right
        state.answers = MANY if self.usual is None else 1
        return state

    def is_news(self, state: State, right: int) -> bool:
        """Guesses that were not verified knew so many tokens: is that more than usual, so that they may have
        become worth it? From those that are right as often as ever and do not pay nothing new is learnt."""
        found = right > _NEWS[0] + _NEWS[1] * state.right
        state.right += _RIGHT * (right - state.right)
        self.right += USUAL * (right - self.right)
        return found

    def add(self, state: State, new: float) -> None:
        """An answer was worth so much. What was expected of a new request counts for one answer: it was found with
        other texts, perhaps at another load. A very first answer counts for many: no price is known yet."""
        old = new if state.worth is None else state.worth
        state.answers += 1
        state.worth = old + max(FAST if new > old else SLOW, 1 / state.answers) * (new - old)
        usual = new if self.usual is None else self.usual
        self.usual = usual + USUAL * (new - usual)


@dataclass(slots=True)
class Now:
    """The pass in preparation. load: without guesses, plain_s its time; ready: requests that emit; decode(_s):
    the same for them alone; rate: tokens a second of that; price: what a second is worth, in tokens."""

    load: Load
    ready: int
    plain_s: float
    decode: Load
    decode_s: float
    rate: float
    price: float
    asked: dict[str, int] = field(default_factory=dict)
    steady: bool = True
    depth: int = 0


class Nodes(NamedTuple):
    """Nodes of guesses, the best first. values: minus the chance that the whole path down to each is accepted;
    places: whose guess it is of, among those that were weighed; nodes: which it is."""

    values: Sequence[float]
    places: Sequence[int]
    nodes: Sequence[int]

    def first(self, count: int) -> Nodes:
        """The best ones."""
        return Nodes(self.values[:count], self.places[:count], self.nodes[:count])


class Worth(NamedTuple):
    """nodes: how many are worth their rows, the best ones first; price: of a second; seconds: of their rows; few,
    far: how few and how many nodes are nearly as good a choice."""

    nodes: int
    price: float
    seconds: float
    few: int
    far: int


class Weighed(NamedTuple):
    """The nodes that were kept, of the guesses of these requests; toll: what each takes, in tokens."""

    requests: Sequence[str]
    taken: Nodes
    toll: float

    def disappointed(self, accepted: int) -> bool:
        """Whether so many accepted guesses are far fewer than the chances said."""
        values = self.taken.values
        expected = -sum(values)
        return expected - accepted > 1 + FAR * math.sqrt(expected - sum(map(mul, values, values)))


class Lesson(NamedTuple):
    """A pass that ended, and what it was expected to be."""

    record: StepRecord
    now: Now
    turn: int
    weighed: Weighed | None
