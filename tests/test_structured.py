"""StructuredOutputs refuses by name what cannot be compiled anyway."""

from __future__ import annotations

from typing import Any

import pytest

from sooner.errors import ConfigError
from sooner.structured import StructuredOutputs


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({}, "exactly one"),
        ({"regex": "a", "choice": ("b",)}, "exactly one"),
        ({"regex": "\ud800"}, "regex is not Unicode"),
        ({"grammar": "root ::= \ud800"}, "grammar is not Unicode"),
        ({"regex": ""}, "non-empty"),
        ({"regex": 5}, "non-empty"),
        ({"json_object": "yes"}, "json_object must be true or false"),
        ({"choice": ()}, "1 to 1024"),
        ({"choice": ("a", "")}, "non-empty strings"),
        ({"json": "{"}, "not a JSON schema"),
        ({"json": "[1]"}, "JSON object"),
        ({"json": "[" * 70 + "]" * 70}, "JSON object|deeper"),
        ({"json": {"a": float}}, "not a JSON schema"),
        ({"regex": "a" * 70_000}, "longer than"),
        ({"regex": "a", "backend": "xgramar"}, "Did you mean 'xgrammar'"),
    ],
)
def test_what_is_wrong_is_named(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        StructuredOutputs(**wrong)


def test_a_schema_may_be_text_or_a_mapping() -> None:
    assert StructuredOutputs(json={"type": "object"}).source == StructuredOutputs(json='{"type":"object"}').source
