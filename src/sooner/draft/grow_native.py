"""Grows joined trees of lookup, recycled rows and a warm table in C: native/joined.c. Knows no target."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from sooner.config import Budget
from sooner.core.tree import EMPTY, Draft
from sooner.draft.protocol import Context, Outcome
from sooner.draft.recycle import LIMIT, RecycleSource
from sooner.draft.source import STRENGTH, Source
from sooner.draft.sources import LookupSource
from sooner.draft.table import LEVEL, Table, TableSource
from sooner.native.joined import ABSENT, Came, Job, JoinedTrees, Sources, Warm, serves


def fits(sources: Sequence[Source]) -> bool:
    """Whether NativeGrower knows all of them, and there is a compiler."""
    return all(type(source) in (LookupSource, RecycleSource, TableSource) for source in sources) and serves()


@dataclass(slots=True)
class _Known:
    """One request: its number, and how many tokens of its text have been read."""

    number: int
    length: int = 0


class NativeGrower:
    """See SourceGrower; the sources say what there is and are not asked themselves."""

    def __init__(
        self, sources: Sequence[Source], firsts: Sequence[int], priors: Sequence[float], floor: float
    ) -> None:
        first = {source.name: code for source, code in zip(sources, firsts, strict=True)}
        limit = next((source.limit for source in sources if isinstance(source, RecycleSource)), LIMIT)
        table = next((_warm(source.table) for source in sources if isinstance(source, TableSource)), None)
        lookup, recycle, warm = (
            first.get(kind.name, ABSENT) for kind in (LookupSource, RecycleSource, TableSource)
        )
        self._trees = JoinedTrees(Sources(lookup, recycle, warm, limit // 2, table), priors, STRENGTH, floor)
        self._known: dict[str, _Known] = {}
        self._free: list[int] = []

    @property
    def keys(self) -> int:
        """How many keys of recycled rows are held."""
        return self._trees.keys

    def values(self) -> list[float]:
        return self._trees.values()

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        tokens, until, numbers = array("i"), array("q"), array("q")
        for context in contexts:
            known = self._of(context.request_id)
            if known.length > len(context.tokens):  # the id is new life, not the request we knew
                self._trees.restart(known.number)
                known.length = 0
            tokens.extend(context.tokens[known.length :])
            known.length = len(context.tokens)
            numbers.append(known.number)
            until.append(len(tokens))
        depth, width = array("q", [b.depth for b in budgets]), array("q", [b.width for b in budgets])
        nodes = array("q", [0 if b.empty else b.nodes for b in budgets])
        trees = self._trees.propose(Job(numbers, until, tokens, depth, width, nodes))
        return [Draft(t, p, None, s) if t else EMPTY for t, p, s in trees]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        # of a request nobody asked about, a pass without rows says nothing
        heard = [o for o in outcomes if o.tops is not None or o.request_id in self._known]
        rows = [o.tops for o in heard if o.tops is not None]
        width = rows[0].width if rows else 0
        for o in heard:
            if o.tops is not None and o.tops.rows != 1 + len(o.draft):
                raise ValueError(f"{o.tops.rows} rows of likeliest ids for a draft of {len(o.draft)} nodes")
        if any(tops.width != width for tops in rows):
            raise ValueError("rows of likeliest ids of different lengths")
        ids, logits = array("q"), array("f")
        for tops in rows:
            ids.extend(tops.flat_ids)
            logits.extend(tops.flat_logits)
        tokens, came = array("i"), array("q")
        for o in heard:
            tokens.extend(o.tokens)
            came.append(len(tokens))
        self._trees.observe(
            Came(
                array("q", [self._of(o.request_id).number for o in heard]),
                came,
                tokens,
                array("i", [o.tail[-2] if len(o.tail) > 1 else ABSENT for o in heard]),
                array("i", [o.tail[-1] if o.tail else ABSENT for o in heard]),
                array("q", [len(o.draft) for o in heard]),
                array("q", [0 if o.tops is None else o.tops.rows for o in heard]),
                array("i", chain.from_iterable(o.draft.tokens for o in heard)),
                array("i", chain.from_iterable(o.draft.parents for o in heard)),
                ids,
                logits,
                width,
            )
        )

    def forget(self, request_id: str) -> None:
        known = self._known.pop(request_id, None)
        if known is not None:
            self._trees.forget(known.number)
            self._free.append(known.number)

    def _of(self, request_id: str) -> _Known:
        known = self._known.get(request_id)
        if known is None:
            number = self._free.pop() if self._free else len(self._known)
            known = self._known[request_id] = _Known(number)
        return known


def _warm(table: Table) -> Warm:
    keys = tuple((keys.sorted, keys.places) for keys in table.keys)
    return Warm(table.vocab, keys, table.ends, table.ids, table.codes, LEVEL)
