"""Costs kept in a file between runs, so that the next start knows the machine. Knows no controller.

One small JSON file for each (model, dtype, device, threads). A file that cannot be read or written costs
knowledge, nothing else.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

from sooner.control.cost import Costs
from sooner.errors import ConfigError

logger = logging.getLogger("sooner")

_FIRST, _THEN = 50, 500  # passes after which to save, first and from then on


class CostFile:
    """The costs of one model on one machine, for one drafter. key: what they depend on; drafter: its name."""

    def __init__(self, folder: Path, key: Sequence[str], drafter: str) -> None:
        self._key, self._drafter = list(key), drafter
        digest = hashlib.sha256("\n".join(self._key).encode()).hexdigest()[:16]
        self._path = folder / f"{digest}.json"
        self._due = _FIRST
        self.costs = Costs()
        self._restore(self._read())

    def save_if_due(self) -> None:
        """Write the file after the first passes, and from then on at times."""
        if self.costs.passes.seen >= self._due:
            self._due = self.costs.passes.seen + _THEN
            self.save()

    def save(self) -> None:
        """Write the file now; what it says of other drafters stays."""
        drafts = self._read().get("drafts")
        drafts = dict(drafts) if isinstance(drafts, dict) else {}
        if self.costs.drafts.seen:
            drafts[self._drafter] = self.costs.drafts.saved()
        content = {"key": self._key, "saved": time.time(), "passes": self.costs.passes.saved(), "drafts": drafts}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            new = self._path.with_suffix(f".{os.getpid()}.new")
            new.write_text(json.dumps(content))
            new.replace(self._path)
        except OSError as error:
            logger.info("costs are not kept: %s", error)

    def _read(self) -> dict[str, object]:
        try:
            found = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) and found.get("key") == self._key else {}

    def _restore(self, found: dict[str, object]) -> None:
        drafts = found.get("drafts")
        own = drafts.get(self._drafter) if isinstance(drafts, dict) else None
        for cost, saved in ((self.costs.passes, found.get("passes")), (self.costs.drafts, own)):
            try:
                if saved is not None:
                    cost.restore(saved)
            except ConfigError as error:
                logger.info("saved costs are not used: %s", error)
