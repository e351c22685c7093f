"""Sources of guesses: the request's own text, and the drafts of any drafter. Know no tree and no chances."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from sooner.config import Budget
from sooner.core.tree import ROOT, Draft
from sooner.draft.protocol import Context, Drafter, Outcome
from sooner.draft.source import GRADES, RANKS, REACH, Guess, grade, graded_priors


@dataclass(slots=True)
class _Seen:
    """One text: what came last after each run of up to REACH tokens."""

    length: int = 1
    next: dict[tuple[int, ...], int] = field(default_factory=dict)


class LookupSource:
    """The token that followed the last time the longest matching end of text and path was seen.

    The code is the length of the match.
    """

    name = "lookup"
    taps: tuple[int, ...] = ()
    tops = 0
    priors: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.7, 0.8)

    def __init__(self) -> None:
        self._known: dict[str, _Seen] = {}

    def begin(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> None:
        for context in contexts:
            seen = self._known.setdefault(context.request_id, _Seen())
            if seen.length > len(context.tokens):  # the id is new life, not the request we knew
                seen = self._known[context.request_id] = _Seen()
            _extend(seen, context.tokens)

    def after(self, request_id: str, path: tuple[int, ...], tail: tuple[int, ...]) -> Sequence[Guess]:
        known = self._known[request_id].next
        for size in range(len(tail), 0, -1):
            token = known.get(tail[-size:])
            if token is not None:
                return ((token, size),)
        return ()

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """The text of the next context says it all."""

    def forget(self, request_id: str) -> None:
        self._known.pop(request_id, None)


def _extend(seen: _Seen, tokens: Sequence[int]) -> None:
    begin = max(seen.length - REACH, 0)
    text = tuple(tokens[begin:])
    for end in range(seen.length - begin, len(text)):
        for start in range(max(end - REACH, 0), end):
            seen.next[text[start:end]] = text[end]
    seen.length = max(seen.length, len(tokens))


class DraftSource:
    """The nodes of another drafter's drafts. The code is a node's depth and its score, or its rank without one.

    places: where the drafter's taps are among those of the joined drafter.
    A token it drew is offered like any other guess: with `probs` left out every rule takes it as a point
    mass, which is exact whatever made the drafter say it.
    """

    _DEPTHS = 4
    priors: tuple[float, ...] = (*graded_priors(0.7, ranks=1) * _DEPTHS, 0.5, 0.2, 0.1, 0.05)

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.name, self.taps = drafter, drafter.name, drafter.taps
        self.tops: int = getattr(drafter, "tops", 0)
        self.places: tuple[int, ...] = ()
        self._below: dict[str, dict[tuple[int, ...], list[Guess]]] = {}

    def begin(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> None:
        drafts = self.drafter.propose(contexts, budgets)
        self._below = {c.request_id: _children(draft) for c, draft in zip(contexts, drafts, strict=True)}

    def after(self, request_id: str, path: tuple[int, ...], tail: tuple[int, ...]) -> Sequence[Guess]:
        return self._below[request_id].get(path, ())

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        self.drafter.observe([self._own(outcome) for outcome in outcomes])

    def forget(self, request_id: str) -> None:
        self.drafter.forget(request_id)

    def _own(self, outcome: Outcome) -> Outcome:
        if outcome.features is None or not self.taps:
            return replace(outcome, features=None)
        return replace(outcome, features=outcome.features[:, list(self.places)])


def _children(draft: Draft) -> dict[tuple[int, ...], list[Guess]]:
    """The guesses below each path of a draft."""
    below: dict[tuple[int, ...], list[Guess]] = {}
    paths: list[tuple[int, ...]] = []
    for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        above = () if parent == ROOT else paths[parent]
        paths.append((*above, token))
        siblings = below.setdefault(above, [])
        siblings.append((token, _code(draft, node, len(above), len(siblings))))
    return below


def _code(draft: Draft, node: int, depth: int, rank: int) -> int:
    shallow = min(depth, DraftSource._DEPTHS - 1)
    if draft.scores is None:
        return DraftSource._DEPTHS * GRADES + min(rank, RANKS - 1)
    parent = draft.parents[node]
    whole = 1.0 if parent == ROOT else draft.scores[parent]
    return shallow * GRADES + grade(draft.scores[node] / whole if whole > 0 else 0.0)
