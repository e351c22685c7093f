"""Is the text really the same? Compares token ids with transformers' own greedy generate; measures no speed.

    python benchmarks/equality.py --trace question.jsonl --limit 30 --max-tokens 64

In float32 every drafter is held to transformers. In a narrower type kernels round differently, so the
drafters are held to plain decoding (`none`), and transformers is reported beside them. Every divergence
is shown with the logit margin between the two tokens, from one plain pass over what both agree on: a
margin of 0.00 in bfloat16 is a tie, not a mistake. Exit status 1 if anything that is held diverges.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from sooner import LLM, SamplingParams
from sooner.errors import SoonerError
from sooner.measure.bench import encode
from sooner.measure.workload import Question, choose, read
from sooner.model.load import load
from sooner.model.plain import PlainModel
from sooner.model.pull import DEFAULT_MODEL

YARDSTICK = "transformers"


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where two texts part. position: index among the new tokens. A token is None where a text has ended.

    margin: logit of `expected` minus logit of `got`; None where one of them is missing.
    """

    question_id: int | str
    draft: str
    held_to: str
    position: int
    expected: int | None
    got: int | None
    margin: float | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print, and return the exit status."""
    options = _options(arguments)
    try:
        return _run(options)
    except SoonerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    questions = choose(read(options.trace), limit=options.limit)
    params = SamplingParams(max_tokens=options.max_tokens)
    target = load(options.model, dtype=options.dtype)
    plain = PlainModel(target)
    prompts = encode(target, questions, raw=options.raw, room=options.max_tokens)
    asked = options.drafts or f"none,lookup,model:{options.model}"
    drafts = {draft: LLM(target, draft, dtype=options.dtype) for draft in ["none", *asked.split(",")]}
    held_to = YARDSTICK if options.dtype == "float32" else "none"
    divergences: list[Divergence] = []
    for question, prompt in zip(questions, prompts, strict=True):
        texts = {YARDSTICK: plain.generate(prompt, params).tokens}
        for draft, llm in drafts.items():
            [result] = llm.generate([prompt], params)
            texts[draft] = result.token_ids
        divergences += compare(question, prompt, texts, held_to, plain)
    equal = {name: len(questions) - sum(d.draft == name for d in divergences) for name in (YARDSTICK, *drafts)}
    _print_tables(equal, divergences, len(questions), held_to)
    summary = {"prompts": len(questions), "equal": equal, "divergences": [asdict(d) for d in divergences]}
    print(json.dumps({**summary, "held_to": held_to, "model": options.model, "dtype": options.dtype}))
    return int(any(d.draft != YARDSTICK for d in divergences))


def compare(
    question: Question,
    prompt: Sequence[int],
    texts: dict[str, tuple[int, ...]],
    held_to: str,
    plain: PlainModel,
) -> list[Divergence]:
    """The divergences of all texts of one prompt from that of `held_to`."""
    found = []
    expected = texts[held_to]
    for draft, text in texts.items():
        if text == expected:
            continue
        longer = max(len(text), len(expected))
        same = next(i for i in range(longer) if text[i : i + 1] != expected[i : i + 1])
        wanted, got = (tokens[same] if same < len(tokens) else None for tokens in (expected, text))
        margin = None
        if wanted is not None and got is not None:
            logits = plain.logits([*prompt, *expected[:same]])
            margin = float(logits[wanted] - logits[got])
        found.append(Divergence(question.question_id, draft, held_to, same, wanted, got, margin))
    return found


def _print_tables(equal: dict[str, int], divergences: list[Divergence], prompts: int, held_to: str) -> None:
    console = Console()
    table = Table(caption=f"token ids compared with {held_to}", caption_justify="left")
    table.add_column("text by", overflow="fold")
    table.add_column("equal", justify="right")
    for name, count in equal.items():
        table.add_row(name, f"{count} of {prompts}")
    console.print(table)
    if divergences:
        table = Table("question", "text by", "position", "expected", "got", "margin")
        for d in divergences:
            margin = "-" if d.margin is None else f"{d.margin:.6f}"
            table.add_row(str(d.question_id), d.draft, str(d.position), str(d.expected), str(d.got), margin)
        console.print(table)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare token ids of all drafters with transformers' own.")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--trace", type=Path, required=True, help="prompts, in the format of Spec-Bench")
    parser.add_argument("--limit", type=int, default=30)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--drafts", help="default: none, lookup, and the model as its own draft model")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--raw", action="store_true", help="without the chat template")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
