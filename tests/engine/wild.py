"""Drafts and failures at random, for tests that nothing of it changes a text. Knows the right text ahead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import torch
from torch import Tensor

from sooner.config import Budget
from sooner.control.protocol import Guess, Note, StepRecord, View
from sooner.core.step import Step
from sooner.core.tree import ROOT, Draft
from sooner.draft.protocol import Context, Outcome
from sooner.model.protocol import Output
from sooner.testing import ToyModel

NOTHING = Budget(0, 0, 0)


class Broken(Exception):
    """What a failing drafter or model of these tests raises."""


class WildController:
    """Another budget for every request at every step, too large ones and empty ones among them, and other nodes
    of the draft that it leaves out."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def budgets(self, views: Sequence[View]) -> list[Budget]:
        return [self._one() for _ in views]

    def keep(self, views: Sequence[View], guesses: Sequence[Guess]) -> list[tuple[int, ...] | None]:
        return [None if guess.drawn or self._random.random() < 0.5 else self._some(guess) for guess in guesses]

    def observe(self, record: StepRecord) -> None:
        assert 0 <= record.accepted <= record.drafted <= record.rows
        for tried in record.tried:
            assert set(tried.path) <= set(tried.kept) <= set(range(len(tried.guess)))

    def leave(self, request_id: str) -> Note:
        return Note("wild")

    def _some(self, guess: Guess) -> tuple[int, ...]:
        """Nodes at random, each with its parent."""
        kept: list[int] = []
        for node, parent in enumerate(guess.parents):
            if (parent in kept or parent == ROOT) and self._random.random() < 0.7:
                kept.append(node)
        return tuple(kept)

    def _one(self) -> Budget:
        if self._random.random() < 0.2:
            return NOTHING
        return Budget(self._random.randint(0, 6), self._random.randint(0, 3), self._random.randint(0, 14))


class WildDrafter:
    """Random trees, some nodes right and some wrong. `trouble`: chance that a call goes wrong in some way.

    ahead: the whole right text (prompt included) of a context, as far as it is known.
    """

    name = "wild"
    taps: tuple[int, ...] = ()

    def __init__(
        self, random: Random, vocab: int, ahead: Callable[[Context], Sequence[int]], trouble: float = 0.0
    ) -> None:
        self._random, self._vocab, self._ahead, self._trouble = random, vocab, ahead, trouble
        self.proposed = 0

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        if self._fails():
            raise Broken("propose")
        drafts = [self._draft(context, budget) for context, budget in zip(contexts, budgets, strict=True)]
        self.proposed += sum(isinstance(d, Draft) and len(d) > 0 for d in drafts)
        return drafts[1:] if self._fails() else drafts

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        if self._fails():
            raise Broken("observe")

    def forget(self, request_id: str) -> None:
        if self._fails():
            raise Broken("forget")

    def _fails(self) -> bool:
        return self._random.random() < self._trouble

    def _draft(self, context: Context, budget: Budget) -> Draft:
        if self._fails():
            return nonsense(self._random, self._vocab, budget)
        right = self._ahead(context)[len(context.tokens) :]
        return self._with_probs(random_tree(self._random, self._vocab, budget, right), context)

    def _with_probs(self, draft: Draft, context: Context) -> Draft:
        """At times with one-hot laws: what a drafter that draws from a point mass hands over."""
        if context.rule == "match" or not len(draft) or self._random.random() < 0.5:
            return draft
        probs = torch.nn.functional.one_hot(torch.tensor(draft.tokens), self._vocab).double()
        return Draft(draft.tokens, draft.parents, probs)


def random_tree(random: Random, vocab: int, budget: Budget, right: Sequence[int]) -> Draft:
    """A tree within the budget. Right tokens also turn up at depths and under parents where they are wrong."""
    tokens: list[int] = []
    parents: list[int] = []
    depth = {ROOT: 0}
    on_path = {ROOT: True}
    for _ in range(random.randint(0, budget.nodes * 2)):
        parent = random.choice([len(tokens) - 1, random.randint(ROOT, len(tokens) - 1)])
        siblings = {t for t, p in zip(tokens, parents, strict=True) if p == parent}
        d = depth[parent]
        if d == budget.depth or len(siblings) == budget.width or len(tokens) == budget.nodes:
            continue
        token = _some_token(random, vocab, right, d)
        if token in siblings:
            continue
        node = len(tokens)
        tokens.append(token)
        parents.append(parent)
        depth[node] = d + 1
        on_path[node] = on_path[parent] and d < len(right) and token == right[d]
    return Draft(tuple(tokens), tuple(parents))


def _some_token(random: Random, vocab: int, right: Sequence[int], depth: int) -> int:
    roll = random.random()
    if roll < 0.6 and depth < len(right):
        return right[depth]
    if roll < 0.8 and right:
        return random.choice(right[: depth + 3])  # right somewhere, perhaps not here
    return random.randrange(vocab)


def nonsense(random: Random, vocab: int, budget: Budget) -> Draft:
    """Something a drafter must not return."""
    too_many = budget.nodes + 1
    makers: list[Callable[[], object]] = [
        lambda: None,
        lambda: (1, 2, 3),
        lambda: Draft((vocab,), (ROOT,)),
        lambda: Draft((-1,), (ROOT,)),
        lambda: Draft((True,), (ROOT,)),
        lambda: Draft((1.0,), (ROOT,)),  # type: ignore[arg-type]  # nonsense on purpose
        lambda: Draft(("a",), (ROOT,)),  # type: ignore[arg-type]  # nonsense on purpose
        lambda: Draft([0], [ROOT]),  # type: ignore[arg-type]  # lists instead of tuples
        lambda: Draft((0,), (-1.0,)),  # type: ignore[arg-type]  # nonsense on purpose
        lambda: Draft((0, 0), (ROOT, 0.0)),  # type: ignore[arg-type]  # nonsense on purpose
        lambda: Draft((0, 1), (ROOT, False)),
        lambda: Draft((0,) * too_many, tuple(range(ROOT, too_many - 1))),
        lambda: Draft((0,), (ROOT,), torch.full((1, vocab), float("nan"))),
        lambda: Draft((0,), (ROOT,), torch.zeros((1, vocab))),
        lambda: Draft((0,), (ROOT,), torch.ones((1, vocab + 1))),
    ]
    return random.choice(makers)()  # type: ignore[return-value]  # the guard has to find out


class FlakyModel(ToyModel):
    """A ToyModel whose passes fail at random: before, or half-way with columns already spoilt."""

    def __init__(self, random: Random, vocab: int, *, trouble: float, order: int) -> None:
        super().__init__(vocab, order=order)
        self._random, self._trouble = random, trouble
        self.rows = 0
        self.passes = 0

    def forward(self, step: Step, *, rows: Tensor, taps: Sequence[int] = ()) -> Output:
        roll = self._random.random()
        if roll < self._trouble / 2:
            raise Broken("before the pass")
        if roll < self._trouble:
            for segment in step.segments:
                self.lanes.reserve(segment.lane, segment.start, segment.rows)
            self.lanes.store[0, 0, step.lanes, 0, step.columns, 0] = 12345.0
            raise Broken("in the middle of the pass")
        self.rows, self.passes = len(step.tokens), self.passes + 1
        return super().forward(step, rows=rows, taps=taps)
