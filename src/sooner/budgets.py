"""How much a drafter may guess, by its name, where the user did not choose. Knows no drafter and no model."""

from __future__ import annotations

from sooner.config import MAX_K, Budget
from sooner.errors import ConfigError

TREES = frozenset({"recycle", "combine", "auto", "eagle", "medusa"})
"""Drafters that guess trees unless told otherwise."""

TREE_WIDTH, TREE_NODES = 8, 15  # with the root 16 rows, which cost little more than one
MOST_K = {"model": 8, "self": 8, "early-exit": 6, "medusa": 5}
"""Without a k the adaptive controller guesses up to so many tokens deep, by drafter; 16 where it is not named."""


def budget_for(draft: str, k: int | None, width: int | None = None) -> Budget:
    """The budget of a drafter by its name, where the user did not choose. Raises ConfigError."""
    tree = draft in TREES
    k = MOST_K.get(draft, 16) if k is None else k
    width = (TREE_WIDTH if tree else 1) if width is None else width
    if isinstance(k, bool) or not isinstance(k, int) or not 0 <= k <= MAX_K:
        raise ConfigError(f"k must be a whole number from 0 to {MAX_K}, got {k!r}.")
    if isinstance(width, bool) or not isinstance(width, int) or not 1 <= width <= MAX_K:
        raise ConfigError(f"width must be a whole number from 1 to {MAX_K}, got {width!r}.")
    return Budget(depth=k, width=width, nodes=min(k * width, TREE_NODES) if tree and width > 1 else k * width)
