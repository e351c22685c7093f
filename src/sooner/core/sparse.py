"""Laws of truncated rows as plain numbers, while point-mass guesses are judged. Knows no rule.

A rule looks at the masses of guesses and strikes guesses out: a few numbers a row, faster in plain Python than in
operations on tensors. The candidates themselves are touched when one is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sooner.core import noise
from sooner.core.law import Law
from sooner.core.tree import ROOT, Draft
from sooner.native import law as native

_NOTHING = 1e-12  # what float64 may leave of a sum when all of it has been taken away


class Sparse:
    """Weights scale * mass of the ids that are not `struck`, of one row of `ids` and `mass` [n, K], float; they
    need not sum to 1. Never changed after it is made.

    total: their sum before anything is struck, in float64. guessed: masses of the tokens guessed here.
    """

    __slots__ = ("_ids", "_mass", "_row", "_scale", "_struck", "guessed", "total")

    def __init__(
        self, ids: Tensor, mass: Tensor, row: int, total: float, guessed: Mapping[int, float],
        scale: float = 1.0, struck: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        self._ids, self._mass, self._row, self.total, self.guessed = ids, mass, row, total, guessed
        self._scale, self._struck = scale, struck

    def __getitem__(self, token: int) -> float:
        return 0.0 if token in self._struck else self._scale * self.guessed[token]

    def __mul__(self, factor: float) -> Sparse:
        return self._like(self._scale * factor, self._struck)

    def __truediv__(self, divisor: float) -> Sparse:
        return self._like(self._scale / divisor, self._struck)

    def sum(self) -> float:
        left = self.total
        for token in self._struck:
            left -= self.guessed[token]
        return self._scale * left if left > _NOTHING * self.total else 0.0

    def without(self, token: int) -> Sparse:
        return self._like(self._scale, (*self._struck, token))

    def _like(self, scale: float, struck: tuple[int, ...]) -> Sparse:
        return Sparse(self._ids, self._mass, self._row, self.total, self.guessed, scale, struck)

    def draw(self, key: int) -> int:
        """One id, with the noise of `key`; of all of the row where rounding left nothing."""
        if not self._struck:
            return noise.race_row(self._mass, self._row, key, self._ids)
        ids, mass = self._ids[self._row], self._mass[self._row]
        left = mass.masked_fill(torch.isin(ids, torch.tensor(self._struck, device=ids.device)), 0.0)
        return noise.race_row((left if bool(left.any()) else mass)[None], 0, key, ids[None])


def sparse(law: Law, rows: Sequence[int], draft: Draft) -> list[Sparse] | None:
    """The laws after the root and after each node, of the given rows; None where one of them is not truncated."""
    if any(law.place[r][0] != "few" for r in rows):
        return None
    at = [law.place[r][1] for r in rows]
    above = [0 if parent == ROOT else parent + 1 for parent in draft.parents]
    if native.races(law.mass, law.ids):
        totals, own = native.look_up(law.ids, law.mass, at, [at[r] for r in above], draft.tokens)
    else:
        ids, mass = law.ids[at], law.mass[at]
        tokens = torch.tensor(draft.tokens, dtype=torch.int64, device=ids.device)
        totals = mass.sum(-1, dtype=torch.float64).tolist()
        own = torch.where(ids[above] == tokens[:, None], mass[above], 0.0).sum(-1, dtype=torch.float64).tolist()
    guessed: list[dict[int, float]] = [{} for _ in rows]
    for parent, token, value in zip(above, draft.tokens, own, strict=True):
        guessed[parent][token] = value
    return [Sparse(law.ids, law.mass, at[r], totals[r], guessed[r]) for r in range(len(rows))]
