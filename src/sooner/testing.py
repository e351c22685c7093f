"""Doubles and conformance checks, shipped for users' own drafters and models. Knows nothing of files.

ToyModel: a Model without a network, whose logits are a hash of exactly what the mask lets a row see.
ShiftedModel: a fault on purpose.
ScriptedDrafter: plays back drafts from a function. check_drafter, check_model: the protocols, executed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from sooner.config import Budget
from sooner.core.edit import LawParams
from sooner.core.step import Segment, Step, pack
from sooner.core.tree import EMPTY, Draft, chain
from sooner.draft.protocol import Context, Drafter, Outcome
from sooner.engine.guard import problem
from sooner.errors import DraftError, ModelError
from sooner.model.attention import visible
from sooner.model.lanes import LaneCache, staged_parents
from sooner.model.protocol import Model, Output

_MODULUS = 2**31 - 1


class ToyModel:
    """Logits [V] of a row = a hash of the (token, position) of every column the row may see.

    Keys are stored in real lanes, so a mistake in a mask, a position, a stage, a settle or the reuse of
    a lane changes the text. `next_logits` computes the same from a plain list of tokens.

    vocab: number of ids. order: with chance (order - 1) / order the hash is that of the last token
    alone, so texts repeat themselves and lookup has something to find; 1 = always the whole text.
    """

    def __init__(
        self, vocab: int = 17, *, order: int = 1, context_limit: int | None = None, spread: float = 3.0
    ) -> None:
        self.vocab_size = vocab
        self.context_limit = context_limit
        self.lanes = LaneCache(1, 1, 1, torch.float64)
        self._order, self._spread = order, spread

    def forward(self, step: Step, *, rows: Tensor, taps: Sequence[int] = ()) -> Output:
        """One pass; features are the hash of what each row sees, [N, len(taps), 1]."""
        for segment in step.segments:
            self.lanes.reserve(segment.lane, segment.start, segment.rows)
        marks = _mark(step.tokens, step.positions)
        self.lanes.store[0, 0, step.lanes, 0, step.columns, 0] = marks.double()
        seen = torch.cat([self._seen(segment) for segment in step.segments])
        for segment in step.segments:
            parents = staged_parents(len(segment.certain), segment.draft.parents)
            self.lanes.stage(segment.lane, segment.certain + segment.draft.tokens, parents)
        features = seen[:, None, None].repeat(1, len(taps), 1).double() if taps else None
        return Output(self._logits(seen[rows], marks[rows]), features)

    def next_logits(self, tokens: Sequence[int]) -> Tensor:
        """The logits after `tokens`, [V], without lanes, masks or steps."""
        marks = _mark(torch.tensor(tokens), torch.arange(len(tokens)))
        return self._logits(marks.sum()[None] % _MODULUS, marks[-1:])[0]

    def _seen(self, segment: Segment) -> Tensor:
        """Hash of the columns each row of a segment sees, int64 [rows]."""
        columns = segment.start + segment.rows
        mask = visible([segment], segment.rows, columns).mask[0]
        keys = self.lanes.store[0, 0, segment.lane, 0, :columns, 0].long()
        return (mask * keys).sum(-1) % _MODULUS

    def _logits(self, seen: Tensor, last: Tensor) -> Tensor:
        whole = _scatter(seen) % self._order == 0
        state = torch.where(whole, seen, last // (2**20))
        ids = torch.arange(self.vocab_size)
        noise = _scatter(state[:, None] * 4099 + ids) % 100_003
        return self._spread * noise.double() / 100_003


def _mark(tokens: Tensor, positions: Tensor) -> Tensor:
    """One number for a token at a position; its high bits are the token's alone."""
    return tokens * 2**20 + _scatter(tokens * 7919 + positions) % 2**20


