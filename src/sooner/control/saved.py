"""Costs that a file kept: how far they are trusted, and numbers read with care. Knows not what costs so much."""

from __future__ import annotations

import math

from sooner.errors import ConfigError

STALE = 0.3  # saved costs may be off by so much when they are read again


def floats(value: object, size: int) -> list[float]:
    """Numbers that a file gave. Raises ConfigError if they are not so many finite ones."""
    if not isinstance(value, list) or len(value) != size:
        raise ConfigError(f"a saved cost needs lists of {size} numbers, got {value!r}.")
    if not all(isinstance(v, int | float) and math.isfinite(v) for v in value):
        raise ConfigError("a saved cost holds something that is not a finite number.")
    return [float(v) for v in value]
