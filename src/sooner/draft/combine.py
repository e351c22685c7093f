"""One tree of the guesses of several sources, the likeliest first, whatever their source. Knows no source.

From the root on, the node with the best chance of surviving is taken and its sources are asked what may follow;
so the budget goes where it is worth most. A guess's chance is what guesses of its kind have been worth so far
(see `source.Chances`); of several sources that name the same token the most confident counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sooner.config import Budget
from sooner.core.tree import Draft
from sooner.draft import grow_native
from sooner.draft.grow import Grower, SourceGrower
from sooner.draft.protocol import Context, Outcome
from sooner.draft.source import Source
from sooner.draft.sources import DraftSource
from sooner.errors import ConfigError

FLOOR = 0.02  # a node with less chance than this is not worth its row


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
        self._sources = tuple(sources)
        self._first: list[int] = []
        priors: list[float] = []
        for source in sources:
            if isinstance(source, DraftSource):
                source.places = tuple(self.taps.index(tap) for tap in source.taps)
            known = (chances or {}).get(source.name, ())
            self._first.append(len(priors))
            priors += known if len(known) == len(source.priors) else source.priors
        made = grow_native.NativeGrower if grow_native.fits(sources) else SourceGrower
        self._grower: Grower = made(sources, self._first, priors, floor)

    @property
    def values(self) -> list[float]:
        """What guesses of each code are worth by now, one source's codes after the other's."""
        return self._grower.values()

    def learned(self) -> dict[str, tuple[float, ...]]:
        """The same by source."""
        values = self.values
        ends = [*self._first[1:], len(values)]
        return {
            source.name: tuple(round(value, 4) for value in values[first:end])
            for source, first, end in zip(self._sources, self._first, ends, strict=True)
        }

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        return self._grower.propose(contexts, budgets)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        self._grower.observe(outcomes)

    def forget(self, request_id: str) -> None:
        self._grower.forget(request_id)
