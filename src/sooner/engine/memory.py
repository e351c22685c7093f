"""The memory limit for keys and values: what fits, stated in tokens. Knows lanes, nothing of requests' texts.

Target and drafter lanes count against one limit, each by its share. A store is a rectangle of lanes and columns,
so the longest request decides what a lane costs. While a store grows, one layer of the old one exists beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

from sooner.errors import ConfigError
from sooner.model.lanes import LaneCache

SLACK = 64  # columns kept free behind every text, for guesses and growth


class Memory:
    """limit: bytes, None = none. others: lanes of the drafter."""

    def __init__(self, limit: int | None, target: LaneCache, others: Sequence[LaneCache] = ()) -> None:
        self._limit, self.target = limit, target
        self._caches = [target, *(cache for cache in others if cache is not target)]
        if limit is None:
            return
        unit = sum(cache.bytes_for(1, 1) for cache in self._caches)
        for cache in self._caches:
            cache.most_bytes = limit * cache.bytes_for(1, 1) // unit
        if self.longest is not None and self.longest < 2:
            least = sum(cache.bytes_for(1, 2 + SLACK) for cache in self._caches)
            raise ConfigError(
                f"kv_memory of {limit} bytes does not hold a single short text; this model and drafter need "
                f"{least} bytes at least."
            )

    @property
    def limited(self) -> bool:
        return self._limit is not None

    @property
    def longest(self) -> int | None:
        """Tokens of the longest text that fits alone, None = no limit."""
        if self._limit is None:
            return None
        low, high = 0, 1 << 40
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits([middle]) else (low, middle)
        return low

    def fits(self, lengths: Sequence[int]) -> bool:
        """Whether texts of these lengths have room side by side."""
        if self._limit is None or not lengths:
            return True
        columns = max(lengths) + SLACK
        needed = [cache.bytes_for(len(lengths), columns) for cache in self._caches]
        return all(n <= (cache.most_bytes or 0) for n, cache in zip(needed, self._caches, strict=True))

    def scattered(self, cache: LaneCache, columns: int) -> bool:
        """Whether open lanes lie so far apart that their store would not fit, though they themselves do."""
        most = cache.most_bytes
        return most is not None and cache.bytes_for(cache.span, columns + SLACK) > most

    @property
    def drafting(self) -> Sequence[LaneCache]:
        """The drafter's caches."""
        return self._caches[1:]

    def __str__(self) -> str:
        per_token = [cache.bytes_for(1, 64) // 64 for cache in self._caches]
        named = zip(per_token, ("target", *["drafter"] * len(self.drafting)), strict=True)
        shares = ", ".join(f"{size} bytes a token for the {who}" for size, who in named)
        if self._limit is None:
            return f"keys and values: {shares}; no limit"
        total = self._limit // sum(per_token)
        return (
            f"keys and values: at most {self._limit} bytes; {shares}; {total} tokens, {self.longest} in one text"
        )
