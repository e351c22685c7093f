"""A tiny Llama twice: in the engine, and as plain transformers for exact laws. Runs many requests, counts texts.

Knows no drafter's inside and no rule. The exact laws come from eager passes of transformers over whole texts
and its own logits warpers: nothing of ours is in them.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from sooner.config import Budget, EngineConfig
from sooner.control.fixed import FixedController
from sooner.core.tree import ROOT, Draft
from sooner.draft.protocol import Context, Drafter
from sooner.engine.engine import Engine
from sooner.engine.request import Request
from sooner.model import hf
from sooner.model.hf import HFModel
from sooner.model.protocol import Model
from sooner.params import SamplingParams
from sooner.testing import ScriptedDrafter

VOCAB = 8
PROMPT = (3, 1, 4, 1, 5, 2, 6, 5, 3, 1, 4, 1)  # ends in a repeat, so lookup has something to copy

PLAIN = SamplingParams(temperature=1.0)
SHARP = SamplingParams(temperature=0.7, top_k=5, top_p=0.8)
FLOOR = SamplingParams(temperature=1.3, min_p=0.15)


@dataclass(frozen=True)
class Twin:
    """model: for the engine. plain: the same weights in transformers' eager attention."""

    model: HFModel
    plain: Any

    def law(self, texts: Sequence[Sequence[int]], params: SamplingParams) -> Tensor:
        """The exact law after each of several texts of one length, float64 [len(texts), VOCAB]."""
        ids = torch.tensor([list(text) for text in texts])
        with torch.inference_mode():
            logits = self.plain(input_ids=ids).logits[:, -1].double()
        warped: Tensor = _warpers(params)(ids, logits)
        return warped.softmax(-1)

    def joint(self, prompt: Sequence[int], params: SamplingParams, length: int) -> Tensor:
        """Exact probability of every continuation of `length` tokens, float64, [VOCAB] * length."""
        found = torch.ones((), dtype=torch.float64)
        for size in range(length):
            texts = [[*prompt, *more] for more in itertools.product(range(VOCAB), repeat=size)]
            found = found[..., None] * self.law(texts, params).view(*[VOCAB] * size, VOCAB)
        return found


def _warpers(params: SamplingParams) -> LogitsProcessorList:
    found = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        found.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        found.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        found.append(MinPLogitsWarper(params.min_p))
    return found


def twin(seed: int) -> Twin:
    """A random Llama of two layers whose laws are neither flat nor one-hot."""
    hf.register()
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
    }
    made = []
    with torch.random.fork_rng(devices=[]):
        for attention in (hf.NAME, "eager"):
            torch.manual_seed(seed)
            config = AutoConfig.for_model("llama", **shape, attn_implementation=attention)
            module = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
            made.append(module)
    made[1].load_state_dict(made[0].state_dict())
    return Twin(HFModel(made[0]), made[1])


def serve(
    model: Model,
    drafter: Drafter,
    budget: Budget,
    params: Sequence[SamplingParams],
    prompt: Sequence[int] = PROMPT,
) -> list[Request]:
    """Run one request for each of `params`, many at once; none may end in an error, no draft may be refused."""
    engine = Engine(model, drafter, FixedController(budget), config=EngineConfig(max_requests=256, step_rows=8192))
    requests = [engine.add(prompt, own) for own in params]
    while engine.busy:
        engine.step()
    engine.check()
    assert not engine.guard.failures
    assert all(request.finish == "length" for request in requests)
    return requests


def written(request: Request) -> list[int]:
    return request.tokens[len(request.prompt) :]


def texts(
    model: Model,
    drafter: Drafter,
    budget: Budget,
    params: Sequence[SamplingParams],
    prompt: Sequence[int] = PROMPT,
) -> list[list[int]]:
    """What `serve` writes."""
    return [written(request) for request in serve(model, drafter, budget, params, prompt)]


def seeds(params: SamplingParams, count: int, **change: Any) -> list[SamplingParams]:
    """The same parameters, changed as told, under seeds 0 to count - 1."""
    return [replace(params, seed=seed, **change) for seed in range(count)]


def counts(texts: Sequence[Sequence[int]], length: int, vocab: int = VOCAB) -> Tensor:
    """How often every beginning of `length` tokens occurs among texts, int64 [vocab] * length."""
    codes = torch.tensor([list(text[:length]) for text in texts], dtype=torch.int64).view(-1, length)
    places = vocab ** torch.arange(length - 1, -1, -1)
    return torch.bincount((codes * places).sum(-1), minlength=vocab**length).view([vocab] * length)


def drawn_tree(width: int, *, uniform: bool = False) -> ScriptedDrafter:
    """Trees whose siblings are drawn without replacement, from the uniform law or one that depends on the
    last token and is not the target's. The draws have nothing to do with the engine's noise."""
    spread = 0.0 if uniform else 1.5
    table = (
        (spread * torch.randn((VOCAB, VOCAB), generator=torch.Generator().manual_seed(99))).softmax(-1).tolist()
    )

    def script(context: Context, budget: Budget) -> Draft:
        chance = random.Random(context.seed * 1_000 + len(context.tokens))
        tokens: list[int] = []
        parents: list[int] = []
        probs: list[list[float]] = []
        level = [(ROOT, context.tokens[-1])]
        for _ in range(budget.depth):
            below = []
            for parent, last in level:
                left = list(table[last])
                for _ in range(width):
                    whole = sum(left)
                    token = chance.choices(range(VOCAB), left)[0]
                    below.append((len(tokens), token))
                    tokens.append(token)
                    parents.append(parent)
                    probs.append([mass / whole for mass in left])
                    left[token] = 0.0
            level = below
        return Draft(tuple(tokens), tuple(parents), torch.tensor(probs))

    return ScriptedDrafter(script)


def guessed_tree(width: int) -> ScriptedDrafter:
    """Point-mass trees: below every token its `width` successors, counted round the vocabulary."""

    def script(context: Context, budget: Budget) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        level = [(ROOT, context.tokens[-1])]
        for _ in range(budget.depth):
            below = []
            for parent, last in level:
                for j in range(width):
                    below.append((len(tokens), (last + 3 * j + 1) % VOCAB))
                    tokens.append(below[-1][1])
                    parents.append(parent)
            level = below
        return Draft(tuple(tokens), tuple(parents))

    return ScriptedDrafter(script)
