"""Whatever a model writes fits: random walks along the masks, judged by Python's own json and re."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from random import Random

import pytest

from sooner.core.tree import EMPTY
from sooner.engine.grammar import GrammarCompiler
from sooner.errors import ConfigError
from sooner.structured import StructuredOutputs
from tests.engine.grammars import BACKENDS
from tests.engine.test_grammar_schema import CASES
from tests.tiny import VOCAB, tiny_tokenizer

END = 0
CLOSING = (b'"', b"}", b"]", b'",')
WALKS = 12
MOST = 150

S = {"type": "string"}
SCHEMAS = {name: case[0] for name, case in CASES.items()} | {
    "anything": {},
    "an object": {"type": "object"},
    "a list": {"type": "array"},
    "a number": {"type": "number"},
    "a string": S,
    "a short string": {**S, "maxLength": 6},
    "values with everything in them": {"enum": ['a"\n\x01\\é🦉', {'k"': 1.5e300}, None, [True]]},
    "a key with everything in it": {
        "type": "object",
        "properties": {'a"\n\\\x01é': S},
        "required": ['a"\n\\\x01é'],
    },
    **{
        f"pattern {p}": {**S, "pattern": p}
        for p in ("^[ -~]+$", '^["]$', r"^\n$", r"^a\\b$", "^[^x]$", r"^\s+$", "a")
    },
    **{f"format {f}": {**S, "format": f} for f in ("email", "date-time", "duration", "ipv6", "uri", "uuid")},
}
EXPRESSIONS = [
    r"[^\x00-\x1f]+", ".{3}", "(a|bc)*d?x", r"[a-z.]+@[a-z]+\.(com|org)", "(?:x|y){2,4}z", "a*?b+?", r"\.\*\[\]",
    r"[\]\-^]", "é+ü?", r"\t\n", "[^abc]{2}", "^ab$", "^a|b$", "x{2,}", r"\u00e9|\x41", "[.]+.", "(|a)b",
    r"[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?", r"[^\n]*", "a|", r"\$\^", r"[a\-z]+", "[--a]", r"(?i)straße", "ß|K",
    r"(?P<n>ab)+", "(?s).{2}",
]  # fmt: skip


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    one = GrammarCompiler(tiny_tokenizer().backend_tokenizer, VOCAB, (END,), seconds=60)
    yield one
    one.close()


def walks(compiler: GrammarCompiler, wanted: StructuredOutputs) -> list[str]:
    """The texts of the walks that came to an end; none where the library refuses the grammar."""
    try:
        compiler.compile(wanted)
    except ConfigError:
        return []
    texts = (walk(compiler, wanted, Random(seed)) for seed in range(WALKS))
    return [text for text in texts if text is not None]


def walk(compiler: GrammarCompiler, wanted: StructuredOutputs, random: Random) -> str | None:
    """Any allowed id after any other, with some liking for those that close something."""
    constraint = compiler.compile(wanted)
    spelled = compiler.vocabulary().spelled
    text = b""
    for _ in range(MOST):
        mask = constraint.masks(EMPTY)[0]
        allowed = [i for i in range(VOCAB) if mask[i]]
        assert allowed, f"a dead end after {text!r}"
        closing = [i for i in allowed if i == END or spelled[i] in CLOSING]
        token = random.choice(closing if closing and random.random() < 0.3 else allowed)
        text += spelled[token]
        constraint.advance([token])
        if constraint.ended:
            return text.decode(errors="replace")
    return None


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_fits_a_schema_is_json(compiler: GrammarCompiler, backend: str) -> None:
    seen = 0
    for schema in SCHEMAS.values():
        for text in walks(compiler, StructuredOutputs(json=schema, backend=backend)):
            json.loads(text)
            seen += 1
    assert seen > 200


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_fits_an_expression_matches_it_as_a_whole(compiler: GrammarCompiler, backend: str) -> None:
    seen = 0
    for regex in EXPRESSIONS:
        for text in walks(compiler, StructuredOutputs(regex=regex, backend=backend)):
            assert re.fullmatch(regex, text), (regex, text)
            seen += 1
    assert seen > 200
