"""A toy grammar: what may follow is a hash of the tokens so far. Knows no text and no grammar library."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import torch
from torch import Tensor

from sooner.core.tree import Draft
from sooner.engine.judge import paths


class Automaton:
    """Keeps the Constraint protocol. Some states allow many ids, some only one, some end the text.

    Being advanced by an id that its state does not allow is an error, as it is for a real matcher.
    """

    def __init__(self, vocab: int, salt: int) -> None:
        self._vocab, self._salt = vocab, salt
        self._text: tuple[int, ...] = ()

    @property
    def ended(self) -> bool:
        return self._dice(self._text).random() < 0.1 and len(self._text) > 0

    def allowed(self, text: Sequence[int]) -> set[int]:
        """The ids that may come after `text`."""
        dice = self._dice(text)
        dice.random()
        count = dice.choice([1, 1, max(self._vocab // 2, 1), self._vocab])
        return set(dice.sample(range(self._vocab), count))

    def masks(self, draft: Draft) -> Tensor:
        rows = torch.zeros((1 + len(draft), self._vocab), dtype=torch.bool)
        for row, path in zip(rows, paths(draft), strict=True):
            ids = self.allowed((*self._text, *path)) if self._valid(path) else range(self._vocab)
            row[list(ids)] = True
        return rows

    def advance(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if token not in self.allowed(self._text):
                raise AssertionError(f"{token} is not allowed after {self._text}")
            self._text += (token,)

    def forced(self, limit: int) -> tuple[int, ...]:
        spelled: tuple[int, ...] = ()
        while len(spelled) < limit:
            ids = self.allowed(self._text + spelled)
            if len(ids) > 1:
                break
            spelled += tuple(ids)
        return spelled

    def _valid(self, path: Sequence[int]) -> bool:
        return all(path[i] in self.allowed((*self._text, *path[:i])) for i in range(len(path)))

    def _dice(self, text: Sequence[int]) -> Random:
        return Random(hash((self._salt, *text[-3:], len(text))))
