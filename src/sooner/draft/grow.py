"""Grows joined trees from any sources, and learns what their guesses are worth. Knows no source.

`SourceGrower` asks the sources themselves; it is also the oracle of the one in C (`grow_native.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Protocol

from sooner.config import Budget
from sooner.core.tree import EMPTY, ROOT, Draft
from sooner.draft.protocol import Context, Outcome
from sooner.draft.source import REACH, Chances, Guess, Source

_After = Callable[[str, tuple[int, ...], tuple[int, ...]], Sequence[Guess]]
Asked = dict[tuple[int, ...], list[tuple[int, Sequence[Guess]]]]
"""For each path that was looked at: the first code of each source, and its guesses."""


class Grower(Protocol):
    """Does a joined drafter's work; propose, observe and forget are those of Drafter."""

    def values(self) -> list[float]:
        """What guesses of each code are worth by now, one source's codes after the other's."""

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]: ...

    def observe(self, outcomes: Sequence[Outcome]) -> None: ...

    def forget(self, request_id: str) -> None: ...


class SourceGrower:
    """firsts: the first code of each source; priors: chances of all codes before anything is known.

    floor: nodes whose path survives less often than this are left out.
    """

    def __init__(
        self, sources: Sequence[Source], firsts: Sequence[int], priors: Sequence[float], floor: float
    ) -> None:
        self._sources, self._floor = tuple(sources), floor
        self._after: list[tuple[_After, int]] = [
            (source.after, first) for source, first in zip(sources, firsts, strict=True)
        ]
        self._chances = Chances(priors)
        self._asked: dict[str, Asked] = {}

    def values(self) -> list[float]:
        return list(self._chances.value)

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        for source in self._sources:
            source.begin(contexts, budgets)
        return [self._one(context, budget) for context, budget in zip(contexts, budgets, strict=True)]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            asked = self._asked.pop(outcome.request_id, None)
            if asked is not None:
                self._learn(asked, outcome.tokens)
        for source in self._sources:
            source.observe(outcomes)

    def forget(self, request_id: str) -> None:
        self._asked.pop(request_id, None)
        for source in self._sources:
            source.forget(request_id)

    def _learn(self, asked: Asked, tokens: tuple[int, ...]) -> None:
        """Every guess along the text that came shows whether it was right, taken into the tree or not."""
        learn = self._chances.learn
        for depth, right in enumerate(tokens):
            found = asked.get(tokens[:depth])
            if found is None:
                return
            for first, guesses in found:
                for token, code in guesses:
                    learn(first + code, token == right)

    def _one(self, context: Context, budget: Budget) -> Draft:
        if budget.empty:
            return EMPTY
        asked = self._asked[context.request_id] = {}
        end = tuple(context.tokens[-REACH:])
        tokens: list[int] = []
        parents: list[int] = []
        scores: list[float] = []
        paths: list[tuple[int, ...]] = []
        heap: list[tuple[float, int, int, int]] = []
        self._offer(heap, asked, context.request_id, (), end, 1.0, ROOT, budget.width)
        while heap and len(tokens) < budget.nodes:
            score, _, token, parent = heappop(heap)
            path = (token,) if parent == ROOT else (*paths[parent], token)
            tokens.append(token)
            parents.append(parent)
            scores.append(-score)
            paths.append(path)
            if len(path) < budget.depth:
                tail = (*end, *path)[-REACH:]
                self._offer(heap, asked, context.request_id, path, tail, -score, len(tokens) - 1, budget.width)
        return Draft(tuple(tokens), tuple(parents), None, tuple(scores))

    def _offer(
        self,
        heap: list[tuple[float, int, int, int]],
        asked: Asked,
        request_id: str,
        path: tuple[int, ...],
        tail: tuple[int, ...],
        score: float,
        node: int,
        width: int,
    ) -> None:
        """Put the best guesses of what follows `path` on the heap, `width` at most."""
        value, least = self._chances.value, self._floor / score
        best: dict[int, float] = {}
        found = asked[path] = []
        for after, first in self._after:
            guesses = after(request_id, path, tail)
            if guesses:
                found.append((first, guesses))
                for token, code in guesses:
                    chance = value[first + code]
                    if chance >= least and (token not in best or chance > best[token]):
                        best[token] = chance
        ranked = sorted(zip(best.values(), best), reverse=True)  # noqa: B905  # of one dict, so as long
        place = node * width
        for chance, token in ranked[:width]:
            heappush(heap, (-score * chance, place, token, node))
            place += 1
