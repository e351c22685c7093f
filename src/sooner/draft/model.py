"""A smaller causal model as drafter: it draws a chain, one pass a token. Knows nothing of acceptance.

Its lanes follow the text by content: whatever became of the last draft, `settle` finds what is still
right and the next segment holds what is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from sooner.config import Budget
from sooner.core import noise
from sooner.core.edit import Edit, LawParams
from sooner.core.host import sent
from sooner.core.law import draw, law
from sooner.core.step import Segment, pack
from sooner.core.tree import EMPTY, Draft, chain
from sooner.draft.protocol import Context, Outcome
from sooner.errors import ConfigError
from sooner.model.lanes import LaneCache
from sooner.model.protocol import Model

_CHUNK = 512  # rows of one request in one pass while catching up with a prompt


class Ids(Protocol):
    """How a draft model's ids stand to the target's. width: the laws are over the target's first `width` ids."""

    width: int

    def text(self, context: Context) -> Sequence[int] | None:
        """The text in the model's ids; None where it has none."""

    def theirs(self, logits: Tensor) -> Tensor:
        """Logits over the model's ids as [n, width], -inf for ids of the target that the model does not have."""

    def own(self, token: int) -> int:
        """The model's id for one of the target's that `theirs` has."""


class SameIds:
    """One tokenizer for both; either may have more ids than the other, by padding."""

    def __init__(self, vocab: int, own: int) -> None:
        self.width, self._own = min(vocab, own), own

    def text(self, context: Context) -> Sequence[int] | None:
        return None if max(context.tokens) >= self._own else context.tokens

    def theirs(self, logits: Tensor) -> Tensor:
        return logits[:, : self.width]

    def own(self, token: int) -> int:
        return token


@dataclass(slots=True)
class _Chain:
    """A draft in the making: where it came from and the tokens and laws drawn so far.

    known: text and drawn tokens in the model's own ids. tokens: the drawn ones in the target's.
    """

    context: Context
    lane: int
    depth: int
    known: list[int]
    tokens: list[int] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)
    done: bool = False

    def next_segment(self, model: Model) -> Segment:
        held = model.lanes.settle(self.lane, self.known[:-1])
        missing = self.known[held : held + _CHUNK]
        return Segment(self.lane, held, tuple(missing), law=held + len(missing) == len(self.known))


class ModelDrafter:
    """Chains drawn from `model`, by the target's own parameters.

    vocab: width of the target's logits. ids: how the model's own ids stand to them; by default they are the same,
        and there may be more or fewer by padding.
    name: how reports call it.
    confidence: drafting stops *after* a token that the model gave less than this probability; such a
        token is still proposed, since leaving out drawn tokens would bias the output. 0 = never stop.
    """

    taps: tuple[int, ...] = ()

    def __init__(
        self, model: Model, vocab: int, confidence: float = 0.4, *, name: str = "model", ids: Ids | None = None
    ) -> None:
        if not 0 <= confidence <= 1:
            raise ConfigError(f"confidence must be from 0 to 1, got {confidence}.")
        self.model, self.name = model, name
        self._vocab = vocab
        self._ids = ids or SameIds(vocab, model.vocab_size)
        self._confidence = confidence
        self._lanes: dict[str, int] = {}

    @property
    def caches(self) -> tuple[LaneCache, ...]:
        """Its keys and values, which count against the memory limit."""
        return (self.model.lanes,)

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        chains = [self._start(context, budget) for context, budget in zip(contexts, budgets, strict=True)]
        while active := [c for c in chains if c is not None and not c.done]:
            self._advance(active)
        return [EMPTY if c is None else self._finish(c) for c in chains]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """The text of the next context says it all."""

    def forget(self, request_id: str) -> None:
        lane = self._lanes.pop(request_id, None)
        if lane is not None:
            self.model.lanes.close(lane)

    def _start(self, context: Context, budget: Budget) -> _Chain | None:
        limit = self.model.context_limit
        depth = min(budget.depth, budget.nodes) if budget.width else 0
        text = self._ids.text(context) if depth else None
        if text is None:
            return None
        if limit is not None:
            depth = min(depth, limit - len(text) + 1)
        if depth <= 0:
            return None
        lane = self._lanes.get(context.request_id)
        if lane is None:
            lane = self._lanes[context.request_id] = self.model.lanes.open()
        return _Chain(context, lane, depth, list(text))

    def _advance(self, chains: Sequence[_Chain]) -> None:
        """One pass for all chains; those that are up to date draw one token each."""
        segments = [c.next_segment(self.model) for c in chains]
        step = pack(segments)
        logits = self._ids.theirs(self.model.forward(step, rows=step.law_rows).logits)
        drawing = [c for c, segment in zip(chains, segments, strict=True) if segment.law]
        if drawing:
            self._draw(drawing, logits)

    def _draw(self, chains: Sequence[_Chain], logits: Tensor) -> None:
        edits = [
            Edit(r, _narrowed(c.context.law, self._ids.width), c.context.past, (tuple(c.tokens),))
            for r, c in enumerate(chains)
            if c.context.past is not None
        ]
        laws = law(logits, [c.context.law for c in chains], edits)
        sampled = [r for r, c in enumerate(chains) if not c.context.law.greedy]
        drawn = dict(zip(sampled, draw(laws, sampled, [_key(chains[r]) for r in sampled]), strict=True))
        sure = self._sure(logits, laws.best)
        for r, c in enumerate(chains):
            if laws.broken[r]:
                c.done = True
                continue
            row = laws.row(r)
            token = drawn.get(r, laws.best[r])
            c.tokens.append(token)
            c.known.append(self._ids.own(token))
            if row is not None and c.context.rule != "match":
                c.probs.append(row)
            certainty = sure[r] if row is None else float(row[token])
            c.done = len(c.tokens) >= c.depth or certainty < self._confidence

    def _sure(self, logits: Tensor, best: Sequence[int]) -> list[float]:
        """Probability of the likeliest token, for greedy rows."""
        if self._confidence == 0:
            return [1.0] * len(logits)
        named = sent(best, torch.int64, logits.device)[:, None]
        certain: list[float] = logits.float().softmax(-1).gather(-1, named)[:, 0].tolist()
        return certain

    def _finish(self, c: _Chain) -> Draft:
        if not c.probs:
            return chain(c.tokens)
        probs = torch.stack(c.probs)
        return chain(c.tokens, torch.nn.functional.pad(probs, (0, self._vocab - probs.shape[1])))


def _narrowed(params: LawParams, vocab: int) -> LawParams:
    """The target's parameters over a draft vocabulary that may be smaller; the caller's own processors are
    left to the target, whose rows they expect."""
    return replace(
        params,
        bias=tuple((token, added) for token, added in params.bias if token < vocab),
        allowed=None if params.allowed is None else tuple(token for token in params.allowed if token < vocab),
        forbidden=tuple(token for token in params.forbidden if token < vocab),
        bad_words=tuple(word for word in params.bad_words if word[-1] < vocab),
        processors=(),
    )


def _key(c: _Chain) -> int:
    """Under *match* the target's own noise, so that close laws choose alike; under *reject* noise of its own."""
    root = len(c.context.tokens) - 1
    position = root + len(c.tokens) + 1
    if c.context.rule == "match":
        return noise.key(c.context.seed, position, noise.TARGET)
    return noise.key(c.context.seed, position, noise.DRAFT, root)
