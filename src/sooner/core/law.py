"""From logits to the law a token is drawn from. Knows neither the model nor how the law is used.

Everything that shapes the distribution is in core/edit.py (what acts on logits: bias, penalties, masks)
and here (temperature, top-k, top-p, min-p, typical-p), in that order, which is that of transformers.
A greedy law is one-hot and kept as an id. A truncated law is kept as its few candidates, found by
selection, not by sorting V values; where too few were selected the selection is widened, up to all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sooner.core import noise
from sooner.core.edit import Edit, LawParams, edit
from sooner.core.host import fetched, sent
from sooner.native import law as native

_SELECTED = (64, 512, 4096)  # candidates looked at before all V are; a row goes on only if it needs more


@dataclass(frozen=True, slots=True)
class Few:
    """The law of a truncated row: `row` of tables ids and mass [s, K]."""

    ids: Tensor
    mass: Tensor
    row: int

    def draw(self, key: int, struck: Sequence[int] = ()) -> int:
        """One id that is not struck, with the noise of `key`; any where rounding left nothing else."""
        if not struck:
            return noise.race_row(self.mass, self.row, key, self.ids)
        ids, mass = self.ids[self.row], self.mass[self.row]
        left = mass.masked_fill(torch.isin(ids, torch.tensor(struck, device=ids.device)), 0.0)
        return noise.race_row((left if bool(left.any()) else mass)[None], 0, key, ids[None])


@dataclass(frozen=True, slots=True)
class Flat:
    """The law of a row that no filter truncates, worked out when it is asked for.

    logits: [n, V], of which `row` is meant. norm, where it is known: the highest of them, and the sum of
    exp((x - highest) / temperature).
    """

    logits: Tensor
    row: int
    params: LawParams
    norm: tuple[float, float] | None = None

    def share(self, logit: float) -> float:
        """The probability of an id of that logit; the norm must be known."""
        assert self.norm is not None
        return math.exp((logit - self.norm[0]) / _bounded(self.params.temperature)) / self.norm[1]

    def probs(self) -> Tensor:
        """[V]"""
        row = self.logits[self.row : self.row + 1]
        return _wide(_scaled(row, [0], [self.params]), [self.params])[0]

    def draw(self, key: int, struck: Sequence[int] = ()) -> int:
        """As of Few."""
        if self.norm is not None and not struck and native.serves(self.logits):
            temperature = _bounded(self.params.temperature)
            return native.race_logits(self.logits, self.row, self.norm[0], temperature, key)
        probs = self.probs()
        if struck:
            left = probs.clone()
            left[list(struck)] = 0
            probs = left if bool(left.any()) else probs
        return noise.race_row(probs[None], 0, key)


@dataclass(frozen=True, slots=True)
class Law:
    """The laws of n rows.

    best: [n], the likeliest id (lowest id among equals); the whole law of a greedy row.
    broken: [n], whether a row's logits hold NaN or +inf, or nothing but -inf.
    ids, mass: [s, K], candidates of the s truncated rows and their probabilities, 0 beyond the last one.
    wide: the d rows that no filter truncates.
    place: for each row ("greedy", -1), ("few", row of ids) or ("wide", row of wide).
    """

    best: Sequence[int]
    broken: Sequence[bool]
    ids: Tensor
    mass: Tensor
    wide: Sequence[Flat]
    place: tuple[tuple[str, int], ...]
    vocab: int

    def greedy(self, r: int) -> bool:
        return self.place[r][0] == "greedy"

    def afar(self, r: int) -> bool:
        """Whether to draw from row r is to wait for a device."""
        kind, i = self.place[r]
        return kind == "wide" and not self.wide[i].logits.is_cpu

    def row(self, r: int) -> Tensor | None:
        """The law of row r as probabilities [V], or None when it is greedy."""
        kind, i = self.place[r]
        if kind == "greedy":
            return None
        if kind == "wide":
            return self.wide[i].probs()
        return self.mass.new_zeros(self.vocab).scatter_add_(0, self.ids[i], self.mass[i])


def law(
    logits: Tensor,
    params: Sequence[LawParams],
    edits: Sequence[Edit] = (),
    firsts: Sequence[tuple[int, float]] | None = None,
) -> Law:
    """The laws of `logits` [n, V], each row shaped by its own parameters.

    edits: what acts on the logits of whole blocks of rows before (penalties, bias, masks).
    firsts: each row's likeliest id, the lowest among equals, and its logit, where they are known and there are no
    edits: all that greedy rows need.
    Works in float32 (float64 stays float64), whatever the model's type.
    """
    if firsts is not None and not edits and all(p.greedy for p in params):
        return _greedy(firsts, logits)
    if edits:
        logits = edit(logits, edits)
    logits = (logits if logits.dtype == torch.float64 else logits.float()).contiguous()
    known: dict[int, tuple[str, native.Filter]] = {}  # rows of one request share their parameters
    for p in params:
        if id(p) not in known:
            known[id(p)] = (_kind(p), _filter(p))
    kinds = [known[id(p)] for p in params]
    few = [r for r, (kind, _) in enumerate(kinds) if kind == "few"]
    wide = [r for r, (kind, _) in enumerate(kinds) if kind == "wide"]
    norms: Sequence[tuple[float, float] | None] = [None] * len(params)
    if native.serves(logits):
        best, broken, ids, mass, norms = native.shape(logits, [f for _, f in kinds], few)
    else:
        best, broken, ids, mass, norms = _shape(logits, params, few, wide)
    flat = tuple(Flat(logits, r, params[r], norms[r] if params[r].typical_p == 1 else None) for r in wide)
    place: list[tuple[str, int]] = [("greedy", -1)] * len(params)
    for kind, rows in (("few", few), ("wide", wide)):
        for i, r in enumerate(rows):
            place[r] = (kind, i)
    return Law(best, broken, ids, mass, flat, tuple(place), logits.shape[-1])


def _greedy(firsts: Sequence[tuple[int, float]], logits: Tensor) -> Law:
    broken = [not math.isfinite(value) for _, value in firsts]
    ids = [0 if odd else token for (token, _), odd in zip(firsts, broken, strict=True)]
    place = (("greedy", -1),) * len(firsts)
    return Law(ids, broken, *native.NOTHING, (), place, logits.shape[-1])


def _shape(
    logits: Tensor, params: Sequence[LawParams], few: Sequence[int], wide: Sequence[int]
) -> tuple[list[int], list[bool], Tensor, Tensor, list[tuple[float, float] | None]]:
    """native.shape in operations on tensors, for other types and devices, and its oracle. The host waits for the
    device once, unless a row needs more candidates than are looked at first; what comes back lies on the host."""
    top, at = logits.max(dim=-1)
    sums = _scaled(logits, wide, params).exp().sum(-1, dtype=torch.float64)
    scores = _scaled(logits, few, params)
    ids, mass, (at, top, sums) = _few(scores, [params[r] for r in few], (at, top, sums))
    highest: list[float] = top.tolist()
    norms: list[tuple[float, float] | None] = [None] * len(params)
    for r, total in zip(wide, sums.tolist(), strict=True):
        norms[r] = (highest[r], total)
    return at.tolist(), [not math.isfinite(value) for value in highest], ids, mass, norms


def _kind(params: LawParams) -> str:
    return "greedy" if params.greedy else "few" if params.truncated else "wide"


def _filter(params: LawParams) -> native.Filter:
    """What law.c is told of a row."""
    if params.greedy:
        return native.LIKELIEST
    if _kind(params) == "wide":
        return native.packed(params.temperature, 0, 1.0, 0.0, native.SUMS)
    return native.packed(params.temperature, params.top_k, params.top_p, params.min_p, native.FEW)


def draw(laws: Law, rows: Sequence[int], keys: Sequence[int]) -> list[int]:
    """One id drawn from each of the given sampled rows, with the noise of its key."""
    if rows and all(laws.afar(r) for r in rows):  # one wait for all
        return noise.race_rows(torch.stack([laws.wide[laws.place[r][1]].probs() for r in rows]), keys)
    drawn = []
    for r, key in zip(rows, keys, strict=True):
        kind, i = laws.place[r]
        drawn.append((Few(laws.ids, laws.mass, i) if kind == "few" else laws.wide[i]).draw(key))
    return drawn


def log_probs(logits: Tensor) -> Tensor:
    """Log-probabilities [n, V] of logits as they are, before temperature and filters, in float32."""
    return logits.float().log_softmax(dim=-1)


def _scaled(logits: Tensor, rows: Sequence[int], params: Sequence[LawParams]) -> Tensor:
    """Logits of the given rows over their temperatures, highest 0, so that tiny temperatures stay finite."""
    if not len(rows):
        return logits[:0]
    chosen = logits if len(rows) == len(logits) else logits[sent(rows, torch.int64, logits.device)]
    temperature = sent([_bounded(params[r].temperature) for r in rows], chosen.dtype, chosen.device)[:, None]
    return (chosen - chosen.amax(-1, keepdim=True)) / temperature


def _bounded(temperature: float) -> float:
    """Beyond these a law is one-hot or uniform anyway, and float32 would turn them into 0 and infinity."""
    return min(max(temperature, 1e-30), 1e30)


def _wide(scores: Tensor, params: Sequence[LawParams]) -> Tensor:
    """Probabilities [d, V] of rows without truncation, but typical-p."""
    if not len(params):
        return scores
    probs = scores.softmax(dim=-1)
    for i, p in enumerate(params):
        if p.typical_p < 1:
            probs[i] = _typical(_filtered(scores[i], p), p.typical_p)
    return probs


def _filtered(scores: Tensor, params: LawParams) -> Tensor:
    """Probabilities [V] of one row after top-k, top-p and min-p, laid out over the vocabulary."""
    plain = params.without_typical()
    if not plain.truncated:
        return scores.softmax(dim=-1)
    ids, mass, _ = _few(scores[None], [plain])
    return torch.zeros_like(scores).scatter_add_(0, ids[0].to(scores.device), mass[0].to(scores.device))


def _typical(probs: Tensor, mass: float) -> Tensor:
    """Keep the ids whose surprise is closest to the entropy, up to `mass` (Meister et al. 2202.00666)."""
    logs = probs.log()
    entropy = -(probs * logs).nansum()
    distance = (-logs - entropy).abs()
    nearest, order = distance.sort()
    ordered = probs[order]
    count = int(((ordered.cumsum(0) - ordered) < mass).sum())
    kept = torch.where(distance <= nearest[max(count, 1) - 1], probs, 0.0)  # equals of the last one stay
    return kept / kept.sum()


def _few(
    scores: Tensor, params: Sequence[LawParams], along: Sequence[Tensor] = ()
) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
    """Candidates and probabilities of truncated rows, [s, K] each, K as small as the widest row allows; and what
    is wanted along with them. All on the host."""
    rows, vocab = scores.shape
    if not rows:
        return torch.zeros((0, 0), dtype=torch.int64), torch.zeros((0, 0), dtype=scores.dtype), fetched(*along)
    total = _log_mass(scores) if any(p.top_k == 0 for p in params) else None
    found: dict[int, tuple[Tensor, Tensor]] = {}
    left = list(range(rows))
    for count in (*(c for c in _SELECTED if c < vocab), vocab):
        if not left:
            break
        here = slice(None) if len(left) == rows else sent(left, torch.int64, scores.device)
        values, ids = _ordered(scores[here], count)
        mass, last = _kept(
            values, [params[r] for r in left], None if total is None else total[here], count == vocab
        )
        ids, mass, last, *along = fetched(ids, mass, last, *along)
        enough: list[bool] = last.tolist()
        for i, r in enumerate(left):
            if enough[i]:
                found[r] = (ids[i], mass[i])
        left = [r for i, r in enumerate(left) if not enough[i]]
    ordered = [found[r] for r in range(rows)]
    return _stack([ids for ids, _ in ordered]), _stack([mass for _, mass in ordered]), along


def _log_mass(scores: Tensor) -> Tensor:
    """logsumexp of each row, [s, 1], by way of log_softmax: that goes row by row, while a sum over one long
    row is split among threads, and rounds otherwise than the same row among others."""
    return scores.amax(-1, keepdim=True) - scores.log_softmax(dim=-1).amax(-1, keepdim=True)


def _stack(rows: Sequence[Tensor]) -> Tensor:
    """Rows of different lengths, padded with 0."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def _ordered(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` highest scores, best first, higher ids first among equals, and their ids."""
    values, ids = scores.topk(count, dim=-1)
    ids, by_id = ids.sort(dim=-1, descending=True)
    values, by_value = values.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, by_value)


