"""What a second is worth, who is worth asking, how many guesses pay for their rows. Knows no request.

The price of a second is the text that the whole batch writes in it.
"""

from __future__ import annotations

from collections.abc import Sequence

from sooner.control.passes import Load, PassCost
from sooner.control.state import Now, Worth
from sooner.native.belief import Prices

MARGIN = 1.06  # by which a whole choice has to be better than none: of many, those look best that are overrated
# The same of a node and its row, times the chance that it is wrong: what is nearly sure can hardly be overrated,
# and where rows cost what they bring, a chain of such nodes is followed to its end or not at all.
DOUBT = 0.1
NEAR = 0.05  # a choice that loses no more than this share of what is written is nearly as good


def prices(most: int, now: Now, fixed: int, passes: PassCost) -> Prices:
    """What rows are worth in this pass, for `most` guesses. fixed: rows beside them that are guesses too.

    A second is worth what the batch writes in one over some time, at most what it can write in this pass.
    """
    costs = passes.further(_more(now.load, fixed), most)
    alone = costs if now.load == now.decode else passes.further(_more(now.decode, fixed), most)
    return Prices(costs, alone, now.ready, now.decode_s, now.price, now.rate, DOUBT, NEAR)


def worth_their_rows(values: Sequence[float], prices: Prices) -> Worth:
    """How many of the nodes are worth their rows, and how many nearly. values: minus the chances, best first."""
    price = max(min(prices.most, _best_ratio(values, prices)), prices.least)
    seconds, gains = [0.0], [0.0]  # of the first 0, 1, 2, ... nodes
    for value, cost in zip(values, prices.costs, strict=False):
        seconds.append(seconds[-1] + cost)
        gains.append(gains[-1] - value - (1 + prices.doubt * (1 + value)) * price * cost)
    count = max(range(len(gains)), key=gains.__getitem__)
    allowed = [prices.near * price * (prices.seconds + taken) for taken in seconds]
    near = [n for n, gain in enumerate(gains) if n == count or gain >= gains[count] - allowed[n]]
    return Worth(count, price, seconds[count], near[0], near[-1])


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


def _best_ratio(values: Sequence[float], prices: Prices) -> float:
    """The most tokens a second that one pass can bring, over how many of the nodes it takes."""
    tokens, seconds = float(prices.ready), prices.seconds
    best = tokens / seconds
    for value, cost in zip(values, prices.alone, strict=False):
        tokens -= value
        seconds += cost
        if tokens > best * seconds:
            best = tokens / seconds
    return best
