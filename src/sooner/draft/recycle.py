"""Token recycling: what the target thought likely before is guessed again. Knows no model and no tree.

Every row of every pass gives the target's likeliest next tokens, whether the row was accepted or not. They are
kept by the row's last two tokens, and by its last one for pairs never seen (Luo et al. 2024, arXiv 2408.08696,
keep them by the last token alone). The store is shared by all requests of one engine; what one request leaves in
it changes how fast another is written, never what.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Generic, TypeVar

from sooner.config import Budget
from sooner.core.tree import ROOT
from sooner.draft.protocol import Context, Outcome
from sooner.draft.source import GRADES, RANKS, Guess, grade_of_log, graded_priors
from sooner.errors import ConfigError

LIMIT = 65_536  # keys of each kind; a key with its row takes about 600 bytes
TOPS = 8  # likeliest ids kept of a row
MOST = 64  # candidates of a row whose ranks are told apart
_RANKED = tuple(min(rank, RANKS - 1) for rank in range(MOST))
_LEVEL = GRADES * RANKS  # codes of one level: pairs, then single tokens
_QUOTED = 2 * _LEVEL  # what followed a pair in a prompt, where the target's own thoughts are not known
_ANOTHERS = _QUOTED + 1  # the same codes once more, for rows that another request left

Value = TypeVar("Value")


class Bounded(Generic[Value]):
    """A dict of at most `limit` keys: when the newer half is full, it becomes the older one, which is dropped."""

    def __init__(self, limit: int) -> None:
        if type(limit) is not int or limit < 2:
            raise ConfigError(f"recycle needs a limit of at least 2 keys, got {limit!r}.")
        self._half = limit // 2
        self._new: dict[int, Value] = {}
        self._old: dict[int, Value] = {}

    def __len__(self) -> int:
        return len(self._new.keys() | self._old.keys())

    def get(self, key: int) -> Value | None:
        found = self._new.get(key)
        return self._old.get(key) if found is None else found

    def put(self, key: int, value: Value) -> None:
        self._new[key] = value
        if len(self._new) >= self._half:
            self._old, self._new = self._new, {}


class _Row:
    """The likeliest ids after a key, and the request they come from; without logits it is a quoted token.

    The guesses are worked out when they are first asked for.
    """

    __slots__ = ("_anothers", "_own", "ids", "logits", "request_id")

    def __init__(self, ids: tuple[int, ...], logits: tuple[float, ...], request_id: str) -> None:
        self.ids, self.logits, self.request_id = ids, logits, request_id
        self._own: tuple[Guess, ...] | None = None
        self._anothers: tuple[Guess, ...] | None = None

    def guesses(self, level: int, request_id: str) -> tuple[Guess, ...]:
        """For a request; `level` is that of the key."""
        if self._own is None:
            self._own = _guesses(self, level) if self.logits else ((self.ids[0], _QUOTED),)
        if request_id == self.request_id:
            return self._own
        if self._anothers is None:
            self._anothers = tuple((token, code + _ANOTHERS) for token, code in self._own)
        return self._anothers


class RecycleSource:
    """The target's likeliest tokens after the last row with the same end. The code is level,
    grade and rank, and whether the row is of the same request: those of others are worth less.

    limit: most keys kept of each kind (pairs, single tokens), oldest out first.
    """

    name = "recycle"
    taps: tuple[int, ...] = ()
    tops = TOPS
    priors: tuple[float, ...] = (
        *(*graded_priors(0.6), *graded_priors(0.5), 0.25),
        *(*graded_priors(0.5), *graded_priors(0.4), 0.15),
    )

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self._pairs: Bounded[_Row] = Bounded(limit)
        self._singles: Bounded[_Row] = Bounded(limit)
        self._quoted: set[str] = set()

    @property
    def keys(self) -> int:
        """How many keys are held."""
        return len(self._pairs) + len(self._singles)

    def begin(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> None:
        for context in contexts:
            if context.request_id not in self._quoted:
                self._quoted.add(context.request_id)
                self._quote(context)

    def after(self, request_id: str, path: tuple[int, ...], tail: tuple[int, ...]) -> Sequence[Guess]:
        level, row = 0, self._pairs.get(_pair(tail[-2], tail[-1])) if len(tail) > 1 else None
        if row is None:
            level, row = _LEVEL, self._singles.get(tail[-1])
        return () if row is None else row.guesses(level, request_id)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            if outcome.tops is None:
                continue
            draft, root = outcome.draft, outcome.tail[-1]
            before = outcome.tail[-2] if len(outcome.tail) > 1 else None
            rows = zip(outcome.tops.ids, outcome.tops.logits, strict=True)
            self._keep(before, root, *next(rows), outcome.request_id)
            for token, parent, (ids, logits) in zip(draft.tokens, draft.parents, rows, strict=True):
                self._keep(
                    root if parent == ROOT else draft.tokens[parent], token, ids, logits, outcome.request_id
                )

    def forget(self, request_id: str) -> None:
        self._quoted.discard(request_id)

    def _keep(
        self, before: int | None, last: int, ids: tuple[int, ...], logits: tuple[float, ...], request_id: str
    ) -> None:
        if not math.isfinite(logits[0]):
            return
        self._singles.put(last, _Row(ids, logits, request_id))
        if before is not None:  # a row of its own: its codes are others
            self._pairs.put(_pair(before, last), _Row(ids, logits, request_id))

    def _quote(self, context: Context) -> None:
        """A prompt's rows have no logits, so what followed each pair stands in for them."""
        tokens = context.tokens
        for at in range(2, len(tokens)):
            key = _pair(tokens[at - 2], tokens[at - 1])
            known = self._pairs.get(key)
            if known is None or not known.logits:
                self._pairs.put(key, _Row((tokens[at],), (), context.request_id))


def _pair(before: int, last: int) -> int:
    return before << 32 | last


def _guesses(row: _Row, level: int) -> tuple[Guess, ...]:
    """Codes from shares among the kept ids alone; what the rest of the vocabulary has is left out."""
    top = row.logits[0]
    whole = math.log(sum([math.exp(logit - top) for logit in row.logits])) + top
    codes = [grade_of_log(logit - whole) * RANKS + level for logit in row.logits]
    return tuple([(token, code + rank) for token, code, rank in zip(row.ids, codes, _RANKED, strict=False)])
