"""What "auto" is for a borrowed target, and how much is guessed where nobody said. Knows no keywords.

The same as in sooner.LLM: lookup and recycle in one tree, the warm table that comes with the package, a controller
that weighs measured costs. Costs are kept in a file from call to call, nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sooner import shipped
from sooner.cache import cache_root
from sooner.config import Budget
from sooner.control.adaptive import AdaptiveController
from sooner.control.store import CostFile
from sooner.draft.combine import CombineDrafter
from sooner.draft.recycle import RecycleSource
from sooner.draft.source import Source
from sooner.draft.sources import LookupSource
from sooner.draft.table import Table, TableSource, load
from sooner.model import load as loading
from sooner.model.protocol import Model


def auto(module: Any, target: Model) -> CombineDrafter:
    """module: the caller's model, whose tokenizer lies beside its weights if anywhere."""
    sources: list[Source] = [LookupSource(), RecycleSource()]
    mark = loading.fingerprint_at(_source(module), target)
    path = None if mark is None else shipped.find("table", mark)
    if path is None:
        return CombineDrafter("auto", sources, None)
    table = _table(path, target.vocab_size)
    return CombineDrafter("auto", [*sources, TableSource(table)], table.chances)


def adaptive(
    module: Any, target: Model, drafter: str, limit: Budget
) -> tuple[AdaptiveController, Callable[[], None]]:
    """A controller that begins with the costs of earlier calls, and what to call at the end to keep its own."""
    name = f"{_source(module) or type(module).__name__}, borrowed"
    file = CostFile(cache_root() / "costs", loading.costs_depend_on(name, target), drafter)
    return AdaptiveController(limit, file.costs), file.save


def _source(module: Any) -> str:
    return str(getattr(module.config, "_name_or_path", None) or "")


@functools.lru_cache(maxsize=2)
def _table(path: str, vocab: int) -> Table:
    """Tables that come with the package do not change; reading one takes longer than a short text."""
    return load(Path(path), vocab)
