"""EAGLE heads as drafter: dynamic trees and chains from the target's features. Knows nothing of acceptance.

A slot of the head is a function of the text before it, so its lane follows the text by content, like any
other; only slots made of the target's own features stay, those of guesses are scratch. Features come with
the outcomes, for rows the target has run; what was run before a request was first seen is simply not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from sooner.config import Budget
from sooner.core.tree import EMPTY, ROOT, Draft, follow
from sooner.draft.protocol import Context, Outcome
from sooner.draft.slots import Scratch, Slots
from sooner.errors import ConfigError, DraftError
from sooner.heads.checkpoint import Checkpoint
from sooner.model.linear import Linear, pack
from sooner.model.protocol import Ends

_CHUNK = 512  # slots made in one pass of the head while catching up with a prompt


@dataclass(slots=True)
class _State:
    """One request: its lane, features not yet made into slots, how many rows were ever seen, the first slot."""

    lane: int
    waiting: list[Tensor] = field(default_factory=list)
    seen: int = 0
    made: int = 0
    first: int | None = None
    feature: Tensor | None = None  # [1, h], what the last slot feeds back
    read: Tensor | None = None  # [1, h], what the LM head reads there


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


class EagleDrafter:
    """Drafts with the head of `checkpoint` for a target of `layers` layers with these `ends`.

    beams: nodes of one level that are expanded. least: drafting goes no deeper once all nodes to be expanded
    together are less likely than this to be reached: a step of the head would cost more than it brings.
    Raises DraftError for a head that does not fit the target, ConfigError for settings without sense.
    """

    name = "eagle"

    def __init__(
        self, checkpoint: Checkpoint, ends: Ends, *, layers: int, vocab: int, beams: int = 8, least: float = 0.1
    ) -> None:
        if beams < 1 or not 0 <= least <= 1:
            raise ConfigError(f"eagle needs beams >= 1 and 0 <= least <= 1, got {beams} and {least}.")
        head, config = checkpoint.head, checkpoint.head.config
        _check_fit(checkpoint, ends, vocab)
        place, kind = ends.embedding.device, ends.embedding.dtype
        own = checkpoint.embedding
        self._embedding = ends.embedding if own is None else own.to(place, kind)
        self._ids = None if checkpoint.ids is None else checkpoint.ids.to(place)
        self.taps = checkpoint.taps_for(layers)
        self._head = head.to(place, kind).eval().requires_grad_(False)
        self._head.prepare(_packed)
        self._project = ends.project if config.version == 1 else self._head.head
        self._beams, self._least = beams, least
        self._slots = Slots(config.heads, config.kv_heads, config.head_dim, kind, place)
        self._states: dict[str, _State] = {}

    @property
    def lanes_in_use(self) -> int:
        """Requests that hold a lane of the head."""
        return self._slots.lanes.in_use

    @torch.no_grad()
    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        able = [i for i, budget in enumerate(budgets) if not budget.empty and self._right(contexts[i])]
        self._catch_up([contexts[i] for i in able])
        ready: dict[int, list[int]] = {}  # by width: chains and trees expand differently
        for i in able:
            if self._states[contexts[i].request_id].read is not None:
                ready.setdefault(budgets[i].width, []).append(i)
        drafts = [EMPTY] * len(contexts)
        for width, members in ready.items():
            chosen = [budgets[i] for i in members]
            states = [self._states[contexts[i].request_id] for i in members]
            pool = self._grow(states, width, max(b.depth for b in chosen), max(b.nodes for b in chosen))
            for i, draft in zip(members, _drafts(pool, chosen), strict=True):
                drafts[i] = draft
        return drafts

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            if outcome.features is None or not len(outcome.features):
                continue
            path = follow(outcome.draft, outcome.tokens[: outcome.accepted])
            if len(path) < outcome.accepted or len(outcome.draft) != outcome.drafted:
                self.forget(outcome.request_id)  # which rows are the text's is not known
                continue
            certain = len(outcome.features) - outcome.drafted
            features = outcome.features[:certain]
            if path:
                rows = torch.tensor([certain + node for node in path], device=features.device)
                features = torch.cat([features, outcome.features[rows]])
            state = self._states.get(outcome.request_id)
            if state is None:
                state = self._states[outcome.request_id] = _State(self._slots.lanes.open())
            state.waiting.append(features)
            state.seen += len(features)

    def forget(self, request_id: str) -> None:
        state = self._states.pop(request_id, None)
        if state is not None:
            self._slots.lanes.close(state.lane)

    def _right(self, context: Context) -> bool:
        """Whether what is kept of a request goes with its text; if not, it is dropped."""
        state = self._states.get(context.request_id)
        if state is None:
            return False
        known = len(context.tokens) - 1  # tokens the target has run: all but the last
        if state.first is None:
            state.first = known - state.seen
        right = state.first >= 0 and state.first + state.seen == known
        if right and self._slots.lanes.settle(state.lane, context.tokens[state.first + 1 :]) == state.made:
            return True
        self.forget(context.request_id)  # the id has a new life, or rows were missed
        return False

    def _catch_up(self, contexts: Sequence[Context]) -> None:
        """Make slots of all features that have come, for all requests in the same passes of the head."""
        behind = []
        for context in contexts:
            state = self._states[context.request_id]
            if state.waiting:
                behind.append((state, list(context.tokens[(state.first or 0) + 1 :]), torch.cat(state.waiting)))
                state.waiting = []
        while behind:
            self._make([(state, text, features[:_CHUNK]) for state, text, features in behind])
            behind = [(s, text, features[_CHUNK:]) for s, text, features in behind if len(features) > _CHUNK]

    def _make(self, parts: Sequence[tuple[_State, list[int], Tensor]]) -> None:
        """One pass of the head over slots of true features: (state, text from its first slot on, features)."""
        place, kind = self._embedding.device, self._embedding.dtype
        tokens: list[int] = []
        positions: list[int] = []
        for state, text, features in parts:
            first = state.first or 0
            tokens += text[state.made : state.made + len(features)]
            positions += range(first + state.made, first + state.made + len(features))
        fused = self._head.fuse(torch.cat([features for _, _, features in parts]).to(kind))
        tables = self._head.rotary(torch.tensor(positions, device=place), kind)
        attend = self._slots.chunks([(state.lane, state.made, len(features)) for state, _, features in parts])
        fed, read = self._head(self._embedding[torch.tensor(tokens, device=place)], fused, tables, attend)
        end = 0
        for state, text, features in parts:
            end += len(features)
            made = state.made + len(features)
            self._slots.keep(state.lane, text[state.made : made], text)
            state.made, state.feature, state.read = made, fed[end - 1 : end], read[end - 1 : end]

    def _grow(self, states: Sequence[_State], width: int, depth: int, nodes: int) -> _Pool:
        """Score nodes level by level: every beam's likeliest tokens, of which the best are the next beams."""
        pool, count = _Pool(), len(states)
        fed = torch.cat([s.feature for s in states if s.feature is not None])
        read = torch.cat([s.read for s in states if s.read is not None])
        at = torch.tensor([(s.first or 0) + s.made for s in states], device=fed.device)
        above = fed.new_zeros((count, 1))  # log-probability of each beam's path
        beam_nodes = torch.full((count, 1), ROOT, device=fed.device)
        scratch = self._slots.scratch([s.lane for s in states], [s.made for s in states])
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


def _check_fit(checkpoint: Checkpoint, ends: Ends, vocab: int) -> None:
    config = checkpoint.head.config
    hidden = ends.embedding.shape[1]
    if config.target_hidden != hidden:
        raise DraftError(f"the head reads streams {config.target_hidden} wide, the target's are {hidden} wide.")
    if config.vocab != vocab:
        raise DraftError(
            f"the head is for {config.vocab} token ids, the target has {vocab}: another target's head?"
        )


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
