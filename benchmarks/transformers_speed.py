"""The drop-in against transformers' own generate, on one model object, at batch 1 and batch 8, in one run.

    python benchmarks/transformers_speed.py DATA.jsonl [--prompts 24] [--tokens 128] [--quick]

DATA: rows with "turns" (the first is the prompt); prompts are spread over the file, so over its categories. The
ways take turns prompt by prompt (the first one changes), batches of more than one row --repeats times. tok/s: new
tokens over wall time of the whole call, the prompt's pass included; a batch's time is the median of its repeats, a
way's tok/s is total over total. ratio: the median over prompts of tok/s over that of transformers plain on one
prompt, and the quarter and three quarter points. New tokens count up to a row's first end-of-text id. Texts in
bfloat16 part from transformers' at near-ties, as its own do between batches. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

import sooner
from sooner.measure.report import machine
from sooner.model.load import load_tokenizer, resolve

PLAIN, LOOKUP = "transformers", "transformers, prompt lookup 10"
NONE, AUTO = "sooner, draft none", "sooner, draft auto"
OURS = {"custom_generate": sooner.generate}
WAYS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    LOOKUP: {"prompt_lookup_num_tokens": 10},
    "sooner, draft none, its modules": OURS | {"draft": "none", "runtime": "hf"},
    NONE: OURS | {"draft": "none"},
    AUTO: OURS,
    "sooner, prompt lookup 10": OURS | {"prompt_lookup_num_tokens": 10},
    "sooner, draft auto, packed copy": OURS | {"runtime": "packed"},
}
CHOSEN = (PLAIN, LOOKUP, "sooner, draft none, its modules", NONE, AUTO)
AIMS = {("1", AUTO, LOOKUP): 3.0, ("8", AUTO, PLAIN): 2.0, ("1", NONE, PLAIN): 0.97, ("8", NONE, PLAIN): 0.97}


@dataclass
class Found:
    """What a way did with each batch: new tokens and seconds; steps: of all rows (transformers tells none)."""

    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)
    emitted: int = 0
    steps: int = 0

    @property
    def tok_s(self) -> float:
        return sum(self.tokens) / sum(self.seconds)

    def ratios(self, other: Found) -> list[float]:
        """tok/s over that of another way, batch by batch."""
        mine = [t / s for t, s in zip(self.tokens, self.seconds, strict=True)]
        theirs = [t / s for t, s in zip(other.tokens, other.seconds, strict=True)]
        return [a / b for a, b in zip(mine, theirs, strict=True)]


def prompts(path: Path, count: int, tokenizer: Any) -> list[str]:
    """Spread over the file, so that every category is there."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    chosen = [rows[i * len(rows) // count] for i in range(min(count, len(rows)))]
    turns = [[{"role": "user", "content": row["turns"][0]}] for row in chosen]
    return [tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) for turn in turns]


def call(model: Any, inputs: Any, tokens: int, way: str) -> tuple[Any, float]:
    began = time.perf_counter()
    out = model.generate(**inputs, max_new_tokens=tokens, do_sample=False, **WAYS[way])
    return out, time.perf_counter() - began


def new_tokens(out: Any, inputs: Any, ends: Sequence[int]) -> list[list[int]]:
    rows = out[:, inputs["input_ids"].shape[1] :].tolist()
    return [row[: next((i + 1 for i, token in enumerate(row) if token in ends), len(row))] for row in rows]


def measure(
    model: Any, batches: Sequence[Any], tokens: int, ends: Sequence[int], ways: Sequence[str], repeats: int
) -> dict[str, Found]:
    """All ways on all batches, in turns."""
    found = {way: Found() for way in ways}
    for way in ways:
        call(model, batches[0], 4, way)
    for b, inputs in enumerate(batches):
        times: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(repeats):
            for i in range(len(ways)):
                way = ways[(i + b + turn) % len(ways)]
                out, seconds = call(model, inputs, tokens, way)
                times[way].append(seconds)
                if turn == 0:
                    _note(found[way], out, new_tokens(out, inputs, ends))
        for way in ways:
            found[way].seconds.append(statistics.median(times[way]))
    return found


