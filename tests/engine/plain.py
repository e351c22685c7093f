"""The plain loop the engine is held to, written a second time in plain Python. Knows nothing of drafts.

Only the model's logits come from outside. Filters, noise and the choice of a token are worked out anew,
number by number, from what the documentation of SamplingParams and of `core.noise` says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

from torch import Tensor

from sooner.params import SamplingParams

NextLogits = Callable[[Sequence[int]], Tensor]
_TWO64 = 2**64


def mixed(x: int) -> int:
    """The finaliser of splitmix64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % _TWO64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % _TWO64
    return x ^ (x >> 31)


def target_key(seed: int, position: int) -> int:
    """Key of the target's own choice (stream 0) of the token at `position`."""
    golden = 0x9E3779B97F4A7C15
    state = 0
    for part in (seed, position, 0):
        state = mixed(((state ^ mixed((part + golden) % _TWO64)) + golden) % _TWO64)
    return state


def exponential(key: int, token: int) -> float:
    bits = mixed((key + (token + 1) * 0x9E3779B97F4A7C15) % _TWO64)
    return -math.log(((bits >> 12) + 0.5) * 2.0**-52)


def law_of(logits: Sequence[float], params: SamplingParams) -> list[float]:
    """Temperature, top-k, top-p, min-p, in this order; of equals at the edge of top-p the higher ids stay."""
    scores = [(x - max(logits)) / params.temperature for x in logits]
    if 0 < params.top_k < len(scores):
        floor = sorted(scores, reverse=True)[params.top_k - 1]
        scores = [s if s >= floor else -math.inf for s in scores]
    probs = normal([math.exp(s) for s in scores])
    if params.top_p < 1:
        mass, kept = 0.0, set()
        for i in sorted(range(len(probs)), key=lambda i: (probs[i], i), reverse=True):
            if mass < params.top_p:
                kept.add(i)
            mass += probs[i]
        probs = normal([p if i in kept else 0.0 for i, p in enumerate(probs)])
    floor = params.min_p * max(probs)
    return normal([p if p >= floor else 0.0 for p in probs])


def normal(weights: Sequence[float]) -> list[float]:
    total = sum(weights)
    return [w / total for w in weights]


def choose(logits: Tensor, params: SamplingParams, position: int) -> int:
    """The token at `position` of the text: the likeliest, or the winner of the seeded race."""
    values = logits.tolist()
    if params.temperature == 0:
        return values.index(max(values))
    assert params.seed is not None
    key = target_key(params.seed, position)
    probs = law_of(values, params)
    return max(range(len(probs)), key=lambda i: probs[i] / exponential(key, i))


def plain_text(
    next_logits: NextLogits,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    eos: Collection[int] = (),
    limit: int | None = None,
) -> tuple[list[int], str]:
    """New tokens one by one, and why they end. `limit`: most tokens of prompt and text together."""
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos))
    tokens = list(prompt)
    while True:
        tokens.append(choose(next_logits(tokens), params, len(tokens)))
        if tokens[-1] in ends:
            return tokens[len(prompt) :], "stop"
        if len(tokens) == limit or len(tokens) - len(prompt) == params.max_tokens:
            return tokens[len(prompt) :], "length"
