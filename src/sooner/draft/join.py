"""Drafters that share one tree, by name: `A+B`, `recycle`, `auto`. Knows no drafter but through its maker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from sooner.draft.combine import CombineDrafter
from sooner.draft.protocol import Drafter
from sooner.draft.recycle import RecycleSource
from sooner.draft.source import Source
from sooner.draft.sources import DraftSource, LookupSource
from sooner.draft.table import Table, TableSource, load
from sooner.errors import ConfigError

ALONE = ("none", "auto")  # what cannot be part of a joined draft


def split(text: str, names: Sequence[str]) -> list[str]:
    """The parts between "+"; what follows a "+" but names no drafter belongs to the argument before it."""
    first, *others = text.split("+")
    parts = [first]
    for other in others:
        if other.partition(":")[0] in names or ":" not in parts[-1]:
            parts.append(other)
        else:
            parts[-1] += f"+{other}"
    return parts


def check(names: Sequence[str]) -> None:
    """Raise ConfigError where drafters of these names cannot share a tree."""
    for name in names:
        if name in ALONE:
            raise ConfigError(f"draft {name!r} cannot be joined with others; leave it out of {'+'.join(names)!r}.")
        if names.count(name) > 1:
            raise ConfigError(f"draft {'+'.join(names)!r} joins {name!r} with itself; name each drafter once.")


def join(
    name: str, parts: Sequence[tuple[str, str | None]], vocab: int, make: Callable[[int], Drafter]
) -> CombineDrafter:
    """One drafter of several. parts: name and argument of each; make(i): the drafter of parts[i], asked for where
    the part is no source by itself. Raises DraftError for a warm table that cannot be read."""
    sources: list[Source] = []
    table: Table | None = None
    for i, (part, argument) in enumerate(parts):
        if part == "lookup":
            sources.append(LookupSource())
        elif part == "recycle":
            sources.append(RecycleSource())
            if argument is not None:
                table = load(Path(argument), vocab)
                sources.append(TableSource(table))
        else:
            sources.append(DraftSource(make(i)))
    return CombineDrafter(name, sources, None if table is None else table.chances)
