"""From transformers' StoppingCriteriaList to where one row ends. Knows no laws and no passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import EosTokenCriteria, LogitsProcessorList, MaxLengthCriteria

from sooner.integrations.call import Row


@dataclass(frozen=True, slots=True)
class Ends:
    """max_tokens: most new tokens. stop_ids: ids that end a row. asked: criteria that are called with the ids.
    padded: rows that have ended are padded; else (no end-of-text id at all) they go on until all have ended."""

    max_tokens: int
    stop_ids: tuple[int, ...]
    asked: tuple[Any, ...]
    padded: bool


def read(criteria: Sequence[Any], prompt: int) -> Ends:
    """prompt: length of the padded prompts. As in transformers at least one token is always written."""
    lengths = [c.max_length for c in criteria if type(c) is MaxLengthCriteria]
    ids = [c.eos_token_id for c in criteria if type(c) is EosTokenCriteria]
    asked = tuple(c for c in criteria if type(c) not in (MaxLengthCriteria, EosTokenCriteria))
    return Ends(
        max(min(lengths, default=2**31) - prompt, 1),
        tuple(sorted({int(i) for some in ids for i in some.tolist() if i >= 0})),  # -1 says: end nowhere
        asked,
        any(hasattr(c, "eos_token_id") for c in criteria),
    )


@dataclass(slots=True)
class Together:
    """When the rows of one call end.

    With an end-of-text id every row ends by itself. Without one transformers lets rows go on until the last
    one has met a criterion; then all are as long as that one.
    """

    rows: int
    padded: bool
    met: dict[int, int] = field(default_factory=dict)

    def ends(self, row: int, length: int, now: bool) -> bool:
        """Whether a row of that many new tokens ends; now: whether a criterion is met."""
        if now:
            self.met.setdefault(row, length)
        if self.padded:
            return now
        return len(self.met) == self.rows and length >= max(self.met.values())

    @property
    def length(self) -> int | None:
        """New tokens of the longest row, where the criteria have decided that."""
        return None if self.padded or len(self.met) < self.rows else max(self.met.values())


@dataclass(slots=True)
class RowWatch:
    """The engine's Watch of one row: keeps logits and scores, asks the caller's criteria.

    place: which row of the call. processors: None, or what turns logits into transformers' scores.
    logits_rows, scores: [1, V] float32, one for each new token. error: what a criterion or processor raised.
    """

    place: int
    row: Row
    asked: Sequence[Callable[..., Any]]
    together: Together
    device: torch.device
    wants_logits: bool = False
    processors: LogitsProcessorList | None = None
    logits_rows: list[Tensor] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)
    error: Exception | None = None

    def logits(self, rows: Tensor) -> None:
        """Rows of tokens that were not taken are dropped when the next ones come, or at the end."""
        self.logits_rows += [row.float()[None].clone() for row in rows]

    def token(self, tokens: Sequence[int]) -> bool:
        if self.error is not None:
            return True
        try:
            return self._token(tokens)
        except Exception as error:  # the caller's own code: raised again where the caller can see it
            self.error = error
            return True

    def _token(self, tokens: Sequence[int]) -> bool:
        length = len(tokens) - len(self.row.prompt)
        if not self.asked and self.processors is None:
            return self.together.ends(self.place, length, False)
        ids = torch.tensor([self.row.shown(tokens)], device=self.device)
        if self.processors is not None:
            self.scores.append(self.processors(ids[:, :-1], self.logits_rows[length - 1].clone()))
        shown = None if self.processors is None else tuple(self.scores)
        met = [bool(torch.as_tensor(criterion(ids, shown)).all()) for criterion in self.asked]
        return self.together.ends(self.place, length, any(met))
