"""Where pulled models, compiled kernels and measured costs are kept. Knows not what they are."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """The folder named by SOONER_CACHE, else `.cache/sooner` in the home."""
    named = os.environ.get("SOONER_CACHE")
    return Path(named).expanduser().absolute() if named else Path.home() / ".cache" / "sooner"
