"""What the engine asks of a drafter. Knows no drafter."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol, runtime_checkable

from torch import Tensor

from sooner.config import Budget
from sooner.core.edit import LawParams, Past
from sooner.core.tree import EMPTY, Draft
from sooner.core.verify import Rule

TAIL = 3  # tokens of the text before a pass that come with its outcome


@dataclass(frozen=True, slots=True)
class Context:
    """What a drafter may know of one request.

    tokens: the whole text so far, prompt first; its last token is the root of the draft. A copy,
        which changes no more.
    law, seed, rule: how the target will choose. Under "match" a drafter that draws should use the
        TARGET noise of `seed`; under the other rules its own (DRAFT), and hand over the law it drew from.
    past: what penalties need to know of the text; None where the law has none.
    prompt: how many of `tokens` are the prompt.
    prediction: the text the caller expects after the prompt, empty where there is none.
    scope: requests of one scope may learn from each other's texts; None = from its own alone.
    """

    request_id: str
    tokens: Sequence[int]
    law: LawParams
    seed: int
    rule: Rule
    past: Past | None = None
    prompt: int = 0
    scope: str | None = None
    prediction: tuple[int, ...] = ()


class Tops:
    """The target's likeliest ids after each row of a draft: root, then nodes.

    ids, logits: [1 + n][count], best first; the logits (float32) as the model gave them, before any parameter.
    They are kept flat, row after row: flat_ids, flat_logits, `width` of each. Raises ValueError for rows that
    differ in length.
    """

    __slots__ = ("flat_ids", "flat_logits", "width")

    def __init__(self, ids: Sequence[Sequence[int]], logits: Sequence[Sequence[float]]) -> None:
        self.width = len(ids[0]) if ids else 0
        if len(ids) != len(logits) or any(len(row) != self.width for row in (*ids, *logits)):
            raise ValueError("rows of likeliest ids of different lengths")
        self.flat_ids = array("q", chain.from_iterable(ids))
        self.flat_logits = array("f", chain.from_iterable(logits))

    @classmethod
    def flat(cls, ids: array[int], logits: array[float], width: int) -> Tops:
        """The same from what is flat already, int64 and float32."""
        made = cls.__new__(cls)
        made.flat_ids, made.flat_logits, made.width = ids, logits, width
        return made

    @property
    def rows(self) -> int:
        return len(self.flat_ids) // max(self.width, 1)

    @property
    def ids(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(self.flat_ids[at : at + self.width]) for at in self._starts())

    @property
    def logits(self) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(self.flat_logits[at : at + self.width]) for at in self._starts())

    def _starts(self) -> range:
        return range(0, len(self.flat_ids), max(self.width, 1))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one pass brought for one request.

    tokens: the new certain tokens, accepted guesses first; `accepted` says how many were guesses.
    features: [rows, len(taps), H] of the segment's rows (certain tokens, then nodes), or None.
    draft: what was verified; it may differ from what was proposed (a grammar puts forced tokens first).
    tail: the last tokens of the text the pass began with, up to TAIL of them; the last one is the root.
    tops: for drafters with an attribute `tops`, so many of the likeliest ids after root and nodes.
    """

    request_id: str
    tokens: tuple[int, ...]
    accepted: int
    drafted: int
    features: Tensor | None = None
    draft: Draft = EMPTY
    tail: tuple[int, ...] = ()
    tops: Tops | None = None


@runtime_checkable
class Drafter(Protocol):
    """Guesses for a whole batch. Held to this by `sooner.testing.check_drafter`.

    name: how reports call it. taps: layers of the target whose features it wants in `observe`.
    A drafter may also have `tops`, an int: how many of the likeliest ids of every row it wants there.
    One with lanes of its own has `caches` too, a sequence of LaneCache, which count against the memory limit.
    """

    name: str
    taps: tuple[int, ...]

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        """One draft for each context, within its budget; an empty draft where there is nothing to say."""

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Called after every pass."""

    def forget(self, request_id: str) -> None:
        """The request has ended or lost its place; drop what is kept for it. Unknown ids are no error."""
