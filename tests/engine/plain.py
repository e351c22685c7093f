"""The plain loop the engine is held to, written a second time in plain Python. Knows nothing of drafts.

Only the model's logits come from outside. Filters, noise and the choice of a token are worked out anew,
number by number, from what the documentation of SamplingParams and of `core.noise` says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from sooner.params import SamplingParams
from tests.engine.automaton import Automaton

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


def edited(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int],
    text: Sequence[int],
    ends: Collection[int],
    grammar: Automaton | None = None,
) -> list[float]:
    """What acts on logits: bias, allowed ids, penalties, ends that come too early, a grammar, processors."""
    scores = [x + params.logit_bias.get(i, 0.0) for i, x in enumerate(logits)]
    if params.allowed_token_ids is not None:
        scores = [x if i in params.allowed_token_ids else -math.inf for i, x in enumerate(scores)]
    for i in {*prompt, *text}:
        scores[i] = (
            scores[i] * params.repetition_penalty if scores[i] < 0 else scores[i] / params.repetition_penalty
        )
        count = text.count(i)
        scores[i] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    if len(text) < params.min_tokens:
        scores = [-math.inf if i in ends else x for i, x in enumerate(scores)]
    if grammar is not None:
        scores = [x if i in grammar.allowed(text) else -math.inf for i, x in enumerate(scores)]
    for process in params.logits_processors:
        scores = process([*prompt, *text], torch.tensor(scores, dtype=torch.float64)).tolist()
    return scores


def law_of(logits: Sequence[float], params: SamplingParams) -> list[float]:
    """Temperature, top-k, top-p, min-p, typical-p; of equals at the edge of top-p the higher ids stay."""
    scores = [(x - max(logits)) / params.temperature for x in logits]
    if 0 < params.top_k < len(scores):
        floor = sorted(scores, reverse=True)[params.top_k - 1]
        scores = [s if s >= floor else -math.inf for s in scores]
    probs = normal([math.exp(s) for s in scores])
    if params.top_p < 1:
        order = sorted(range(len(probs)), key=lambda i: (probs[i], i), reverse=True)
        probs = kept(probs, order, params.top_p)
    floor = params.min_p * max(probs)
    probs = normal([p if p >= floor else 0.0 for p in probs])
    if params.typical_p < 1:
        surprise = {i: -math.log(p) for i, p in enumerate(probs) if p > 0}
        entropy = sum(probs[i] * s for i, s in surprise.items())
        order = sorted(surprise, key=lambda i: abs(surprise[i] - entropy))
        probs = kept(probs, order, params.typical_p)
    return probs


def kept(probs: Sequence[float], order: Sequence[int], wanted: float) -> list[float]:
    """Probabilities of the ids in `order` until they hold the wanted mass."""
    mass, left = 0.0, [0.0] * len(probs)
    for i in order:
        if mass < wanted:
            left[i] = probs[i]
        mass += probs[i]
    return normal(left)


def normal(weights: Sequence[float]) -> list[float]:
    total = sum(weights)
    return [w / total for w in weights]


def choose(scores: Sequence[float], params: SamplingParams, position: int) -> int:
    """The token at `position` of the text: the likeliest, or the winner of the seeded race."""
    if params.temperature == 0:
        return list(scores).index(max(scores))
    assert params.seed is not None
    key = target_key(params.seed, position)
    probs = law_of(scores, params)
    return max(range(len(probs)), key=lambda i: probs[i] / exponential(key, i))


def plain_text(
    next_logits: NextLogits,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    eos: Collection[int] = (),
    limit: int | None = None,
    grammar: Automaton | None = None,
) -> tuple[list[int], str]:
    """New tokens one by one, and why they end. `limit`: most tokens of prompt and text together."""
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos))
    text: list[int] = []
    while True:
        tokens = [*prompt, *text]
        scores = edited(next_logits(tokens).tolist(), params, prompt, text, ends, grammar)
        if max(scores) == -math.inf:
            return text, "error"
        text.append(choose(scores, params, len(tokens)))
        if grammar is not None:
            grammar.advance(text[-1:])
        if text[-1] in ends or (grammar is not None and grammar.ended):
            return text, "stop"
        if len(tokens) + 1 == limit or len(text) == params.max_tokens:
            return text, "length"
