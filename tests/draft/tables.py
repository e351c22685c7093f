"""A causal model whose logits are a table of the last token. Knows no text; may be wrong on purpose."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sooner.core.step import Step
from sooner.model.lanes import LaneCache, staged_parents
from sooner.model.protocol import Output


class Table:
    """Logits [V] after token t are table[t]; counts its passes and their rows."""

    def __init__(self, table: Tensor, context_limit: int | None = None) -> None:
        self.table = table
        self.vocab_size = table.shape[1]
        self.context_limit = context_limit
        self.lanes = LaneCache(1, 1, 1, torch.float32)
        self.rows: list[int] = []

    def forward(self, step: Step, *, rows: Tensor, taps: Sequence[int] = ()) -> Output:
        self.rows.append(len(step.tokens))
        for segment in step.segments:
            self.lanes.reserve(segment.lane, segment.start, segment.rows)
            parents = staged_parents(len(segment.certain), segment.draft.parents)
            self.lanes.stage(segment.lane, segment.certain + segment.draft.tokens, parents)
        return Output(self.table[step.tokens[rows]])


def logits(*probs: Sequence[float]) -> Tensor:
    """A table of logits from rows of probabilities."""
    return torch.tensor(probs, dtype=torch.float64).log()
