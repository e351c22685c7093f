"""How far a row's logits depend on the rows beside it, and what of that is rounding. Knows no text and no drafter.

A row is the same function of its own path whether it is run alone, among other certain tokens, or as a node
of a draft; kernels may round it differently, in trees above all, where a path's keys lie scattered. How far
margins move thereby is measured; how far rounding can move them at all is known from the dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sooner.core.step import Segment, pack
from sooner.core.tree import EMPTY, ROOT, Draft, chain
from sooner.model.protocol import Model

_CHUNK = 512  # prompt rows a pass, as in EngineConfig
_FACTOR = 2.0  # the rows that are looked at are not all there are
# Most that rounding does to a margin, in eps of the dtype times the largest logit. Half types sum in float32
# and round once an operation (measured: 1.9 in bfloat16); float32 rounds every sum (measured: 16).
_MOST = {torch.bfloat16: 4.0, torch.float16: 4.0}
_MOST_WIDE = 64.0


@dataclass(frozen=True, slots=True)
class Noise:
    """What rounding may do to a margin, the difference of two logits of a row.

    scale: the largest logit seen. least: eps of the dtype times scale. most: the most that rounding explains.
    chain, tree: how far the margins of a row moved at most, among others in a chain (of certain tokens, and of
        a draft) and in a tree, from those of the row alone; tree is None where drafts are chains.
    """

    dtype: str
    scale: float
    least: float
    most: float
    chain: float
    tree: float | None

    @property
    def measured(self) -> float:
        return max(self.chain, self.tree or 0.0)

    @property
    def bound(self) -> float:
        """2 * measured, but at least `least` and at most `most`: a text that parts at a larger margin is wrong.

        Broken rows say nothing of rounding, so there it is `least`.
        """
        return self.least if self.broken else min(max(_FACTOR * self.measured, self.least), self.most)

    @property
    def broken(self) -> bool:
        """Whether rows differ by more than rounding explains, whatever the texts say."""
        return self.measured > self.most


def probe(plain: Model, drafting: Model, texts: Sequence[Sequence[int]], height: int, *, trees: bool) -> Noise:
    """The noise of the last rows of `texts`: run alone by `plain`, and together and as drafts by `drafting`.

    height: rows of a draft, its root included. The two models share their lanes (they are one, but for tests).
    """
    scale = chains = scattered = 0.0
    for text in texts:
        rows = min(height, len(text) - 1)
        alone = after(plain, text, rows)
        scale = max(scale, float(alone[alone.isfinite()].abs().max()))
        straight = _drafted(drafting, text, rows, *_chain(text, rows))
        chains = max(chains, _moved(alone, _together(drafting, text, rows)), _moved(alone, straight))
        if trees:
            branched = _drafted(drafting, text, rows, *_tree(text, rows, plain.vocab_size))
            scattered = max(scattered, _moved(alone, branched))
    dtype = plain.lanes.store.dtype
    least = torch.finfo(dtype).eps * scale
    most = _MOST.get(dtype, _MOST_WIDE) * least
    return Noise(str(dtype).removeprefix("torch."), scale, least, most, chains, scattered if trees else None)


def after(model: Model, tokens: Sequence[int], rows: int = 1) -> Tensor:
    """Logits [rows, V] after each of the last `rows` tokens, as plain decoding computes them, in float32 or wider.

    Each of these rows is a pass of its own; what lies before them goes in chunks, as a prompt does.
    """
    lane = model.lanes.open()
    try:
        start = _begin(model, lane, tokens, rows)
        found = []
        for place in range(start, len(tokens)):
            found.append(_run(model, Segment(lane, place, (tokens[place],)), tokens))
        return torch.cat(found)
    finally:
        model.lanes.close(lane)


def _together(model: Model, tokens: Sequence[int], rows: int) -> Tensor:
    """The same logits, the last tokens being certain and in one pass."""
    lane = model.lanes.open()
    try:
        start = _begin(model, lane, tokens, rows)
        return _run(model, Segment(lane, start, tuple(tokens[start:]), scored=True), tokens)
    finally:
        model.lanes.close(lane)


def _drafted(model: Model, tokens: Sequence[int], rows: int, draft: Draft, nodes: Sequence[int]) -> Tensor:
    """The same logits, all but the first of the last tokens being `nodes` of a draft."""
    lane = model.lanes.open()
    try:
        start = _begin(model, lane, tokens, rows)
        logits = _run(model, Segment(lane, start, (tokens[start],), draft), tokens)
        return logits[[0, *(1 + node for node in nodes)]]
    finally:
        model.lanes.close(lane)


def _begin(model: Model, lane: int, tokens: Sequence[int], rows: int) -> int:
    """Fill the lane with all but the last `rows` tokens; returns how many that are."""
    end = len(tokens) - rows
    for start in range(0, end, _CHUNK):
        stop = min(start + _CHUNK, end)
        _run(model, Segment(lane, start, tuple(tokens[start:stop]), law=False), tokens)
    return end


def _run(model: Model, segment: Segment, tokens: Sequence[int]) -> Tensor:
    step = pack([segment])
    logits = model.forward(step, rows=step.law_rows).logits
    model.lanes.settle(segment.lane, tokens)
    return logits if logits.dtype == torch.float64 else logits.float()


def _chain(text: Sequence[int], rows: int) -> tuple[Draft, Sequence[int]]:
    draft = chain(text[len(text) - rows + 1 :])
    return draft, range(len(draft))


def _tree(text: Sequence[int], rows: int, vocab: int) -> tuple[Draft, Sequence[int]]:
    """The chain with a wrong sibling after every node, so that columns are not positions."""
    tokens: list[int] = []
    parents: list[int] = []
    above = ROOT
    for token in text[len(text) - rows + 1 :]:
        tokens += [token, (token + 1) % vocab]
        parents += [above, above]
        above = len(tokens) - 2
    return (Draft(tuple(tokens), tuple(parents)) if tokens else EMPTY), range(0, len(tokens), 2)


def _moved(left: Tensor, right: Tensor) -> float:
    """By how much a margin of any row differs at most; infinite where only one side is a number."""
    gaps = torch.where(left == right, 0.0, left - right)
    return float(gaps.amax(-1).sub(gaps.amin(-1)).nan_to_num(nan=math.inf).max())
