"""What transformers' generate returns and streams, from rows that end at different times. Runs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sooner.engine.stats import Acceptance


@dataclass(frozen=True, slots=True)
class CallStats:
    """What a call did. total: summed over the rows (its seconds too); rows: each by itself. passes: of the
    target. seconds: wall clock. draft: the drafter's name."""

    draft: str
    total: Acceptance
    rows: tuple[Acceptance, ...]
    passes: int
    seconds: float

    def __str__(self) -> str:
        total = self.total
        return (
            f"{len(self.rows)} rows, {total.emitted} tokens in {self.passes} passes, "
            f"{total.tokens_per_step:.2f} tokens per step (emitted / steps), "
            f"acceptance {total.acceptance:.2f} (accepted / drafted), draft {self.draft}, {self.seconds:.2f} s"
        )


def sequences(input_ids: Tensor, written: Sequence[Sequence[int]], pad: int | None) -> Tensor:
    """[B, prompt + longest row], int64; rows that ended earlier are filled with `pad`."""
    longest = max(len(row) for row in written)
    filled = [[*row, *[pad or 0] * (longest - len(row))] for row in written]
    return torch.cat([input_ids, torch.tensor(filled, dtype=input_ids.dtype, device=input_ids.device)], dim=1)


def by_step(rows: Sequence[Sequence[Tensor]], steps: int) -> tuple[Tensor, ...]:
    """One [B, V] tensor a step, as transformers gives scores and logits. Where a row has ended (transformers
    goes on computing rows of padding there) it is zeros."""
    nothing = torch.zeros_like(rows[0][0])
    return tuple(torch.cat([row[step] if step < len(row) else nothing for row in rows]) for step in range(steps))


class Columns:
    """Feeds a streamer as plain generate does: one token of every row at a time, [B], padding for ended rows."""

    def __init__(self, streamer: Any, rows: int, pad: int | None) -> None:
        self._streamer, self._pad = streamer, pad or 0
        self._rows: list[list[int]] = [[] for _ in range(rows)]
        self._ended = [False] * rows
        self._given = 0

    def put(self, row: int, tokens: Sequence[int], ended: bool) -> None:
        """New tokens of one row; gives out every step that all rows have reached which go on."""
        self._rows[row] += tokens
        self._ended[row] |= ended
        running = [len(r) for r, ended in zip(self._rows, self._ended, strict=True) if not ended]
        if running:
            self._give(min(running))

    def rest(self, steps: int) -> None:
        """All rows have ended; the output has so many steps."""
        self._give(steps)

    def _give(self, steps: int) -> None:
        for step in range(self._given, steps):
            column = [r[step] if step < len(r) else self._pad for r in self._rows]
            self._streamer.put(torch.tensor(column, dtype=torch.int64))
        self._given = max(self._given, steps)
