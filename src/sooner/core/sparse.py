"""Laws of truncated rows as plain numbers, while point-mass guesses are judged. Knows no rule.

A rule looks at the masses of guesses and strikes guesses out: a few numbers a row, faster in plain Python than in
operations on tensors. The candidates themselves are touched when one is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sooner.core.law import Law
from sooner.core.tree import ROOT, Draft
from sooner.native import law as native

_NOTHING = 1e-12  # what float64 may leave of a sum when all of it has been taken away


@dataclass(frozen=True, slots=True)
class Sparse:
    """Weights scale * mass of the ids that are not `struck`. They need not sum to 1.

    ids, mass: [K], the candidates. total: their sum, in float64. guessed: masses of the tokens guessed here.
    """

    ids: Tensor
    mass: Tensor
    total: float
    guessed: Mapping[int, float]
    scale: float = 1.0
    struck: tuple[int, ...] = ()

    def __getitem__(self, token: int) -> float:
        return 0.0 if token in self.struck else self.scale * self.guessed[token]

    def __mul__(self, factor: float) -> Sparse:
        return replace(self, scale=self.scale * factor)

    def __truediv__(self, divisor: float) -> Sparse:
        return replace(self, scale=self.scale / divisor)

    def sum(self) -> float:
        left = self.total - sum(self.guessed[token] for token in self.struck)
        return self.scale * left if left > _NOTHING * self.total else 0.0

    def without(self, token: int) -> Sparse:
        return replace(self, struck=(*self.struck, token))

    def weights(self) -> Tensor:
        """[K], the masses of what is left; all of them where rounding left nothing."""
        if not self.struck:
            return self.mass
        left = self.mass.masked_fill(torch.isin(self.ids, torch.tensor(self.struck, device=self.ids.device)), 0.0)
        return left if bool(left.any()) else self.mass


def sparse(law: Law, rows: Sequence[int], draft: Draft) -> list[Sparse] | None:
    """The laws after the root and after each node, of the given rows; None where one of them is not truncated."""
    if any(law.place[r][0] != "few" for r in rows):
        return None
    at = [law.place[r][1] for r in rows]
    first, last = at[0], at[-1] + 1
    together = at == list(range(first, last))
    ids, mass = (law.ids[first:last], law.mass[first:last]) if together else (law.ids[at], law.mass[at])
    above = [0 if parent == ROOT else parent + 1 for parent in draft.parents]
    if native.races(mass, ids):
        totals, own = native.look_up(ids, mass, above, draft.tokens)
    else:
        tokens = torch.tensor(draft.tokens, dtype=torch.int64, device=ids.device)
        totals = mass.sum(-1, dtype=torch.float64).tolist()
        own = torch.where(ids[above] == tokens[:, None], mass[above], 0.0).sum(-1, dtype=torch.float64).tolist()
    guessed: list[dict[int, float]] = [{} for _ in rows]
    for parent, token, value in zip(above, draft.tokens, own, strict=True):
        guessed[parent][token] = value
    return [Sparse(*row) for row in zip(ids.unbind(), mass.unbind(), totals, guessed, strict=True)]
