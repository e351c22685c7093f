"""Chances of guesses, learnt and told in C: native/belief.c. Knows no costs. belief.py says what they are."""

from __future__ import annotations

from collections.abc import Sequence

from sooner.control.belief_plain import TERMS, down
from sooner.control.protocol import Guess, Tried
from sooner.native.belief import DRAWN, PLAIN, SCORED, BeliefsInC, Came, Guesses


class NativeBeliefs:
    """Beliefs in C."""

    def __init__(self) -> None:
        self._beliefs = BeliefsInC(TERMS)
        self._numbers: dict[str, int] = {}
        self._free: list[int] = []
        self.waiting: set[str] = set()

    def weigh(self, guesses: Sequence[tuple[str, Guess]], floor: float) -> list[tuple[float, int, int]]:
        return self._beliefs.weigh(self._told(guesses), floor)

    def survivals(self, request_id: str, guess: Guess) -> list[float]:
        return self._beliefs.survive(self._told([(request_id, guess)]), 0.0)

    def levels(self, request_ids: Sequence[str], depth: int) -> list[list[float]]:
        odds = self._beliefs.levels(depth)
        return [down(odds, self._beliefs.shift(self._number(name))) for name in request_ids]

    def learn(self, tried: Sequence[Tried]) -> list[int]:
        came = Came()
        for one in tried:
            self._add(came.guesses, one.request_id, one.guess)
            came.add(one.tokens, one.kept, one.path)
        right, waits = self._beliefs.learn(came)
        for one, waiting in zip(tried, waits, strict=True):
            if waiting:
                self.waiting.add(one.request_id)
            else:
                self.waiting.discard(one.request_id)
        return right.tolist()

    def __len__(self) -> int:
        return len(self._numbers)

    def forget(self, request_id: str) -> None:
        self.waiting.discard(request_id)
        number = self._numbers.pop(request_id, None)
        if number is not None:
            self._beliefs.forget(number)
            self._free.append(number)

    def _told(self, guesses: Sequence[tuple[str, Guess]]) -> Guesses:
        told = Guesses()
        for name, guess in guesses:
            self._add(told, name, guess)
        return told

    def _add(self, to: Guesses, request_id: str, guess: Guess) -> None:
        kind = DRAWN if guess.drawn else PLAIN if guess.scores is None else SCORED
        to.add(self._number(request_id), kind, guess.tokens, guess.parents, guess.scores or ())

    def _number(self, request_id: str) -> int:
        found = self._numbers.get(request_id)
        if found is None:
            found = self._free.pop() if self._free else len(self._numbers)
            self._numbers[request_id] = found
        return found
