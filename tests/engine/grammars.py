"""A vocabulary of pieces for the ToyModel, structured outputs over it, and the plain constrained loop.

Knows no engine. Whether a text fits is judged by Python's own json and re, never by a grammar library.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models
from torch import Tensor

from sooner.core.tree import EMPTY
from sooner.engine.constraint import Constraint
from sooner.engine.grammar import GrammarCompiler
from sooner.params import SamplingParams
from sooner.structured import StructuredOutputs
from tests.engine.plain import NextLogits, choose

BACKENDS = ("xgrammar", "llguidance")
EOS, SPECIAL = 0, 1
_PIECES = ["a", "b", "ab", "c", "abab", "(", ")", "((", "x", "{", "}", '"', '":', ":", ",", "0", "1", "12"]
_PIECES += ["true", "false", "yes", "no", "[", "]", " ", "\n", "lon", "g_k", "ey", '{"']
NAMES = ["<eos>", "<special>", *_PIECES]
WIDTH = len(NAMES) + 2  # the last two ids of the logits are padding


def pieces() -> Tokenizer:
    """Token i is written as NAMES[i]; the first two are special."""
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(NAMES)}, unk_token="<special>"))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in NAMES[:2]])
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def written(tokens: Sequence[int]) -> str:
    """The text of tokens; an end shows as nothing."""
    assert SPECIAL not in tokens
    return "".join(NAMES[token] for token in tokens if token != EOS)


def object_(text: str) -> bool:
    return isinstance(loaded(text), dict)


def loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def of_schema(text: str) -> bool:
    value = loaded(text)
    return (
        isinstance(value, dict)
        and value.keys() == {"long_key", "ab"}
        and value["long_key"] in (0, 1, 12)
        and isinstance(value["ab"], list)
        and len(value["ab"]) <= 2
        and all(isinstance(item, bool) for item in value["ab"])
    )


SCHEMA = {
    "type": "object",
    "properties": {
        "long_key": {"enum": [0, 1, 12]},
        "ab": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["long_key", "ab"],
}


@dataclass(frozen=True)
class Case:
    """Structured outputs and, in plain Python, what fits them. bias: makes the ToyModel's texts come to an end."""

    wanted: StructuredOutputs
    fits: Callable[[str], bool]
    bias: dict[int, float]

    def by(self, backend: str) -> StructuredOutputs:
        return replace(self.wanted, backend=backend)


def _bias(**by_name: float) -> dict[int, float]:
    return {NAMES.index(name): value for name, value in by_name.items()}


CASES = {
    "object": Case(StructuredOutputs(json_object=True), object_, {NAMES.index('"'): 2.0, NAMES.index("}"): 3.0}),
    "schema": Case(StructuredOutputs(json=SCHEMA), of_schema, {NAMES.index(" "): -2.0, NAMES.index("\n"): -2.0}),
    "regex": Case(StructuredOutputs(regex="(ab)*c"), lambda t: bool(re.fullmatch("(ab)*c", t)), _bias(c=-2.0)),
    "choice": Case(
        StructuredOutputs(choice=("yes", "no", "abab", "ababc")),
        lambda t: t in ("yes", "no", "abab", "ababc"),
        {},
    ),
    "ebnf": Case(
        StructuredOutputs(grammar='root ::= "(" root ")" | "x"'),
        lambda t: t == "(" * (len(t) // 2) + "x" + ")" * (len(t) // 2),
        {},
    ),
    "open": Case(StructuredOutputs(regex="[ab]+"), lambda t: bool(re.fullmatch("[ab]+", t)), {EOS: -0.5}),
}


def constrained_text(
    compiler: GrammarCompiler,
    wanted: StructuredOutputs,
    next_logits: NextLogits,
    prompt: Sequence[int],
    params: SamplingParams,
    eos: Collection[int] = (),
) -> tuple[list[int], str]:
    """Token by token: the logits, the bias, the mask of a fresh constraint that has read the text, a choice."""
    text: list[int] = []
    while True:
        constraint = after(compiler, wanted, text)
        if constraint.ended:
            return text, "stop"
        if len(text) == params.max_tokens:
            return text, "length"
        scores = masked(next_logits([*prompt, *text]), constraint.masks(EMPTY)[0], params)
        text.append(choose(scores, params, len(prompt) + len(text)))
        if text[-1] in eos:
            return text, "stop"


def masked(logits: Tensor, allowed: Tensor, params: SamplingParams) -> list[float]:
    scores = [x + params.logit_bias.get(i, 0.0) for i, x in enumerate(logits.tolist())]
    return [x if allowed[i] else -math.inf for i, x in enumerate(scores)]


def after(compiler: GrammarCompiler, wanted: StructuredOutputs, text: Sequence[int]) -> Constraint:
    """A fresh constraint that has read `text`."""
    constraint = compiler.compile(wanted)
    constraint.advance(text)
    return constraint
