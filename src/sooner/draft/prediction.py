"""Guesses from a text the caller expects to get back. Knows no model.

An edited file or a filled template is mostly a copy: the draft is what follows the place in the expected text
that the text has reached. Where the two part, the places that fit the last tokens are looked for, the longest
match first, near by before far off; until there is one the draft bets on a replaced and on an inserted token.
"""

from __future__ import annotations

from collections.abc import Sequence

from sooner.config import Budget
from sooner.core.tree import EMPTY, Draft, Trie
from sooner.draft.protocol import Context, Outcome

_LONGEST = 12  # tokens compared to tell places apart
_SURE = 3  # tokens that match: better than a single one where it was expected
_PLACES = 8  # places a draft is made of, at most


class Alignment:
    """Where in `expected` a growing text is.

    >>> alignment = Alignment([1, 2, 3, 4, 5])
    >>> alignment.places()
    [0]
    >>> alignment.learn([1, 9])
    >>> alignment.places()  # 9 replaced 2, or was put before it
    [2, 1]
    >>> alignment.learn([3])
    >>> alignment.places()
    [3]
    """

    def __init__(self, expected: Sequence[int]) -> None:
        self._expected = tuple(expected)
        self._where: dict[int, list[int]] = {}
        for place, token in enumerate(self._expected):
            self._where.setdefault(token, []).append(place)
        self._next, self._lost = 0, 0  # the place reached, and tokens written since the texts parted there
        self._tail: list[int] = []  # the last tokens of the text
        self._fits: list[int] = []  # places that would follow the last token, while lost

    def learn(self, tokens: Sequence[int]) -> None:
        """The text goes on with `tokens`."""
        for token in tokens:
            self._tail = [*self._tail[-_LONGEST + 1 :], token]
            if not self._lost and self._next < len(self._expected) and self._expected[self._next] == token:
                self._next += 1
            else:
                self._look(token)

    def places(self) -> list[int]:
        """Places the text may go on at, likeliest first, none twice."""
        found = [*self._fits, self._next + self._lost, self._next] if self._lost else [self._next]
        return [place for place in dict.fromkeys(found) if place < len(self._expected)][:_PLACES]

    def expected(self, place: int, count: int) -> tuple[int, ...]:
        """The `count` tokens expected from a place on."""
        return self._expected[place : place + count]

    def _look(self, token: int) -> None:
        """Find the place again after a token that was not expected."""
        self._lost += 1
        replaced = self._next + self._lost - 1  # where the token is if each one stands for another
        near = [place for place in (replaced, self._next) if self.expected(place, 1) == (token,)]
        ranked = sorted((-self._matching(at), abs(at - replaced), at) for at in self._where.get(token, ()))
        self._fits = [at + 1 for _, _, at in ranked]
        length = -ranked[0][0] if ranked else 0
        if length >= _SURE or (length > 1 and not near):
            self._next, self._lost = ranked[0][2] + 1, 0
        elif near:  # a single token fits in many places; where it was expected it is enough
            self._next, self._lost = near[0] + 1, 0

    def _matching(self, at: int) -> int:
        """How many of the last tokens match those up to and including the place `at`."""
        count = 0
        while count < len(self._tail) and count <= at and self._expected[at - count] == self._tail[-1 - count]:
            count += 1
        return count


class PredictionDrafter:
    """What `Context.prediction` says comes next; nothing for requests without one."""

    name = "prediction"
    taps: tuple[int, ...] = ()

    def __init__(self) -> None:
        self._known: dict[str, tuple[Alignment, int]] = {}  # how far each text is aligned, and its length

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        return [self._one(context, budget) for context, budget in zip(contexts, budgets, strict=True)]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """The text of the next context says it all."""

    def forget(self, request_id: str) -> None:
        self._known.pop(request_id, None)

    def _one(self, context: Context, budget: Budget) -> Draft:
        if budget.empty or not context.prediction:
            return EMPTY
        alignment, length = self._known.get(context.request_id, (None, 0))
        if alignment is None or length > len(context.tokens):
            alignment, length = Alignment(context.prediction), context.prompt
        alignment.learn(context.tokens[length:])
        self._known[context.request_id] = (alignment, len(context.tokens))
        trie = Trie(budget.nodes, budget.width)
        for place in alignment.places()[: budget.width]:
            trie.add(alignment.expected(place, budget.depth))
        return trie.draft()
