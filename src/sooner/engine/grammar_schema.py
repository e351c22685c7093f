"""What in a JSON schema a grammar library would not keep to, and closing objects. Knows no library's code.

A schema may hold schemas under a few keywords only; everything else in it is data.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "unevaluatedItems", "unevaluatedProperties", "propertyNames")

# xgrammar 0.2.9 reads none of these; it says nothing, and the text would break them.
_UNREAD = (
    "contains",
    "minContains",
    "maxContains",
    "not",
    "if",
    "then",
    "else",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "$dynamicRef",
    "$recursiveRef",
)
# Of these it makes strings with raw control characters, which are no JSON.
_BROKEN = ("minLength", "maxLength")
# The same where a pattern asks for a quotation mark, a backslash or a control character, which JSON escapes.
_ESCAPED = re.compile(r"[\x00-\x1f\"]|\\[\\nrtfvae0xuc]")
# Beside one of these it reads nothing else that narrows the schema.
_ALONE = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")
_NARROWING = frozenset(
    [
        "type",
        "properties",
        "patternProperties",
        "additionalProperties",
        "required",
        "propertyNames",
        "minProperties",
        "maxProperties",
        "items",
        "prefixItems",
        "minItems",
        "maxItems",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
        "minLength",
        "maxLength",
        "pattern",
        "format",
        "unevaluatedItems",
        "unevaluatedProperties",
    ]
) | set(_ALONE)
# Without a type it does not read these.
_TYPED = (
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "pattern",
    "format",
)


def unread(schema: object) -> str | None:
    """What xgrammar would pass over in a schema, or get wrong, or None if it keeps to all of it."""
    for part in _all(schema):
        found = _unread_here(part)
        if found:
            return found
    return None


def closed(schema: Any) -> Any:
    """The schema with objects closed to properties it does not name, as xgrammar has it in its strict mode.

    Objects that are put together from several schemas, or say themselves what else they take, stay open.
    """
    if not isinstance(schema, Mapping):
        return schema
    result = dict(schema)
    for keyword in _MAPS:
        if isinstance(result.get(keyword), Mapping):
            result[keyword] = {name: closed(part) for name, part in result[keyword].items()}
    for keyword in ("anyOf", "oneOf", "prefixItems"):
        if isinstance(result.get(keyword), list):
            result[keyword] = [closed(part) for part in result[keyword]]
    for keyword in _SINGLE:
        if keyword in result:
            result[keyword] = closed(result[keyword])
    composed = any(keyword in result for keyword in ("allOf", "anyOf", "oneOf", "$ref", "unevaluatedProperties"))
    named = result.get("properties")
    if isinstance(named, Mapping) and not composed and set(_names(result)) <= named.keys():
        result.setdefault("additionalProperties", False)
    return result


def _all(schema: object) -> Iterator[Schema]:
    """A schema and every schema in it."""
    if not isinstance(schema, Mapping):
        return
    yield schema
    parts = [part for keyword in _MAPS for part in _values(schema.get(keyword))]
    parts += [part for keyword in _LISTS for part in _values(schema.get(keyword))]
    parts += [schema[keyword] for keyword in _SINGLE if keyword in schema and keyword != "propertyNames"]
    if isinstance(schema.get("propertyNames"), Mapping):
        parts.append({"type": "string", **schema["propertyNames"]})  # names are strings, and nobody says so
    for part in parts:
        yield from _all(part)


def _values(value: object) -> list[object]:
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, list) else []


def _unread_here(schema: Schema) -> str | None:
    for keyword in (*_UNREAD, *_BROKEN):
        if keyword in schema:
            return f"'{keyword}'"
    if schema.get("uniqueItems"):
        return "'uniqueItems'"
    beside = _beside(schema)
    if beside:
        return beside
    patterns = [schema.get("pattern"), *(schema.get("patternProperties") or ())]
    if any(isinstance(pattern, str) and _ESCAPED.search(pattern) for pattern in patterns):
        return "a pattern with characters that JSON escapes"
    if "type" not in schema:
        typed = [keyword for keyword in _TYPED if keyword in schema]
        if typed and not any(keyword in schema for keyword in _ALONE):
            return f"'{typed[0]}' without a 'type'"
    if "propertyNames" in schema and "properties" in schema:
        return "'propertyNames' beside 'properties'"
    if set(_names(schema)) - set(schema.get("properties") or ()):
        return "'required' names that are not in 'properties'"
    return None


def _beside(schema: Schema) -> str | None:
    """What stands beside a keyword that xgrammar reads alone."""
    alone = next((keyword for keyword in _ALONE if keyword in schema), None)
    if alone is None:
        return None
    others = [keyword for keyword in schema if keyword in _NARROWING and keyword != alone]
    values = schema["enum"] if alone == "enum" else [schema.get("const")]
    if alone in ("enum", "const") and others == ["type"] and _fit(values, schema["type"]):
        return None
    return f"'{others[0]}' beside '{alone}'" if others else None


def _fit(values: object, kinds: object) -> bool:
    """Whether all values are of the named JSON types, so that naming the types adds nothing."""
    allowed = kinds if isinstance(kinds, list) else [kinds]
    return isinstance(values, list) and all(any(kind in allowed for kind in _kinds(value)) for value in values)


def _kinds(value: object) -> tuple[str, ...]:
    if isinstance(value, bool):
        return ("boolean",)
    if isinstance(value, int):
        return ("integer", "number")
    names = {str: "string", float: "number", list: "array", dict: "object", type(None): "null"}
    return (names[type(value)],)


def _names(schema: Schema) -> list[str]:
    required = schema.get("required")
    return [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
