"""Structured outputs: always valid, the text of plain constrained decoding, and faster? Measures all three.

    python benchmarks/structured.py

Plain constrained decoding is the same engine with k = 0 and without guessing what the grammar forces, in the
same run. tokens per step = tokens emitted / passes of the target. Exit status 1 if a text does not fit the
schema or differs from the plain one.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from sooner import LLM, Acceptance, Result, SamplingParams, StructuredOutputs
from sooner.engine import constraint
from sooner.errors import SoonerError
from sooner.model.load import load
from sooner.model.pull import DEFAULT_MODEL

LINE = "^[A-Za-z ,.'-]{1,40}$"
SCHEMA = {
    "type": "object",
    "properties": {
        "full_title_as_printed_on_the_cover": {"type": "string", "pattern": LINE},
        "family_name_of_the_principal_author": {"type": "string", "pattern": LINE},
        "year_of_the_first_published_edition": {"type": "integer", "minimum": 1450, "maximum": 2025},
        "number_of_pages_without_the_index": {"type": "integer", "minimum": 1, "maximum": 3000},
        "language_of_the_original_edition": {"enum": ["English", "French", "German", "Russian", "Spanish"]},
        "available_for_loan_at_the_moment": {"type": "boolean"},
    },
    "required": [
        "full_title_as_printed_on_the_cover",
        "family_name_of_the_principal_author",
        "year_of_the_first_published_edition",
        "number_of_pages_without_the_index",
        "language_of_the_original_edition",
        "available_for_loan_at_the_moment",
    ],
}
BOOKS = ("Moby Dick", "War and Peace", "Don Quixote", "Emma")
ASK = "Write the library record of {book!r} as a JSON object."


@dataclass(frozen=True, slots=True)
class Row:
    """What one way of decoding brought at one temperature."""

    way: str
    temperature: float
    results: tuple[Result, ...]

    @property
    def stats(self) -> Acceptance:
        return sum((result.stats for result in self.results), Acceptance())

    @property
    def valid(self) -> int:
        return sum(fits(result.text) for result in self.results)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit status."""
    options = _options(arguments)
    try:
        return _run(options)
    except SoonerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def fits(text: str) -> bool:
    """Whether a text fits the schema, by Python's own json."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    if not isinstance(value, dict) or list(value) != SCHEMA["required"]:
        return False
    title, author, year, pages, language, available = value.values()
    return (
        all(isinstance(line, str) and re.fullmatch(LINE[1:-1], line) for line in (title, author))
        and all(type(number) is int for number in (year, pages))
        and 1450 <= year <= 2025
        and 1 <= pages <= 3000
        and language in ("English", "French", "German", "Russian", "Spanish")
        and isinstance(available, bool)
    )


def _run(options: argparse.Namespace) -> int:
    target = load(options.model, dtype=options.dtype)
    drafting = LLM(target, options.draft, k=options.k, dtype=options.dtype)
    plain = LLM(target, "none", k=0, dtype=options.dtype)
    plain.generate(target.encode("once"), SamplingParams(max_tokens=2))  # the first pass is not measured
    rows = []
    for temperature, seeds in ((0.0, [0]), (1.0, range(options.seeds))):
        wanted = [_params(temperature, seed, options.backend) for seed in seeds]
        with _nothing_forced():
            rows.append(Row("plain", temperature, tuple(_write(plain, wanted))))
        rows.append(Row(options.draft, temperature, tuple(_write(drafting, wanted))))
    equal = [_equal(rows[i], rows[i + 1]) for i in range(0, len(rows), 2)]
    _print_table(rows, equal)
    drafted = [row for row in rows if row.way != "plain"]
    total, bare = (sum((r.stats for r in some), Acceptance()) for some in (drafted, rows[::2]))
    summary = {
        "valid": sum(row.valid for row in rows[1::2]),
        "of": sum(len(row.results) for row in rows[1::2]),
        "tokens_per_step": round(total.tokens_per_step, 3),
        "equal": sum(equal),
        "tok_s": round(total.tokens_per_second, 1),
        "plain_tok_s": round(bare.tokens_per_second, 1),
        "plain_valid": sum(row.valid for row in rows[::2]),
        "model": options.model,
        "dtype": str(target.model.lanes.store.dtype).removeprefix("torch."),
        "backend": options.backend,
    }
    print(json.dumps(summary))
    return int(not summary["valid"] == summary["of"] == summary["equal"])


def _params(temperature: float, seed: int, backend: str) -> SamplingParams:
    wanted = StructuredOutputs(json=SCHEMA, backend=backend)
    return SamplingParams(max_tokens=300, temperature=temperature, seed=seed, structured_outputs=wanted)


def _write(llm: LLM, wanted: Sequence[SamplingParams]) -> Iterator[Result]:
    """One request at a time, so that the speed is that of a text and not of a batch."""
    for params in wanted:
        for book in BOOKS:
            yield llm.chat(ASK.format(book=book), params)


@contextmanager
def _nothing_forced() -> Iterator[None]:
    kept, constraint.FORCED = constraint.FORCED, 0
    yield
    constraint.FORCED = kept


def _equal(plain: Row, drafted: Row) -> int:
    pairs = zip(plain.results, drafted.results, strict=True)
    return sum(left.token_ids == right.token_ids for left, right in pairs)


def _print_table(rows: Sequence[Row], equal: Sequence[int]) -> None:
    table = Table(
        "decoding", "temperature", "tokens", "tokens/step", "acceptance", "tok/s", "valid", "equal to plain"
    )
    for i, row in enumerate(rows):
        stats, count = row.stats, len(row.results)
        same = f"{equal[i // 2]} of {count}" if i % 2 else "-"
        table.add_row(
            row.way,
            f"{row.temperature:g}",
            str(stats.emitted),
            f"{stats.tokens_per_step:.2f}",
            f"{stats.acceptance:.2f}",
            f"{stats.tokens_per_second:.1f}",
            f"{row.valid} of {count}",
            same,
        )
    Console().print(table)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Constrained decoding with and without drafts.")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--draft", default="lookup")
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=2, help="texts of each prompt at temperature 1")
    parser.add_argument("--backend", default="auto", choices=("auto", "xgrammar", "llguidance"))
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