def _kept(
    values: Tensor, params: Sequence[LawParams], total: Tensor | None, everything: bool
) -> tuple[Tensor, Tensor]:
    """Probabilities of the candidates that survive, and for each row, bool [s], whether these are all survivors.

    Survivors are a beginning of each row. Equals of the k-th score survive top-k; among equals at the edge
    of the nucleus the higher ids survive. Both are what transformers' filters do.
    """
    places = torch.arange(values.shape[-1], device=values.device)
    told = sent([(p.top_k, p.top_p, p.min_p) for p in params], torch.float64, values.device)[:, :, None]
    limited, counts = told[:, 0] > 0, told[:, 0].long()
    counts = torch.where(limited, counts, len(places))
    kth = values.gather(-1, (counts - 1).clamp(max=len(places) - 1))
    keep = (values >= kth) | (counts > len(places))
    inside = values.masked_fill(~keep, -torch.inf)
    whole = _log_mass(inside)
    probs = (inside - (whole if total is None else torch.where(limited, whole, total))).exp()
    mass = told[:, 1].to(values.dtype)
    # The likeliest id always stays, and top_p = 1 cuts nothing, however the sums are rounded.
    keep &= (probs.cumsum(-1) - probs < mass) | (places == 0) | (mass == 1)
    keep &= probs >= told[:, 2].to(values.dtype) * probs[:, :1]
    # If the last candidate fell out, so did all that are less likely; equals of it might not have.
    last, edge = values[:, -1:], values.gather(-1, (keep.sum(-1, keepdim=True) - 1).clamp(min=0))
    enough = ~keep[:, -1:] & (last < edge) & ((counts <= len(places)) | ~limited)
    probs = values.masked_fill(~keep, -torch.inf).softmax(dim=-1)
    return probs, enough[:, 0] | everything
