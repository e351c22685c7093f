"""Nothing in a JSON schema is passed over: both libraries keep to it, or refuse it by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from sooner.core.tree import EMPTY
from sooner.engine.constraint import Constraint
from sooner.engine.grammar import GrammarCompiler
from sooner.engine.grammar_schema import closed
from sooner.errors import ConfigError
from sooner.structured import StructuredOutputs
from tests.engine.grammars import BACKENDS
from tests.tiny import VOCAB, tiny_tokenizer

I, N, S = {"type": "integer"}, {"type": "number"}, {"type": "string"}  # noqa: E741  # short, for the table
AB = {"a": I, "b": I}

# schema, a text that fits it, a text that does not.
CASES: dict[str, tuple[Any, str, str]] = {
    "multipleOf": ({"type": "integer", "multipleOf": 5}, "10", "7"),
    "multipleOf of a number": ({"type": "number", "multipleOf": 0.5}, "1.5", "0.3"),
    "multipleOf and range": ({"type": "integer", "multipleOf": 5, "minimum": 7}, "10", "11"),
    "minimum": ({"type": "integer", "minimum": -3, "maximum": 12}, "12", "13"),
    "exclusive": ({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 9}, "4", "3"),
    "number range": ({"type": "number", "minimum": 3.5}, "3.75", "3.1"),
    "range without a type": ({"minimum": 3}, '"a"', "1"),
    "uniqueItems": ({"type": "array", "items": I, "uniqueItems": True}, "[1]", "[1,1]"),
    "uniqueItems off": ({"type": "array", "items": I, "uniqueItems": False}, "[1,1]", "[true]"),
    "contains": ({"type": "array", "items": I, "contains": {"const": 3}}, "[3]", "[1]"),
    "minContains": ({"type": "array", "items": I, "contains": {"const": 3}, "minContains": 2}, "[3,3]", "[3]"),
    "items": ({"type": "array", "items": I, "minItems": 1, "maxItems": 2}, "[1,2]", "[1,2,3]"),
    "prefixItems": ({"type": "array", "prefixItems": [I], "items": S}, '[1,"a"]', "[1,2]"),
    "unevaluatedItems": ({"type": "array", "prefixItems": [I], "unevaluatedItems": False}, "[1]", "[1,2]"),
    "not": ({"type": "integer", "not": {"const": 1}}, "2", "1"),
    "if": (
        {"type": "object", "properties": AB, "if": {"required": ["a"]}, "then": {"required": ["b"]}},
        "{}",
        '{"a":1}',
    ),
    "dependentRequired": (
        {"type": "object", "properties": AB, "dependentRequired": {"a": ["b"]}},
        "{}",
        '{"a":1}',
    ),
    "dependentSchemas": (
        {"type": "object", "properties": AB, "dependentSchemas": {"a": {"required": ["b"]}}},
        "{}",
        '{"a":1}',
    ),
    "propertyNames": ({"type": "object", "propertyNames": {"pattern": "^x[a-z]*$"}}, '{"xa":1}', '{"a":1}'),
    "propertyNames and properties": (
        {"type": "object", "properties": {"xa": S}, "propertyNames": {"pattern": "^y"}},
        "{}",
        '{"xa":"s"}',
    ),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^x[a-z]*$": I}, "additionalProperties": False},
        '{"xa":1}',
        '{"xa":"s"}',
    ),
    "minProperties": (
        {"type": "object", "additionalProperties": I, "minProperties": 2},
        '{"a":1,"b":2}',
        '{"a":1}',
    ),
    "required": ({"type": "object", "properties": AB, "required": ["b"]}, '{"a":1,"b":2}', '{"a":1}'),
    "required but not named": (
        {"type": "object", "properties": {"a": I}, "required": ["b"], "additionalProperties": I},
        '{"a":1,"b":2}',
        '{"a":1}',
    ),
    "other properties": ({"type": "object", "properties": {"a": I}}, '{"a":1}', '{"b":1}'),
    "format": ({"type": "string", "format": "date"}, '"2020-02-03"', '"x"'),
    "pattern": ({"type": "string", "pattern": "^a+$"}, '"aa"', '"b"'),
    "pattern and length": ({"type": "string", "pattern": "^a+$", "minLength": 3}, '"aaa"', '"a"'),
    "length": ({"type": "string", "minLength": 2, "maxLength": 3}, '"ab"', '"abcd"'),
    "length without a type": ({"minLength": 3}, '"abc"', '"a"'),
    "several types": ({"type": ["string", "null"]}, "null", "1"),
    "const": ({"const": {"a": [1]}}, '{"a":[1]}', '{"a":[2]}'),
    "enum": ({"enum": [1, "a", None]}, '"a"', "2"),
    "enum and type": ({"type": "string", "enum": ["a", "b"]}, '"a"', '"c"'),
    "enum against its type": ({"type": "string", "enum": [1, "a"]}, '"a"', "1"),
    "enum and minimum": ({"enum": [1, 2], "minimum": 2}, "2", "1"),
    "anyOf": ({"anyOf": [I, S]}, '"a"', "1.5"),
    "anyOf and type": ({"type": "string", "anyOf": [I, S]}, '"a"', "1"),
    "anyOf and properties": (
        {"type": "object", "properties": AB, "additionalProperties": False, "anyOf": [{"required": ["a"]}]},
        '{"a":1}',
        '{"b":1}',
    ),
    "oneOf that may both fit": ({"oneOf": [I, N]}, "1.5", "1"),
    "oneOf that may not": ({"oneOf": [I, S]}, "1", "1.5"),
    "allOf of one": ({"allOf": [{"type": "integer", "minimum": 3}]}, "3", "1"),
    "allOf of two": ({"allOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 5}]}, "4", "9"),
    "$ref": ({"type": "array", "items": {"$ref": "#/$defs/i"}, "$defs": {"i": I}}, "[1]", '["a"]'),
    "$ref and more": ({"$ref": "#/$defs/i", "minimum": 5, "$defs": {"i": I}}, "7", "1"),
    "$ref to itself": (
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False},
        '{"a":{"a":{}}}',
        '{"a":1}',
    ),
    "$dynamicRef": ({"$dynamicRef": "#i", "$defs": {"i": {**I, "$dynamicAnchor": "i"}}}, "1", '"a"'),
    "deep inside": (
        {"type": "array", "items": {"anyOf": [{"type": "array", "items": {"not": I}}]}},
        '[["a"]]',
        "[[1]]",
    ),
    "a property called like a keyword": (
        {"type": "object", "properties": {"not": I, "contains": S, "properties": I}},
        '{"not":1}',
        '{"not":"a"}',
    ),
}
# What neither library keeps to.
REFUSED = {
    "uniqueItems", "contains", "minContains", "not", "if", "dependentRequired", "dependentSchemas",
    "propertyNames and properties", "oneOf that may both fit", "$dynamicRef", "deep inside",
}  # fmt: skip


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    one = GrammarCompiler(tiny_tokenizer().backend_tokenizer, VOCAB, (0,), seconds=60)
    yield one
    one.close()


def refused(compiler: GrammarCompiler, wanted: StructuredOutputs) -> str | None:
    try:
        compiler.compile(wanted)
    except ConfigError as error:
        return str(error)
    return None


def fits(compiler: GrammarCompiler, constraint: Constraint, text: str) -> bool:
    """Byte by byte, as long as the mask allows it."""
    spelled = compiler.vocabulary().spelled
    for byte in text.encode():
        token = spelled.index(bytes([byte]))
        if constraint.ended or not constraint.masks(EMPTY)[0, token]:
            return False
        constraint.advance([token])
    return constraint.ended or bool(constraint.masks(EMPTY)[0, 0])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
def test_a_schema_is_kept_to_or_refused(compiler: GrammarCompiler, backend: str, name: str) -> None:
    schema, good, bad = CASES[name]
    wanted = StructuredOutputs(json=schema, backend=backend)
    refusal = refused(compiler, wanted)
    if refusal is not None:
        assert refusal.startswith("structured_outputs json cannot be compiled: ")
        assert backend != "auto" or name in REFUSED, refusal
        return
    assert name not in REFUSED
    assert fits(compiler, compiler.compile(wanted), good)
    assert not fits(compiler, compiler.compile(wanted), bad)


def test_each_library_keeps_to_most_of_these(compiler: GrammarCompiler) -> None:
    for backend, least in (("xgrammar", 25), ("llguidance", 35), ("auto", len(CASES) - len(REFUSED))):
        wanted = (StructuredOutputs(json=schema, backend=backend) for schema, _, _ in CASES.values())
        kept = sum(refused(compiler, one) is None for one in wanted)
        assert least <= kept < len(CASES), backend


def test_closing_touches_schemas_only() -> None:
    """Names of properties and values of enums stay as they are; what is put together stays open."""
    plain = {"type": "object", "properties": {"properties": {"enum": [{"properties": {}}]}}}
    assert closed(plain) == {**plain, "additionalProperties": False}
    for open_one in (
        {"properties": {"a": I}, "allOf": [{"properties": {"b": I}}]},
        {"properties": {"a": I}, "additionalProperties": True},
        {"properties": {"a": I}, "required": ["b"]},
        {"type": "object"},
        True,
    ):
        assert closed(open_one) == open_one
    nested = {"items": {"properties": {"a": {"properties": {"b": I}}}}, "$defs": {"d": {"properties": {}}}}
    assert json.dumps(closed(nested)).count("additionalProperties") == 3
