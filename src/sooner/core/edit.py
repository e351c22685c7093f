"""What acts on logits before temperature: bias, penalties, forbidden tokens. Each row by its own path.

Knows no model and no draft, only tokens. The order is that of transformers: logit bias and allowed ids,
repetition penalty, presence and frequency penalties, bad words, minimum length, a grammar's mask, and
last the caller's own processors (which see the mask, and cannot lift it).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sooner.core.host import moved, sent
from sooner.native import law as native

Processor = Callable[[Sequence[int], Tensor], Tensor]
"""From the tokens before a row (prompt, text, drafted path) and its logits [V] to new logits [V]."""


@dataclass(frozen=True, slots=True)
class LawParams:
    """What shapes a law; ranges as in SamplingParams. temperature 0 = greedy, top_k 0 = all.

    bias: (id, added to its logit) pairs. allowed: ids that may be drawn, or None for all.
    bad_words: token sequences whose last token is forbidden after the others.
    until, forbidden: while fewer than `until` tokens are written, the `forbidden` ids (ends of text) cannot be.
    processors: the caller's own functions, run row by row.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    allowed: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    until: int = 0
    forbidden: tuple[int, ...] = ()
    processors: tuple[Processor, ...] = ()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def truncated(self) -> bool:
        """Whether a few candidates carry the whole law. Typical-p needs the entropy of all of them."""
        return (self.top_k > 0 or self.top_p < 1 or self.min_p > 0) and self.typical_p == 1

    @property
    def edits(self) -> bool:
        """Whether anything acts on the logits themselves."""
        plain = LawParams(self.temperature, self.top_k, self.top_p, self.min_p, self.typical_p)
        return self != plain

    @property
    def counts(self) -> bool:
        """Whether a penalty looks at what the text holds already."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def without_typical(self) -> LawParams:
        return replace(self, typical_p=1.0)


@dataclass(frozen=True, slots=True)
class Past:
    """What was there before the first row of a block.

    tokens: prompt and text up to and including the root. written: how many of them are text.
    ids, counts: every id in them once, and how often the text (not the prompt) holds it; place: where in `ids`.
    They are their owner's, and grow with the text.
    """

    tokens: Sequence[int]
    written: int
    ids: array[int]
    counts: array[float]
    place: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Edit:
    """Rows `first` on are one request's: paths[i] are the drafted tokens between its root and row i.

    mask: bool [len(paths), V] or None, true where a grammar allows the id.
    """

    first: int
    params: LawParams
    past: Past
    paths: Sequence[tuple[int, ...]]
    mask: Tensor | None = None


def edit(logits: Tensor, edits: Sequence[Edit]) -> Tensor:
    """New logits [n, V] in float32 or wider; rows that no edit names are unchanged."""
    out = widened(logits)
    for one in edits:
        apply(out, one)
    return out


def widened(logits: Tensor) -> Tensor:
    """A copy of the logits in float32 or wider, to be edited in place."""
    out = logits if logits.dtype == torch.float64 else logits.float()
    return out.clone() if out is logits else out


def apply(logits: Tensor, one: Edit) -> None:
    """Edit the rows of `logits` that `one` names, in place. Raises whatever a caller's processor raises, and
    ValueError if it returns anything but a row of logits."""
    rows = logits[one.first : one.first + len(one.paths)]
    params = one.params
    if params.allowed is not None:
        kept = torch.full_like(rows[0], -torch.inf)
        kept[sent(params.allowed, torch.int64, rows.device)] = 0
        rows += kept
    known, banned = _known(one) if params.counts else None, _banned(one)
    if params.bias or known or banned:
        (native.edit if native.serves(rows) else _edit)(rows, params.bias, known, banned)
    if one.mask is not None:
        rows.masked_fill_(~moved(one.mask, rows.device), -torch.inf)
    for process in one.params.processors:
        for row, path in zip(rows, one.paths, strict=True):
            made = process([*one.past.tokens, *path], row.clone())
            if not isinstance(made, Tensor) or made.shape != row.shape:
                got = list(made.shape) if isinstance(made, Tensor) else type(made).__name__
                raise ValueError(f"a logits processor must return logits [{len(row)}], got {got}")
            row.copy_(made)
    if one.mask is not None and one.params.processors:
        rows.masked_fill_(~moved(one.mask, rows.device), -torch.inf)  # whatever a processor did, the grammar holds


def _known(one: Edit) -> native.Penalties:
    """What the penalties of one block look at: past and own path."""
    past, params = one.past, one.params
    fresh: dict[int, int] = {}
    pairs = []
    for r, path in enumerate(one.paths):
        for token in path:
            at = past.place.get(token)
            pairs.append((r, fresh.setdefault(token, len(past.ids) + len(fresh)) if at is None else at))
    return native.Penalties(
        past.ids, past.counts, list(fresh), pairs,
        params.repetition_penalty, params.presence_penalty, params.frequency_penalty,
    )  # fmt: skip


def _banned(one: Edit) -> list[tuple[int, int]]:
    """(row, id) of bad words and of ends that come too early."""
    params, past = one.params, one.past
    if not params.bad_words and past.written >= params.until:
        return []
    longest = max((len(word) for word in params.bad_words), default=1) - 1
    tail = tuple(past.tokens[len(past.tokens) - min(longest, len(past.tokens)) :])
    pairs: list[tuple[int, int]] = []
    for r, path in enumerate(one.paths):
        before = tail + path
        pairs += [(r, w[-1]) for w in params.bad_words if len(w) == 1 or before[-(len(w) - 1) :] == w[:-1]]
        if past.written + len(path) < params.until:
            pairs += [(r, token) for token in params.forbidden]
    return pairs


def _edit(
    rows: Tensor,
    bias: Sequence[tuple[int, float]],
    known: native.Penalties | None,
    banned: Sequence[tuple[int, int]],
) -> None:
    """native.edit in operations on tensors, for other types and devices, and its oracle."""
    if bias:
        ids, more = zip(*bias, strict=True)
        rows[:, sent(ids, torch.int64, rows.device)] += sent(more, rows.dtype, rows.device)
    if known is not None:
        _penalise(rows, known)
    if banned:
        where = sent(banned, torch.int64, rows.device)
        rows[where[:, 0], where[:, 1]] = -torch.inf


def _penalise(rows: Tensor, known: native.Penalties) -> None:
    """Penalties of every row over past and own path; only ids that occur are touched."""
    past = len(known.ids)
    ids = sent([*known.ids, *known.fresh], torch.int64, rows.device)
    counts = rows.new_zeros((len(rows), len(ids)))
    counts[:, :past] = sent(known.counts.tolist(), rows.dtype, rows.device)
    here = torch.zeros_like(counts, dtype=torch.bool)
    here[:, :past] = True
    if known.pairs:
        where = sent(known.pairs, torch.int64, rows.device).T
        counts.index_put_((where[0], where[1]), counts.new_ones(()), accumulate=True)
        here[where[0], where[1]] = True
    scores = rows[:, ids]
    scores = torch.where(here, torch.where(scores < 0, scores * known.repeat, scores / known.repeat), scores)
    rows[:, ids] = scores - known.frequency * counts - known.presence * (counts > 0)
