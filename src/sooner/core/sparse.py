"""Laws as plain numbers, while point-mass guesses are judged. Knows no rule.

A rule looks at the masses of guesses and strikes guesses out: a few numbers a row, faster in plain Python than in
operations on tensors. The laws themselves are touched when a token is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from sooner.core.law import Few, Flat, Law
from sooner.core.tree import ROOT, Draft
from sooner.native import law as native

_NOTHING = 1e-12  # what float64 may leave of a sum when all of it has been taken away


class Sparse:
    """Weights scale * mass of the ids of one row that are not `struck`; they need not sum to 1. Never changed
    after it is made.

    total: their sum before anything is struck, in float64. guessed: masses of the tokens guessed here.
    """

    __slots__ = ("_guessed", "_row", "_scale", "_struck", "_total")

    def __init__(
        self,
        row: Few | Flat,
        total: float,
        guessed: Mapping[int, float],
        scale: float = 1.0,
        struck: tuple[int, ...] = (),
    ) -> None:
        self._row, self._total, self._guessed, self._scale, self._struck = row, total, guessed, scale, struck

    def __getitem__(self, token: int) -> float:
        return 0.0 if token in self._struck else self._scale * self._guessed[token]

    def __mul__(self, factor: float) -> Sparse:
        return Sparse(self._row, self._total, self._guessed, self._scale * factor, self._struck)

    def __truediv__(self, divisor: float) -> Sparse:
        return Sparse(self._row, self._total, self._guessed, self._scale / divisor, self._struck)

    def sum(self) -> float:
        left = self._total
        for token in self._struck:
            left -= self._guessed[token]
        return self._scale * left if left > _NOTHING * self._total else 0.0

    def without(self, token: int) -> Sparse:
        return Sparse(self._row, self._total, self._guessed, self._scale, (*self._struck, token))

    def draw(self, key: int) -> int:
        """One id, with the noise of `key`; of all of the row where rounding left nothing."""
        return self._row.draw(key, self._struck)


def sparse(law: Law, rows: Sequence[int], draft: Draft) -> list[Sparse] | None:
    """The laws after the root and after each node, of the given rows; None where one of them is no plain numbers:
    greedy, or without a filter and without a known norm."""
    above = [0 if parent == ROOT else parent + 1 for parent in draft.parents]
    kinds = {law.place[r][0] for r in rows}
    at = [law.place[r][1] for r in rows]
    places: list[Few | Flat]
    if kinds == {"few"}:
        places = [Few(law.ids, law.mass, i) for i in at]
        totals, own = _few(law, at, [at[r] for r in above], draft.tokens)
    elif kinds == {"wide"} and all(law.wide[i].norm for i in at):
        places = [law.wide[i] for i in at]
        totals, own = [1.0] * len(rows), _flat([law.wide[at[r]] for r in above], draft.tokens)
    else:
        return None
    guessed: list[dict[int, float]] = [{} for _ in rows]
    for parent, token, value in zip(above, draft.tokens, own, strict=True):
        guessed[parent][token] = value
    return [Sparse(*row) for row in zip(places, totals, guessed, strict=True)]


def _few(
    law: Law, rows: Sequence[int], above: Sequence[int], tokens: Sequence[int]
) -> tuple[list[float], list[float]]:
    """Sums of some rows of candidates, and the masses of guesses, each in row `above` of them."""
    if native.races(law.mass, law.ids):
        return native.look_up(law.ids, law.mass, rows, above, tokens)
    named = torch.tensor(tokens, dtype=torch.int64, device=law.ids.device)
    totals: list[float] = law.mass[list(rows)].sum(-1, dtype=torch.float64).tolist()
    ids, mass = law.ids[list(above)], law.mass[list(above)]
    own: list[float] = torch.where(ids == named[:, None], mass, 0.0).sum(-1, dtype=torch.float64).tolist()
    return totals, own


def _flat(rows: Sequence[Flat], tokens: Sequence[int]) -> list[float]:
    """The masses of guesses, each in a row that no filter truncates."""
    if not rows:
        return []
    logits = rows[0].logits[[flat.row for flat in rows], list(tokens)].tolist()
    return [flat.share(value) for flat, value in zip(rows, logits, strict=True)]
