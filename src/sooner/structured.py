"""What shape a text must have: JSON, a regular expression, one of some choices, a grammar. Compiles nothing."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sooner.errors import ConfigError, unknown

Kind = Literal["json", "json_object", "regex", "choice", "grammar"]
BACKENDS = ("auto", "xgrammar", "llguidance")

MAX_SOURCE = 64 * 1024  # bytes
MAX_NESTING = 64
MAX_CHOICES = 1024


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """Exactly one of: json (a JSON schema, as text or as a dict), json_object (any JSON object), regex,
    choice (strings), grammar (EBNF, root rule `root`). backend: "auto", "xgrammar" or "llguidance".

    Raises ConfigError naming what is wrong; whether the schema, expression or grammar itself is sound
    shows when it is compiled.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    backend: str = "auto"

    def __post_init__(self) -> None:
        given = [name for name in ("json", "regex", "choice", "grammar") if getattr(self, name) is not None]
        given += ["json_object"] * bool(self.json_object)
        if len(given) != 1:
            raise ConfigError(
                "structured_outputs takes exactly one of json, json_object, regex, choice, grammar; "
                f"got {', '.join(given) or 'none'}."
            )
        if not isinstance(self.json_object, bool):
            raise ConfigError(f"structured_outputs json_object must be true or false, got {self.json_object!r}.")
        if self.backend not in BACKENDS:
            raise ConfigError(unknown("structured output backend", str(self.backend), BACKENDS))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ConfigError(f"structured_outputs {name} must be a non-empty string, got {value!r}.")
        if self.json is not None:
            object.__setattr__(self, "json", _schema(self.json))
        try:
            size = len(self.source.encode())
        except UnicodeEncodeError as error:
            raise ConfigError(f"structured_outputs {self.kind} is not Unicode text: {error.reason}.") from error
        if size > MAX_SOURCE:
            raise ConfigError(f"structured_outputs {self.kind} is longer than {MAX_SOURCE} bytes.")

    @property
    def kind(self) -> Kind:
        if self.json is not None:
            return "json"
        if self.regex is not None:
            return "regex"
        if self.choice is not None:
            return "choice"
        return "grammar" if self.grammar is not None else "json_object"

    @property
    def source(self) -> str:
        """What is to be compiled, as text; choices as a JSON list."""
        if self.choice is not None:
            return jsonlib.dumps(list(self.choice))
        return str(self.json or self.regex or self.grammar or "")


def _choices(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) and item for item in value):
        raise ConfigError(f"structured_outputs choice must be a list of non-empty strings, got {value!r}.")
    if not 1 <= len(value) <= MAX_CHOICES:
        raise ConfigError(f"structured_outputs choice takes 1 to {MAX_CHOICES} strings, got {len(value)}.")
    return tuple(value)


def _schema(value: object) -> str:
    """The schema as compact JSON text."""
    try:
        parsed = jsonlib.loads(value) if isinstance(value, str) else value
        text = jsonlib.dumps(parsed)
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"structured_outputs json is not a JSON schema: {error}.") from error
    if not isinstance(parsed, Mapping | bool):
        raise ConfigError(f"structured_outputs json must be a JSON object, got {type(parsed).__name__}.")
    if _depth(text) > MAX_NESTING:
        raise ConfigError(f"structured_outputs json is nested deeper than {MAX_NESTING} levels.")
    return text


def _depth(text: str) -> int:
    """Deepest nesting of brackets in JSON text, strings left out."""
    deepest = depth = 0
    quoted = escaped = False
    for character in text:
        if quoted:
            quoted = escaped or character != '"'
            escaped = character == "\\" and not escaped
        elif character == '"':
            quoted = True
        elif character in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "]}":
            depth -= 1
    return deepest
