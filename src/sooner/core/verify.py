"""Judges the drafts of one pass: a batch of segments, each by its rule, with noise. Knows no rule itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from sooner.core import noise
from sooner.core.law import Law, draw
from sooner.core.rules import Chance, Laws, Verdict, block, match, reject, traversal
from sooner.core.sparse import Sparse, sparse
from sooner.core.tree import ROOT, Draft, depths, is_chain, keep

Rule = Literal["match", "reject", "block", "traversal"]


@dataclass(frozen=True, slots=True)
class Trial:
    """One segment to judge: `first` is the row of its root in the laws, its nodes follow in order.

    root: position of the root in the text. A greedy row is judged by match, whatever the rule; block judges
    chains, and a tree that asks for it is judged by traversal, which is the same on chains.
    """

    first: int
    draft: Draft
    root: int
    seed: int
    rule: Rule


class NoiseChance:
    """Chance from counter-based noise: every draw of a round has a key of its own.

    names: int64 [K], the id each column of a law stands for; None = the columns themselves.
    """

    def __init__(self, seed: int, root: int, names: Tensor | None = None) -> None:
        self._seed, self._root, self._names, self._draws = seed, root, names, 0

    def _key(self, depth: int, stream: int) -> int:
        self._draws += 1
        return noise.key(self._seed, self._root + depth, stream, self._root, self._draws)

    def coin(self, probability: float, depth: int) -> bool:
        return noise.uniform(self._key(depth, noise.COIN)) < probability

    def pick(self, weights: Tensor | Sparse, depth: int) -> int:
        if isinstance(weights, Sparse):
            return weights.draw(self._key(depth, noise.RESIDUAL))
        names = None if self._names is None else self._names[None]
        return noise.race_row(weights[None], 0, self._key(depth, noise.RESIDUAL), names)


def verify(law: Law, trials: Sequence[Trial]) -> list[Verdict]:
    """Judge every trial against its rows of `law`."""
    verdicts = []
    for trial in trials:
        here = slice(trial.first, trial.first + 1 + len(trial.draft))
        if trial.rule == "match" or law.greedy(trial.first):
            verdict = match(_Picks(law, trial), trial.draft)
        elif law.broken[trial.first]:
            verdict = Verdict((), -1)
        else:
            verdict = _judge(law, trial, law.broken[here])
        verdicts.append(_cut_at_broken(verdict, law.broken[here]))
    return verdicts


def _judge(law: Law, trial: Trial, broken: Sequence[bool]) -> Verdict:
    """Judge one drawn trial by its rule. What hangs below a broken row cannot be judged and is left out."""
    kept: list[int] = []
    for node, parent in enumerate(trial.draft.parents):
        if parent == ROOT or (parent in kept and not broken[parent + 1]):
            kept.append(node)
    rows = [trial.first, *(trial.first + 1 + node for node in kept)]
    draft, names = keep(trial.draft, kept), None
    laws: Laws | None = sparse(law, rows, draft) if draft.probs is None else None
    if laws is None:
        laws, draft, names = _together(law, rows, draft)
    chance: Chance = NoiseChance(trial.seed, trial.root, names)
    if trial.rule == "reject":
        verdict = reject(laws, draft, chance)
    else:
        chain = trial.rule == "block" and is_chain(draft.parents)
        verdict = (block if chain else traversal)(laws, draft, chance)
    return replace(verdict, path=tuple(kept[node] for node in verdict.path))


def _together(law: Law, rows: Sequence[int], draft: Draft) -> tuple[Tensor, Draft, Tensor | None]:
    """The laws of some rows as one table [1 + n, K], their draft in the table's columns, the columns' ids.

    Truncated laws share few ids: only those, and the drafted ones, get a column.
    """
    if draft.probs is not None:
        # In full precision: what was drawn from bfloat16 weights has probability weight / sum, unrounded.
        weights = draft.probs.detach()
        weights = weights if weights.dtype == torch.float64 else weights.float()
        draft = replace(draft, probs=weights / weights.sum(-1, keepdim=True))
    if any(law.place[r][0] == "wide" for r in rows):
        tables = [law.row(r) for r in rows]
        return torch.stack([table for table in tables if table is not None]), draft, None
    index = [law.place[r][1] for r in rows]
    ids, mass = law.ids[index], law.mass[index]
    tokens = torch.tensor(draft.tokens, dtype=torch.int64, device=ids.device)
    names = torch.unique(torch.cat([ids.flatten(), tokens]))
    laws = mass.new_zeros((len(index), len(names)))
    laws.scatter_add_(1, torch.searchsorted(names, ids), mass)
    columns = tuple(torch.searchsorted(names, tokens).tolist())
    probs = draft.probs
    if probs is not None:  # laws of few candidates lie on the host
        probs = probs[:, names.to(probs.device)].to(mass.device)
    return laws, replace(draft, tokens=columns, probs=probs), names


class _Picks:
    """The target's own choice after each row of a trial: the likeliest id, or the draw its TARGET noise makes.

    Drawn when asked for: only the rows of the path that survives are; but all at once where that takes one wait
    for a device instead of many.
    """

    def __init__(self, law: Law, trial: Trial) -> None:
        self._law, self._trial = law, trial
        self._depths: tuple[int, ...] = ()
        self._drawn: dict[int, int] = {}

    def __getitem__(self, row: int) -> int:
        trial, r = self._trial, self._trial.first + row
        if self._law.greedy(r):
            return self._law.best[r]
        if row not in self._drawn:
            self._depths = self._depths or (0, *depths(trial.draft.parents))
            rows = range(len(self._depths)) if self._law.afar(r) else (row,)
            keys = [noise.key(trial.seed, trial.root + self._depths[i] + 1, noise.TARGET) for i in rows]
            drawn = draw(self._law, [trial.first + i for i in rows], keys)
            self._drawn.update(zip(rows, drawn, strict=True))
        return self._drawn[row]


def _cut_at_broken(verdict: Verdict, broken: Sequence[bool]) -> Verdict:
    """A row without a law ends the path there; the request that owns it ends with an error."""
    nodes = (ROOT, *verdict.path)
    for length, node in enumerate(nodes):
        if broken[node + 1]:
            return Verdict(verdict.path[:length], -1, broken=True)
    return verdict
