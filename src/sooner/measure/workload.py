"""Prompts to measure on, from a file in Spec-Bench's format. Knows no model and no clock.

One JSON object a line: {"question_id": 81, "category": "writing", "turns": ["first prompt", ...]}.
Further fields are left alone. Spec-Bench: Xia et al. 2024, "Unlocking Efficiency in Large Language
Model Inference: A Comprehensive Survey of Speculative Decoding".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from sooner.errors import ConfigError, unknown

MT_BENCH = "mt_bench"
MT_BENCH_CATEGORIES = frozenset(
    {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
)


@dataclass(frozen=True, slots=True)
class Question:
    """One line of the trace."""

    question_id: int | str
    category: str
    turns: tuple[str, ...]

    @property
    def group(self) -> str:
        """What reports count it under: the category, or "mt_bench" for any of MT-bench's eight."""
        return MT_BENCH if self.category in MT_BENCH_CATEGORIES else self.category


def read(path: Path) -> list[Question]:
    """The questions of a trace, in order. Raises ConfigError naming the line and what is wrong with it."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # splitlines would also split inside a JSON string
    except FileNotFoundError:
        raise ConfigError(f"trace {path} does not exist.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"trace {path} is not UTF-8 text: {error.reason} at byte {error.start}.") from None
    except OSError as error:
        raise ConfigError(f"trace {path} cannot be read: {error.strerror}.") from None
    questions = [_question(line, f"{path} line {n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not questions:
        raise ConfigError(f"trace {path} is empty: it needs at least one line.")
    return questions


def choose(
    questions: Sequence[Question], *, limit: int | None = None, categories: Sequence[str] = ()
) -> list[Question]:
    """Up to `limit` questions of `categories`, spread evenly.

    The groups take turns, and within "mt_bench" its categories take turns, each in the order of the
    trace; so the first n of a longer choice are the choice of n. categories: names of categories or
    groups, none = all. Raises ConfigError for a limit below 1 or a category that does not occur.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit must be at least 1, got {limit}.")
    known = {q.category for q in questions} | {q.group for q in questions}
    for name in categories:
        if name not in known:
            raise ConfigError(unknown("category", name, known))
    wanted = [q for q in questions if not categories or q.category in categories or q.group in categories]
    groups = (_in_turn(_split(group, lambda q: q.category)) for group in _split(wanted, lambda q: q.group))
    return _in_turn(groups)[:limit]


def _question(line: str, where: str) -> Question:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}.") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{where} is not a JSON object.")
    for name in ("question_id", "category", "turns"):
        if name not in found:
            raise ConfigError(f"{where} has no {name!r}.")
    number, category, turns = found["question_id"], found["category"], found["turns"]
    if isinstance(number, bool) or not isinstance(number, int | str):
        raise ConfigError(f"{where}: question_id must be a number or a string, got {number!r}.")
    if not isinstance(category, str) or not category:
        raise ConfigError(f"{where}: category must be a string, got {category!r}.")
    if not isinstance(turns, list) or not turns or not all(_is_text(turn) for turn in turns):
        raise ConfigError(f"{where}: turns must be one or more strings, none empty, all of valid Unicode.")
    return Question(number, category, tuple(turns))


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != "" and value == value.encode("utf-8", "replace").decode()


def _split(questions: Iterable[Question], by: Callable[[Question], str]) -> list[list[Question]]:
    parts: dict[str, list[Question]] = {}
    for question in questions:
        parts.setdefault(by(question), []).append(question)
    return list(parts.values())


def _in_turn(parts: Iterable[Sequence[Question]]) -> list[Question]:
    """One of each, then the second of each, and so on."""
    return [question for round_ in zip_longest(*parts) for question in round_ if question is not None]
