"""An EAGLE head run in torch: slots, then trees level by level. Knows no request, no text and no acceptance.

On any device and for every head; what native/eagle.c does must agree with it up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from sooner.config import Budget
from sooner.core.tree import EMPTY, ROOT, Draft
from sooner.draft.runner import Fitted, Part
from sooner.draft.slots import Scratch, Slots
from sooner.model.lanes import LaneCache
from sooner.model.linear import Linear, pack


@dataclass(frozen=True, slots=True)
class _Root:
    """A request whose tree begins: its lane, slots it holds, the place in the text of its first, its last slot's
    output [1, h]: what is fed back, and what the LM head reads."""

    lane: int
    held: int
    first: int
    fed: Tensor
    read: Tensor


@dataclass(slots=True)
class _Pool:
    """Everything scored so far for R requests, level by level: tokens, parents, ranks, scores, [R, n] each."""

    tokens: list[Tensor] = field(default_factory=list)
    parents: list[Tensor] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)
    size: int = 0

    def add(self, tokens: Tensor, parents: Tensor, scores: Tensor) -> None:
        self.tokens.append(tokens)
        self.parents.append(parents)
        self.scores.append(scores)
        self.size += tokens.shape[1]


class TorchRunner:
    """Runs the head of `fitted`, whose linear maps are packed here."""

    def __init__(self, fitted: Fitted) -> None:
        config, kind, place = fitted.head.config, fitted.embedding.dtype, fitted.embedding.device
        self._head, self._embedding, self._ids = fitted.head, fitted.embedding, fitted.ids
        self._head.prepare(_packed)
        self._project = fitted.ends.project if config.version == 1 else self._head.head
        self._beams, self._least = fitted.beams, fitted.least
        self._slots = Slots(config.heads, config.kv_heads, config.head_dim, kind, place)

    @property
    def lanes(self) -> LaneCache:
        """One lane a request."""
        return self._slots.lanes

    @torch.no_grad()
    def draft(self, parts: Sequence[Part]) -> list[Draft]:
        """Make the slots of all parts in one pass, then grow their trees; see Runner."""
        roots = self._make(parts)
        ready: dict[int, list[int]] = {}  # by width: chains and trees expand differently
        for i, part in enumerate(parts):
            if not part.budget.empty:
                ready.setdefault(part.budget.width, []).append(i)
        drafts = [EMPTY] * len(parts)
        for width, members in ready.items():
            chosen = [parts[i].budget for i in members]
            pool = self._grow(
                [roots[i] for i in members], width, max(b.depth for b in chosen), max(b.nodes for b in chosen)
            )
            for i, draft in zip(members, _drafts(pool, chosen), strict=True):
                drafts[i] = draft
        return drafts

    def _make(self, parts: Sequence[Part]) -> list[_Root]:
        """One pass of the head over slots of true features."""
        place, kind = self._embedding.device, self._embedding.dtype
        tokens = [token for part in parts for token in part.tokens]
        positions = [at for part in parts for at in part.positions]
        fused = self._head.fuse(torch.cat([part.features for part in parts]).to(kind))
        tables = self._head.rotary(torch.tensor(positions, device=place), kind)
        attend = self._slots.chunks([(part.lane, part.held, len(part.features)) for part in parts])
        fed, read = self._head(self._embedding[torch.tensor(tokens, device=place)], fused, tables, attend)
        roots, end = [], 0
        for part in parts:
            end += len(part.features)
            part.settle(self.lanes)
            roots.append(_Root(part.lane, part.end, part.first, fed[end - 1 : end], read[end - 1 : end]))
        return roots

    def _grow(self, roots: Sequence[_Root], width: int, depth: int, nodes: int) -> _Pool:
        """Score nodes level by level: every beam's likeliest tokens, of which the best are the next beams."""
        pool, count = _Pool(), len(roots)
        fed = torch.cat([root.fed for root in roots])
        read = torch.cat([root.read for root in roots])
        at = torch.tensor([root.first + root.held for root in roots], device=fed.device)
        above = fed.new_zeros((count, 1))  # log-probability of each beam's path
        beam_nodes = torch.full((count, 1), ROOT, device=fed.device)
        scratch = self._slots.scratch([root.lane for root in roots], [root.held for root in roots])
        for level in range(depth):
            beams = above.shape[1]
            logs, tokens = self._likeliest(read, width)
            scores = (above.reshape(-1, 1) + logs).view(count, -1)
            tokens = tokens.view(count, -1)
            children = tokens.shape[1] // beams
            pool.add(tokens, beam_nodes.repeat_interleave(children, dim=1), scores)
            if level + 1 == depth:
                break
            kept = min(1 if width == 1 else self._beams, scores.shape[1])
            above, chosen = scores.topk(kept, dim=1)
            if self._enough(pool, above, nodes):
                break
            rows = (chosen // children + torch.arange(count, device=fed.device)[:, None] * beams).flatten()
            beam_nodes = pool.size - scores.shape[1] + chosen
            fed, read = self._expand(scratch, fed[rows], tokens.gather(1, chosen), at + level, rows)
        return pool

    def _expand(
        self, scratch: Scratch, fed: Tensor, tokens: Tensor, at: Tensor, parents: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One pass of the head over all beams [R, B]; parents: the row of the last pass each hangs off."""
        beams = tokens.shape[1]
        tables = self._head.rotary(at.repeat_interleave(beams), fed.dtype)
        attend = scratch.level(beams, parents)
        result: tuple[Tensor, Tensor] = self._head(self._embedding[tokens.flatten()], fed, tables, attend)
        return result

    def _likeliest(self, read: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """(log-probabilities, target ids) of the likeliest tokens of each row, [N, min(width, beams)]."""
        assert self._project is not None
        logits = self._project(read)
        best = logits.topk(min(max(width, 1), self._beams, logits.shape[-1]), dim=-1)
        logs = best.values.float() - logits.float().logsumexp(-1, keepdim=True)
        return logs, best.indices if self._ids is None else self._ids[best.indices]

    def _enough(self, pool: _Pool, above: Tensor, nodes: int) -> bool:
        """Whether nothing deeper can be among the best `nodes`, or it is too unlikely to be worth a pass."""
        if float(above.exp().sum(1).max()) < self._least:
            return True
        if pool.size < nodes:
            return False
        bar = torch.cat(pool.scores, dim=1).topk(nodes, dim=1).values[:, -1]
        return bool((above[:, 0] <= bar).all())


def _packed(linear: nn.Linear) -> Linear:
    return pack([linear.weight], [linear.bias])


def _drafts(pool: _Pool, budgets: Sequence[Budget]) -> list[Draft]:
    """For each request the best nodes within its budget, parents first."""
    tokens, parents, scores = (torch.cat(x, dim=1).tolist() for x in (pool.tokens, pool.parents, pool.scores))
    return [_draft(t, p, s, b) for t, p, s, b in zip(tokens, parents, scores, budgets, strict=True)]


def _draft(tokens: list[int], parents: list[int], scores: list[float], budget: Budget) -> Draft:
    """Scores never rise from a node to its child, and children come later, so the best set holds its ancestors."""
    depth: list[int] = []
    for parent in parents:
        depth.append(1 if parent == ROOT else depth[parent] + 1)
    able = [i for i in range(len(tokens)) if depth[i] <= budget.depth and scores[i] > float("-inf")]
    best = sorted(sorted(able, key=lambda i: (-scores[i], i))[: budget.nodes])
    place = {node: i for i, node in enumerate(best)} | {ROOT: ROOT}
    chances = torch.tensor([scores[i] for i in best]).exp().clamp(max=1.0).tolist()
    return Draft(tuple(tokens[i] for i in best), tuple(place[parents[i]] for i in best), None, tuple(chances))
