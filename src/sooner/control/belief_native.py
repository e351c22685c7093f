"""Chances of guesses, learnt and told in C: native/belief.h. Knows no pass. belief.py says what they are."""

from __future__ import annotations

from collections.abc import Sequence

from sooner.control.belief_plain import TERMS, down
from sooner.control.protocol import Guess, Tried
from sooner.control.state import Nodes, Worth
from sooner.native.belief import DRAWN, PLAIN, SCORED, BeliefsInC, Prices, Told


class NativeBeliefs:
    """Beliefs in C."""

    def __init__(self) -> None:
        self._beliefs = BeliefsInC(TERMS)
        self._numbers: dict[str, int] = {}
        self._free: list[int] = []
        self.waiting: set[str] = set()

    def weigh(self, guesses: Sequence[tuple[str, Guess]], floor: float, prices: Prices) -> tuple[Nodes, Worth]:
        told, most = Told(), 0
        for name, guess in guesses:
            self._guess(told, name, guess)
            most += len(guess.tokens)
        nodes, worth = self._beliefs.weigh(told, most, floor, prices)
        return Nodes(*nodes), Worth(*worth)

    def levels(self, request_ids: Sequence[str], depth: int) -> list[list[float]]:
        odds = self._beliefs.levels(depth)
        return [down(odds, self._beliefs.shift(self._number(name))) for name in request_ids]

    def learn(self, tried: Sequence[Tried]) -> list[int]:
        told = Told()
        for one in tried:
            self._guess(told, one.request_id, one.guess)
            told.came(one.tokens, one.kept, one.path)
        learnt = self._beliefs.learn(told)
        for one, waiting in zip(tried, learnt[1::2], strict=True):
            if waiting:
                self.waiting.add(one.request_id)
            else:
                self.waiting.discard(one.request_id)
        return learnt[::2]

    def __len__(self) -> int:
        return len(self._numbers)

    def forget(self, request_id: str) -> None:
        self.waiting.discard(request_id)
        number = self._numbers.pop(request_id, None)
        if number is not None:
            self._beliefs.forget(number)
            self._free.append(number)

    def _guess(self, told: Told, request_id: str, guess: Guess) -> None:
        kind = DRAWN if guess.drawn else PLAIN if guess.scores is None else SCORED
        scores = () if guess.scores is None or guess.drawn else guess.scores
        told.guess(self._number(request_id), kind, guess.tokens, guess.parents, scores)

    def _number(self, request_id: str) -> int:
        found = self._numbers.get(request_id)
        if found is None:
            found = self._free.pop() if self._free else len(self._numbers)
            self._numbers[request_id] = found
        return found
