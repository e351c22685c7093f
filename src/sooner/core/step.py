"""One pass of the target, packed: segments of many requests as ragged arrays. Knows no model."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sooner.core.tree import EMPTY, Draft, depths


@dataclass(frozen=True, slots=True)
class Segment:
    """What one request puts into one pass.

    lane: the row of the cache that holds the request's keys and values.
    start: how many tokens of the text the lane already holds.
    certain: the next n >= 1 tokens of the text, which the lane has not seen yet.
    draft: guesses that hang off the last certain token.
    law: whether the laws after the last certain token and after every node are wanted.
    scored: whether the laws after the other certain tokens are wanted too (log-probabilities of a prompt).
    """

    lane: int
    start: int
    certain: tuple[int, ...]
    draft: Draft = EMPTY
    law: bool = True
    scored: bool = False

    def __post_init__(self) -> None:
        if not self.certain:
            raise ValueError("a segment needs at least one certain token")
        if self.start < 0 or self.lane < 0:
            raise ValueError(f"lane {self.lane} and start {self.start} must not be negative")
        if len(self.draft) and not self.law:
            raise ValueError("a draft without its laws cannot be verified")

    @property
    def rows(self) -> int:
        return len(self.certain) + len(self.draft)

    @property
    def root(self) -> int:
        """Position of the last certain token."""
        return self.start + len(self.certain) - 1


@dataclass(frozen=True, slots=True)
class Step:
    """Segments packed one after another; row r of the model's output is the law *after* row r.

    tokens, positions, lanes, columns: int64 [N]. A row's keys and values go to (lane, column); certain
        token j has column = position = start + j; node i has column root + 1 + i, position root + depth.
    offsets: R + 1 ints; segment s owns rows offsets[s] to offsets[s + 1].
    law_rows: int64 [L], the rows whose law is wanted: root then nodes, segment by segment; all certain
        tokens before them where the segment is scored.
    law_starts: for each segment the index into law_rows of its root, or None when it wants no law.
    score_starts: for each segment the index into law_rows of its first certain token, or None.
    """

    segments: tuple[Segment, ...]
    tokens: Tensor
    positions: Tensor
    lanes: Tensor
    columns: Tensor
    offsets: tuple[int, ...]
    law_rows: Tensor
    law_starts: tuple[int | None, ...]
    score_starts: tuple[int | None, ...]


def pack(segments: Sequence[Segment]) -> Step:
    """Pack segments, each of a lane of its own, into one step. Raises ValueError if two share a lane."""
    if len({segment.lane for segment in segments}) != len(segments):
        raise ValueError("two segments share a lane")
    tokens: list[int] = []
    positions: list[int] = []
    lanes: list[int] = []
    columns: list[int] = []
    law_rows: list[int] = []
    law_starts: list[int | None] = []
    score_starts: list[int | None] = []
    offsets = [0]
    for segment in segments:
        root, rows = segment.root, segment.rows
        tokens += segment.certain
        tokens += segment.draft.tokens
        positions += range(segment.start, root + 1)
        positions += [root + depth for depth in depths(segment.draft.parents)]
        lanes += [segment.lane] * rows
        columns += range(segment.start, segment.start + rows)
        wanted = range(offsets[-1], offsets[-1] + rows)
        last = len(segment.certain) - 1
        score_starts.append(len(law_rows) if segment.scored else None)
        if segment.scored:
            law_rows += wanted[: last if segment.law else last + 1]
        law_starts.append(len(law_rows) if segment.law else None)
        if segment.law:
            law_rows += wanted[last:]
        offsets.append(offsets[-1] + rows)
    return Step(
        tuple(segments),
        _tensor(tokens),
        _tensor(positions),
        _tensor(lanes),
        _tensor(columns),
        tuple(offsets),
        _tensor(law_rows),
        tuple(law_starts),
        tuple(score_starts),
    )


def _tensor(numbers: list[int]) -> Tensor:
    """int64 [n]; a third of what torch.tensor takes right after a pass, when nothing is in the caches."""
    if not numbers:
        return torch.empty(0, dtype=torch.int64)
    return torch.frombuffer(array("q", numbers), dtype=torch.int64)
