"""What a second is worth, and how many of the guesses on offer pay for their rows. Knows no request.

The price of a second is the text that the whole batch writes in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sooner.control.passes import Load, PassCost
from sooner.control.state import Now

MARGIN = 1.06  # by which a node has to be worth more than its row: of many, those look best that are overrated


def worth_their_rows(values: Sequence[float], now: Now, fixed: int, passes: PassCost) -> tuple[int, float]:
    """How many of the nodes, best first, are worth their rows; and the price of a second that says so.

    The price is what the batch writes a second over some time, at most what it can write in this pass.
    """
    if not values or not now.ready:
        return 0, now.price
    costs = passes.further(_more(now.load, fixed), len(values))
    alone = costs if now.load == now.decode else passes.further(_more(now.decode, fixed), len(values))
    price = max(min(now.price, _best_ratio(values, alone, now.ready, now.decode_s)), now.rate)
    toll = MARGIN * price
    best, count, gain = 0.0, 0, 0.0
    for n, (value, cost) in enumerate(zip(values, costs, strict=False), 1):
        gain += value - toll * cost
        if gain > best:
            best, count = gain, n
    return count, price


def _more(load: Load, rows: int) -> Load:
    return Load(load.rows + rows, load.requests, load.context) if rows else load


def _best_ratio(values: Sequence[float], costs: Iterable[float], ready: int, seconds: float) -> float:
    """The most tokens a second that one pass can bring, over how many of the nodes it takes."""
    tokens = float(ready)
    best = tokens / seconds
    for value, cost in zip(values, costs, strict=False):
        tokens += value
        seconds += cost
        if tokens > best * seconds:
            best = tokens / seconds
    return best
