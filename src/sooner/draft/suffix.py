"""Suffix drafting: what followed the longest known suffix of the text, by counts. Knows no model.

A request's own text is one suffix automaton. Requests of one scope may also share one over their earlier outputs,
bounded in tokens. The continuations of the longest match, and with less weight those of its shorter suffixes, are
put into a tree, likeliest first; so a long match is followed far and a short one a little.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from sooner.config import Budget
from sooner.core.tree import EMPTY, ROOT, Draft
from sooner.draft.automaton import ROOT as BEGIN
from sooner.draft.automaton import Automaton
from sooner.draft.protocol import Context, Outcome
from sooner.errors import ConfigError

# How often the next token was among those that followed a match of length 0, 1, 2, ... before (LOG.md).
_TRUST = np.array([0, 0.39, 0.62, 0.7, 0.73, 0.79, 0.82, 0.87, 0.89, 0.9, 0.92, 0.93, 0.94] + [0.95] * 19 + [0.98])
_WINDOW = 32  # tokens matched against other requests' outputs
_ALIKE = 8  # tokens compared to see that a text is the one that is known

Branch = tuple[int, ...]


@dataclass(slots=True)
class _Text:
    """What is known of one request: its automaton, the state its text ends at, and its tokens."""

    prompt: int
    scope: str | None
    automaton: Automaton = field(default_factory=Automaton)
    end: int = BEGIN
    tokens: array[int] = field(default_factory=lambda: array("i"))

    def learn(self, new: Sequence[int]) -> None:
        self.end = self.automaton.extend(self.end, new)
        self.tokens.extend(new)

    def continues_in(self, tokens: Sequence[int]) -> bool:
        length = len(self.tokens)
        return length <= len(tokens) and list(self.tokens[-_ALIKE:]) == list(
            tokens[max(length - _ALIKE, 0) : length]
        )


@dataclass(slots=True)
class _Shared:
    """Outputs of one scope in two generations. When the young one has filled its half, the old one is dropped."""

    young: Automaton = field(default_factory=Automaton)
    old: Automaton = field(default_factory=Automaton)

    @property
    def tokens(self) -> int:
        return self.young.tokens + self.old.tokens

    def add(self, output: Sequence[int], limit: int) -> None:
        half = max(limit // 2, 1)
        for start in range(0, len(output), half):  # one text may be longer than the bound
            piece = output[start : start + half]
            if self.young.tokens + len(piece) > half:
                self.young, self.old = Automaton(), self.young
            self.young.extend(BEGIN, piece)


class SuffixDrafter:
    """The request's own text, and with `shared` earlier outputs of its scope.

    shared: most tokens of earlier outputs kept, all scopes together; 0 = every request for itself. Requests
        without a scope share nothing.
    least: no node that is less likely than this.
    Raises ConfigError for a negative `shared` or a `least` outside (0, 1].
    """

    name = "suffix"
    taps: tuple[int, ...] = ()

    def __init__(self, shared: int = 0, least: float = 0.01) -> None:
        if shared < 0:
            raise ConfigError(f"suffix keeps 0 or more shared tokens, got {shared}.")
        if not 0 < least <= 1:
            raise ConfigError(f"suffix needs a least score above 0 and at most 1, got {least}.")
        self._limit, self._least = shared, least
        self._texts: dict[str, _Text] = {}
        self._shared: OrderedDict[str, _Shared] = OrderedDict()
        self._grow(Automaton(), Budget(1, 1, 1), [BEGIN] * 2)  # compiled before there is a request to wait for it

    @property
    def bytes(self) -> int:
        """Memory of all automata."""
        own = sum(text.automaton.bytes + 4 * len(text.tokens) for text in self._texts.values())
        return own + sum(store.young.bytes + store.old.bytes for store in self._shared.values())

    @property
    def shared_tokens(self) -> int:
        """Tokens of earlier outputs that are kept."""
        return sum(store.tokens for store in self._shared.values())

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        return [self._one(context, budget) for context, budget in zip(contexts, budgets, strict=True)]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """The last tokens of a text are in no context any more, but others may want them."""
        for outcome in outcomes if self._limit else ():
            text = self._texts.get(outcome.request_id)
            if text is not None:
                text.learn(outcome.tokens)

    def forget(self, request_id: str) -> None:
        text = self._texts.pop(request_id, None)
        if text is not None and text.scope is not None and self._limit:
            self._share(text.scope, text.tokens[text.prompt :])

    def _one(self, context: Context, budget: Budget) -> Draft:
        if budget.empty:
            return EMPTY
        text = self._texts.get(context.request_id)
        if text is None or not text.continues_in(context.tokens):
            text = self._texts[context.request_id] = _Text(context.prompt, context.scope)
        text.learn(context.tokens[len(text.tokens) :])
        trees = [self._tree(text.automaton, budget, *text.automaton.before(text.end))]
        store = None if context.scope is None else self._shared.get(context.scope)
        for automaton in () if store is None else (store.young, store.old):
            trees.append(self._tree(automaton, budget, *automaton.match(context.tokens[-_WINDOW:])))
        return _joined(trees, budget)

    def _tree(self, automaton: Automaton, budget: Budget, state: int, length: int) -> dict[Branch, float]:
        """Score of every branch that may follow a match, parents before children."""
        limits = (budget.depth, budget.width, budget.nodes)
        tokens, parents, scores = automaton.continuations(state, length, _TRUST, limits, self._least)
        branches: list[Branch] = []
        for token, parent in zip(tokens, parents, strict=True):
            branches.append((*branches[parent], token) if parent != ROOT else (token,))
        return dict(zip(branches, scores, strict=True))

    def _grow(self, automaton: Automaton, budget: Budget, tokens: Sequence[int]) -> None:
        self._tree(automaton, budget, *automaton.before(automaton.extend(BEGIN, tokens)))
        automaton.match(tokens)

    def _share(self, scope: str, output: Sequence[int]) -> None:
        """Keep a finished output; what goes first is the scope that was longest without one."""
        store = self._shared.setdefault(scope, _Shared())
        self._shared.move_to_end(scope)
        store.add(output, self._limit)
        while self.shared_tokens > self._limit:
            oldest = next(iter(self._shared.values()))
            if oldest.old.tokens:
                oldest.old = Automaton()
            else:
                self._shared.popitem(last=False)


def _joined(trees: Sequence[dict[Branch, float]], budget: Budget) -> Draft:
    """One tree of several, likeliest branches first. A chain is the one of which most will survive."""
    if budget.width == 1:
        trees = [max(trees, key=lambda tree: sum(tree.values()))]
    if not any(trees):
        return EMPTY
    best: dict[Branch, float] = {}
    for tree in trees:
        for branch, score in tree.items():
            best[branch] = max(score, best.get(branch, 0.0))
    nodes: dict[Branch, int] = {}
    below: dict[Branch, int] = {}
    # No branch is likelier than the one it goes on from; equals stay in order of length.
    for branch in sorted(best, key=lambda branch: (-best[branch], len(branch))):
        above = branch[:-1]
        if len(nodes) == budget.nodes:
            break
        if (not above or above in nodes) and below.get(above, 0) < budget.width:
            below[above] = below.get(above, 0) + 1
            nodes[branch] = len(nodes)
    return Draft(
        tuple(branch[-1] for branch in nodes),
        tuple(nodes.get(branch[:-1], ROOT) for branch in nodes),
        scores=tuple(best[branch] for branch in nodes),
    )
