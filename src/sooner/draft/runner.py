"""What an EAGLE drafter asks of whoever runs its head: slots of true features, drafts. Knows no acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from sooner.config import Budget
from sooner.core.tree import Draft
from sooner.heads.eagle import EagleHead
from sooner.model.lanes import LaneCache, staged_parents
from sooner.model.protocol import Ends


@dataclass(frozen=True, slots=True)
class Fitted:
    """A head beside its target: in the target's dtype, on its device. ids: the target's, of each of the head's.
    quantize: weights at fewer bits, where it is run in C."""

    head: EagleHead
    embedding: Tensor
    ids: Tensor | None
    ends: Ends
    beams: int
    least: float
    quantize: str | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """What one request puts into one call.

    lane, held: where its slots are, and how many. text: the token of every slot, made or not. first: the place in
    the request's text of the first slot's feature. features: of the slots to make now, [n, streams, width],
    n >= 1. budget: of the draft after the last of them; empty = slots alone.
    """

    lane: int
    held: int
    first: int
    text: Sequence[int]
    features: Tensor
    budget: Budget

    @property
    def end(self) -> int:
        """Slots the lane holds afterwards."""
        return self.held + len(self.features)

    @property
    def tokens(self) -> Sequence[int]:
        """Of the slots to make."""
        return self.text[self.held : self.end]

    @property
    def positions(self) -> range:
        """Places of the slots to make."""
        return range(self.first + self.held, self.first + self.end)

    def split(self, count: int) -> tuple[Part, Part]:
        """The first `count` slots alone, and the rest."""
        now = replace(self, features=self.features[:count], budget=Budget(0, 0, 0))
        return now, replace(self, features=self.features[count:], held=now.end)

    def settle(self, lanes: LaneCache) -> None:
        """The slots are made: the lane holds them from now on."""
        lanes.stage(self.lane, self.tokens, staged_parents(len(self.features), ()))
        lanes.settle(self.lane, self.text)


class Runner(Protocol):
    """Runs a head. lanes: one for each request, which holds its slots of true features."""

    @property
    def lanes(self) -> LaneCache: ...

    def draft(self, parts: Sequence[Part]) -> list[Draft]:
        """Make and settle the slots of every part, then draft for those with a budget."""
        ...