def _note(one: Found, out: Any, rows: list[list[int]]) -> None:
    one.texts += rows
    one.tokens.append(sum(map(len, rows)))
    stats = getattr(out, "sooner_stats", None)
    if stats is not None:
        one.emitted, one.steps = one.emitted + stats.total.emitted, one.steps + stats.total.steps


def table(batch: int, found: dict[str, Found]) -> dict[str, Any]:
    """Print what was found at one batch size, and return it."""
    plain, report = found[PLAIN], {}
    print(f"\n{'batch ' + str(batch):34}{'tok/s':>8}  {'ratio':<20}{'tokens a step':>14}  texts as transformers'")
    for way, one in found.items():
        ratios = one.ratios(plain)
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        equal = sum(a == b for a, b in zip(one.texts, plain.texts, strict=True))
        rate = one.emitted / one.steps if one.steps else None
        spread = f"{middle:.2f} ({low:.2f} to {high:.2f})"
        said = "" if rate is None else f"{rate:.2f}"
        print(f"{way:34}{one.tok_s:8.1f}  {spread:<20}{said:>14}  {equal} of {len(one.texts)}")
        report[way] = {"tok_s": one.tok_s, "ratio": middle, "low": low, "high": high, "tokens_per_step": rate}
        report[way] |= {"tokens": sum(one.tokens), "seconds": sum(one.seconds), "equal": equal}
    return report


def against_aims(found: dict[str, dict[str, Found]]) -> dict[str, Any]:
    """Medians of the ratios the issue asks for, where both ways were run."""
    report = {}
    print()
    for (batch, way, other), aim in AIMS.items():
        some = found.get(batch, {})
        if way in some and other in some:
            ratio = statistics.median(some[way].ratios(some[other]))
            report[f"batch {batch}: {way} / {other}"] = {"ratio": ratio, "aim": aim}
            print(f"batch {batch}: {way} is at {ratio:.2f} of {other} (aim: at least {aim})")
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--repeats", type=int, default=3, help="of batches of more than one row")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(CHOSEN), help="beside plain transformers")
    parser.add_argument("--quick", action="store_true", help="8 prompts, 24 tokens, one repeat")
    asked = parser.parse_args()
    if asked.quick:
        asked.prompts, asked.tokens, asked.repeats = 8, 24, 1
    tokenizer = load_tokenizer(asked.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer.padding_side = "left"
    model = AutoModelForCausalLM.from_pretrained(resolve(asked.model), dtype=getattr(torch, asked.dtype)).eval()
    named = model.generation_config.eos_token_id
    ends = named if isinstance(named, list) else [named]
    texts = prompts(asked.data, asked.prompts, tokenizer)
    found: dict[str, dict[str, Found]] = {}
    tables = {}
    print(f"{len(texts)} prompts, {asked.tokens} new tokens, {asked.dtype}, {asked.model}", file=sys.stderr)
    for size in asked.batches:
        batches = [
            tokenizer(texts[i : i + size], return_tensors="pt", padding=True, add_special_tokens=False)
            for i in range(0, len(texts), size)
        ]
        # prompt lookup of transformers refuses batches
        ways = [way for way in WAYS if way in (PLAIN, *asked.ways) and (size == 1 or way != LOOKUP)]
        found[str(size)] = measure(model, batches, asked.tokens, ends, ways, asked.repeats if size > 1 else 1)
        tables[str(size)] = table(size, found[str(size)])
    aims = against_aims(found)
    versions = {"transformers": transformers.__version__, "machine": machine()}
    settings = {name: getattr(asked, name) for name in ("model", "dtype", "prompts", "tokens", "repeats")}
    print(json.dumps({"batches": tables, "aims": aims} | settings | versions))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    sys.exit(main())
