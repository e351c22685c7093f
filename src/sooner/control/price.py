"""What a second is worth, who is worth asking, how many guesses pay for their rows. Knows no request.

The price of a second is the text that the whole batch writes in it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sooner.control.passes import Load, PassCost
from sooner.control.state import Now
from sooner.native.price import serves
from sooner.native.price import worth as worth_in_c

MARGIN = 1.06  # by which a node has to be worth more than its row: of many, those look best that are overrated


class Worth(NamedTuple):
    """nodes: how many are worth their rows, the best ones first; price: of a second; seconds: of their rows."""

    nodes: int
    price: float
    seconds: float


def worth_their_rows(values: Sequence[float], now: Now, fixed: int, passes: PassCost) -> Worth:
    """How many of the nodes are worth their rows. values: minus the chances, best first; fixed: rows beside them.

    The price is what the batch writes a second over some time, at most what it can write in this pass.
    """
    if not values or not now.ready:
        return Worth(0, now.price, 0.0)
    costs = passes.further(_more(now.load, fixed), len(values))
    alone = costs if now.load == now.decode else passes.further(_more(now.decode, fixed), len(values))
    if serves():
        given = values if isinstance(values, array) else array("d", values)
        return Worth(*worth_in_c(given, costs, alone, (now.ready, now.decode_s, now.price, now.rate, MARGIN)))
    price = max(min(now.price, _best_ratio(values, alone, now.ready, now.decode_s)), now.rate)
    best, count, gain = 0.0, 0, 0.0
    for n, (value, cost) in enumerate(zip(values, costs, strict=False), 1):
        gain -= value + MARGIN * price * cost
        if gain > best:
            best, count = gain, n
    return Worth(count, price, sum(costs[:count]))


def worth_asking(worths: Sequence[tuple[float | None, str]], one: float, two: float) -> list[str]:
    """The names of those that nothing is known of, and of those who together make up for what asking them takes.

    worths: what an answer of each brings; one, two: what asking so many takes, in tokens.
    """
    asked = [name for worth, name in worths if worth is None]
    known = sorted(((worth, name) for worth, name in worths if worth is not None), reverse=True)
    each, once = two - one, 0.0 if asked else 2 * one - two
    best, count, gain = 0.0, 0, -once
    for n, (worth, _) in enumerate(known, 1):
        gain += worth - each
        if gain > best:
            best, count = gain, n
    return asked + [name for _, name in known[:count]]


def _more(load: Load, rows: int) -> Load:
    return Load(load.rows + rows, load.requests, load.context) if rows else load


def _best_ratio(values: Sequence[float], costs: Iterable[float], ready: int, seconds: float) -> float:
    """The most tokens a second that one pass can bring, over how many of the nodes it takes."""
    tokens = float(ready)
    best = tokens / seconds
    for value, cost in zip(values, costs, strict=False):
        tokens -= value
        seconds += cost
        if tokens > best * seconds:
            best = tokens / seconds
    return best
