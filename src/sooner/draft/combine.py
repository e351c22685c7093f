"""One tree of the guesses of several sources, the likeliest first, whatever their source. Knows no source.

From the root on, the node with the best chance of surviving is taken and its sources are asked what may follow;
so the budget goes where it is worth most. A guess's chance is what guesses of its kind have been worth so far
(see `source.Chances`); of several sources that name the same token the most confident counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush

from sooner.config import Budget
from sooner.core.tree import EMPTY, ROOT, Draft
from sooner.draft.protocol import Context, Outcome
from sooner.draft.source import REACH, Chances, Guess, Source
from sooner.draft.sources import DraftSource
from sooner.errors import ConfigError

FLOOR = 0.02  # a node with less chance than this is not worth its row

_After = Callable[[str, tuple[int, ...], tuple[int, ...]], Sequence[Guess]]
Asked = dict[tuple[int, ...], list[tuple[int, Sequence[Guess]]]]
"""For each path that was looked at: the first code of each source, and its guesses."""


class CombineDrafter:
    """A joined tree of sources.

    name: how reports call it. chances: what codes were worth before, by source; the sources' priors otherwise.
    floor: nodes whose path survives less often than this are left out.
    Raises ConfigError without sources, or with two of one name.
    """

    def __init__(
        self,
        name: str,
        sources: Sequence[Source],
        chances: Mapping[str, Sequence[float]] | None = None,
        floor: float = FLOOR,
    ) -> None:
        names = [source.name for source in sources]
        if not names or len(set(names)) < len(names):
            raise ConfigError(
                f"a joined draft needs different sources, at least one; got {', '.join(names) or 'none'}."
            )
        if not 0 <= floor < 1:
            raise ConfigError(f"floor must be at least 0 and less than 1, got {floor}.")
        self.name = name
        self.taps = tuple(dict.fromkeys(tap for source in sources for tap in source.taps))
        self.tops = max(source.tops for source in sources)
        self._sources, self._floor = tuple(sources), floor
        self._first: list[int] = []
        self._after: list[tuple[_After, int]] = []  # where each source is asked, and its first code
        priors: list[float] = []
        for source in sources:
            if isinstance(source, DraftSource):
                source.places = tuple(self.taps.index(tap) for tap in source.taps)
            known = (chances or {}).get(source.name, ())
            self._first.append(len(priors))
            self._after.append((source.after, len(priors)))
            priors += known if len(known) == len(source.priors) else source.priors
        self.chances = Chances(priors)
        self._asked: dict[str, Asked] = {}

    def learned(self) -> dict[str, tuple[float, ...]]:
        """What guesses of each code are worth by now, by source."""
        ends = [*self._first[1:], len(self.chances.value)]
        return {
            source.name: tuple(round(value, 4) for value in self.chances.value[first:end])
            for source, first, end in zip(self._sources, self._first, ends, strict=True)
        }

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
        learn = self.chances.learn
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
        value, least = self.chances.value, self._floor / score
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
