"""A random Llama whose texts can be foretold, and ways to run it; for gpu.py."""

from __future__ import annotations

import dataclasses
import math
from random import Random
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from sooner import SamplingParams
from sooner.config import Budget
from sooner.control.fixed import FixedController
from sooner.core.step import Segment, pack
from sooner.core.tree import Draft, chain
from sooner.draft.protocol import Context, Drafter
from sooner.engine.engine import Engine
from sooner.engine.request import Request
from sooner.model.fused import FusedModel
from sooner.testing import ScriptedDrafter

TREE = Draft((40, 3, 22, 11, 8, 61), (-1, -1, 0, 1, 3, 3))


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a Llama. Defaults: those of Llama-3 8B."""

    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    inner: int = 14336
    vocab: int = 128_256

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            num_hidden_layers=self.layers, hidden_size=self.hidden, num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads, intermediate_size=self.inner, vocab_size=self.vocab,
            max_position_embeddings=8192, tie_word_embeddings=False, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip

    @property
    def read(self) -> int:
        """Weights that a pass reads: all but the embedding, of which it looks rows up."""
        width = self.hidden // self.heads
        layer = self.hidden * width * (2 * self.heads + 2 * self.kv_heads) + 3 * self.hidden * self.inner
        return self.layers * layer + self.vocab * self.hidden

    @property
    def kept(self) -> int:
        """Numbers that the lanes hold of one token."""
        return 2 * self.layers * self.kv_heads * self.hidden // self.heads


TINY = Shape(2, 64, 4, 2, 96, 512)
SMALL = Shape(3, 256, 8, 2, 512, 2048)


def random_module(shape: Shape, device: torch.device, dtype: torch.dtype) -> Any:
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(shape.config(), attn_implementation="sdpa", dtype=dtype)
    module = module.to_empty(device=device).eval()
    module.model.rotary_emb = type(module.model.rotary_emb)(module.config).to(device)
    torch.manual_seed(0)
    for parameter in module.parameters():
        parameter.data.normal_(std=0.02) if parameter.dim() > 1 else parameter.data.fill_(1.0)
    return module


@torch.no_grad()
def counting(shape: Shape, device: torch.device, dtype: torch.dtype) -> Any:
    """A random model that counts: after id t comes t + 1, since the layers add less than the embedding holds."""
    module = random_module(shape, device, dtype)
    embedding = module.model.embed_tokens.weight
    embedding.normal_()
    module.lm_head.weight.copy_(embedding.roll(1, 0))
    for layer in module.model.layers:
        layer.self_attn.o_proj.weight.normal_(std=0.3 / math.sqrt(shape.hidden * shape.layers))
        layer.mlp.down_proj.weight.normal_(std=0.3 / math.sqrt(shape.inner * shape.layers))
    return module


def walk(model: FusedModel) -> list[torch.Tensor]:
    """Logits of passes that come again and again: two texts, one in chunks, with trees and chains behind them."""
    random, lanes = Random(0), model.lanes
    one, two = lanes.open(), lanes.open()
    text = [random.randrange(SMALL.vocab) for _ in range(500)]
    found = []
    for at in range(0, 330, 3):
        chunk = tuple(text[at : at + 3])
        draft = TREE if at % 2 else chain(text[at + 3 : at + 3 + at % 6])
        segments = [Segment(one, at, chunk, draft)]
        if at % 5 == 0:
            start = len(lanes.held(two))
            segments.append(Segment(two, start, tuple(text[start : start + 20])))
        step = pack(segments)
        found.append(model.forward(step, rows=step.law_rows).logits)
        lanes.settle(one, text[: at + 3])
        lanes.settle(two, text)
    for lane in (one, two):
        lanes.close(lane)
    return found


def guesser(vocab: int, chance: float) -> ScriptedDrafter:
    """Chains in which every token is right with that chance, given that those before it are."""
    random = Random(0)

    def script(context: Context, budget: Budget) -> Draft:
        guess, tokens = context.tokens[-1], []
        for _ in range(budget.depth):
            guess = (guess + (1 if random.random() < chance else 2)) % vocab
            tokens.append(guess)
        return chain(tokens)

    return ScriptedDrafter(script)


def write(
    model: FusedModel, texts: list[list[int]], count: int, drafter: Drafter, depth: int, temperature: float = 0.0
) -> list[Request]:
    """The ended requests; tokens hold prompt and text."""
    budget = Budget(depth, 1 if depth else 0, depth)
    engine = Engine(model, drafter, FixedController(budget))
    # Sampled texts count as well: the margins are wide, but the law is worked out for all ids above min_p.
    params = SamplingParams(max_tokens=count, temperature=temperature, top_p=0.9 if temperature else 1.0)
    requests = [engine.add(text, params) for text in texts]
    while engine.busy:
        engine.step()
    return requests