def _scatter(x: Tensor) -> Tensor:
    """A cheap hash of int64, not negative."""
    x = (x ^ (x >> 15)) * 0x2C1B3C6D % _MODULUS
    x = (x ^ (x >> 12)) * 0x297A2D39 % _MODULUS
    return x ^ (x >> 15)


class ShiftedModel:
    """A model with a fault: the first drafted row of every draft has a position id one too high.

    For testing tests: whatever claims to notice a wrong text must notice this one.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self.vocab_size, self.context_limit, self.lanes = model.vocab_size, model.context_limit, model.lanes

    def forward(self, step: Step, *, rows: Tensor, taps: Sequence[int] = ()) -> Output:
        """One pass of the model, with the fault in it."""
        starts = zip(step.segments, step.offsets, strict=False)
        shifted = [start + len(segment.certain) for segment, start in starts if len(segment.draft)]
        positions = step.positions.clone()
        positions[shifted] += 1
        return self._model.forward(replace(step, positions=positions), rows=rows, taps=taps)


class ScriptedDrafter:
    """Drafts that a function makes from (context, budget); `script` may raise or return nonsense."""

    name = "scripted"
    taps: tuple[int, ...] = ()

    def __init__(self, script: Callable[[Context, Budget], Draft]) -> None:
        self._script = script
        self.contexts: list[Context] = []
        self.outcomes: list[Outcome] = []
        self.forgotten: list[str] = []

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        self.contexts += contexts
        return [self._script(context, budget) for context, budget in zip(contexts, budgets, strict=True)]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        self.outcomes += outcomes

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)


def oracle(text: Sequence[int], right: int | None = None, vocab: int = 2) -> ScriptedDrafter:
    """Plays back `text` (prompt included). With `right`, only the first so many tokens of a draft are right."""

    def script(context: Context, budget: Budget) -> Draft:
        start = len(context.tokens)
        tokens = list(text[start : start + min(budget.depth, budget.nodes)])
        if right is not None:
            tokens[right:] = [(token + 1) % vocab for token in tokens[right:]]
        return chain(tokens)

    return ScriptedDrafter(script)


def check_drafter(make: Callable[[], Drafter], vocab: int, *, steps: int = 12, seed: int = 0) -> None:
    """Hold a drafter to the protocol. Raises DraftError naming the check that failed.

    make: a fresh drafter. vocab: width of the target's logits. Runs growing texts of several requests
    under both rules, with budgets from nothing to wide trees, texts that depart from every guess,
    requests that are forgotten and come back, and a batch that changes from call to call.
    """
    generator = torch.Generator().manual_seed(seed)

    def some(count: int) -> list[int]:
        drawn: list[int] = torch.randint(0, vocab, (count,), generator=generator).tolist()
        return drawn

    drafter = make()
    if not isinstance(drafter, Drafter):
        raise DraftError(f"{type(drafter).__name__} lacks name, taps, propose, observe or forget")
    texts = {f"check-{i}": some(1 + 7 * i) for i in range(3)}
    with _named("forget"):
        drafter.forget("check-never-seen")
    for turn in range(steps):
        ids = [name for i, name in enumerate(texts) if (turn + i) % 4]
        params = LawParams(0.0 if turn % 3 == 0 else 0.8, top_k=5 if turn % 2 else 0)
        rule = "match" if turn % 3 != 1 else "reject"
        contexts = [Context(i, texts[i], params, turn, rule) for i in ids]  # type: ignore[arg-type]  # literal
        budgets = [Budget(turn % 6, 1 + turn % 3, (turn % 6) * (1 + turn % 2)) for _ in ids]
        before = {i: list(texts[i]) for i in ids}
        with _named("propose"):
            drafts = list(drafter.propose(contexts, budgets))
        _check_turn(drafts, contexts, budgets, vocab)
        if any(texts[i] != before[i] for i in ids):
            raise DraftError("propose changed the tokens of a context")
        outcomes = []
        for draft, name in zip(drafts, ids, strict=True):
            keep = list(draft.tokens[: turn % 3]) if turn % 4 else []
            new = tuple(keep + some(1))
            texts[name] += new
            outcomes.append(Outcome(name, new, len(keep), len(draft)))
        with _named("observe"):
            drafter.observe(outcomes)
        if turn == steps // 2:
            with _named("forget"):
                drafter.forget(ids[0])
    for name in texts:
        with _named("forget"):
            drafter.forget(name)


@contextmanager
def _named(method: str) -> Iterator[None]:
    """What a method of a drafter raises becomes a DraftError that names it."""
    try:
        yield
    except Exception as error:
        raise DraftError(f"{method} raised {type(error).__name__}: {error}") from error


def _check_turn(
    drafts: Sequence[object], contexts: Sequence[Context], budgets: Sequence[Budget], vocab: int
) -> None:
    if len(drafts) != len(contexts):
        raise DraftError(f"{len(drafts)} drafts for {len(contexts)} contexts")
    for draft, context, budget in zip(drafts, contexts, budgets, strict=True):
        found = problem(draft, budget, vocab, with_probs=context.rule != "match" and not context.law.greedy)
        if found is not None:
            raise DraftError(found)


def check_model(model: Model, prompt: Sequence[int], draft: Draft, *, tolerance: float = 1e-4) -> float:
    """Hold a model to the protocol; returns the largest difference found between logits.

    Runs `prompt` in two chunks with `draft` hanging off its end, in a lane beside a busy neighbour, and
    compares every row with a pass over that row's own path alone. Then settles a path, goes on from it,
    and compares again. Raises ModelError above `tolerance` (absolute, in logits).
    """
    lanes = model.lanes
    neighbour, lane = lanes.open(), lanes.open()
    cut = max(len(prompt) // 2, 1)
    if cut < len(prompt):
        head = pack([Segment(lane, 0, tuple(prompt[:cut]), law=False)])
        model.forward(head, rows=head.law_rows)
        lanes.settle(lane, prompt)
    start = len(lanes.held(lane))
    step = pack([Segment(neighbour, 0, tuple(prompt[:2])), Segment(lane, start, tuple(prompt[start:]), draft)])
    rows = model.forward(step, rows=step.law_rows).logits[1:]
    paths = [()] + [_path(draft, node) for node in range(len(draft))]
    worst = max(_gap(row, _alone(model, [*prompt, *path])) for row, path in zip(rows, paths, strict=True))
    deepest = max(paths, key=len)
    held = lanes.settle(lane, [*prompt, *deepest])
    if held != len(prompt) + len(deepest):
        raise ModelError(f"settle kept {held} tokens of {len(prompt) + len(deepest)} that were staged")
    after = pack([Segment(lane, held, (prompt[0],))])
    row = model.forward(after, rows=after.law_rows).logits[0]
    worst = max(worst, _gap(row, _alone(model, [*prompt, *deepest, prompt[0]])))
    lanes.close(neighbour)
    lanes.close(lane)
    lanes.check()
    if not worst <= tolerance:
        raise ModelError(f"logits in a tree differ from those of the path alone by {worst:.3g} > {tolerance:g}")
    return worst


def _path(draft: Draft, node: int) -> tuple[int, ...]:
    above = () if draft.parents[node] < 0 else _path(draft, draft.parents[node])
    return (*above, draft.tokens[node])


def _alone(model: Model, tokens: Sequence[int]) -> Tensor:
    lane = model.lanes.open()
    step = pack([Segment(lane, 0, tuple(tokens))])
    logits = model.forward(step, rows=step.law_rows).logits[0]
    model.lanes.close(lane)
    return logits


def _gap(left: Tensor, right: Tensor) -> float:
    gap = float((left.float() - right.float()).abs().max())
    return math.inf if math.isnan(gap) else gap


__all__ = ["EMPTY", "ScriptedDrafter", "ShiftedModel", "ToyModel", "check_drafter", "check_model", "oracle"]
