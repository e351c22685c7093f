"""The drop-in against transformers' own generate on one model object, side by side in one run. Prints a table
and, as the last line, JSON.

    python benchmarks/transformers_speed.py DATA.jsonl [--prompts 24] [--start 0] [--tokens 64] [--batch 1]

DATA: rows with "turns" (the first turn is the prompt). Speeds are new tokens over wall time of the whole call, the
prompt's pass included, totals over totals; new tokens are counted up to the first end-of-text id of each row.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import sooner
from sooner.model.load import load_tokenizer, resolve

WAYS: dict[str, dict[str, Any]] = {
    "transformers": {},
    "transformers, prompt lookup 10": {"prompt_lookup_num_tokens": 10},
    "sooner, draft none, its modules": {"custom_generate": sooner.generate, "draft": "none", "runtime": "hf"},
    "sooner, draft none": {"custom_generate": sooner.generate, "draft": "none"},
    "sooner, draft auto": {"custom_generate": sooner.generate},
    "sooner, prompt lookup 10": {"custom_generate": sooner.generate, "prompt_lookup_num_tokens": 10},
    "sooner, draft auto, packed copy": {"custom_generate": sooner.generate, "runtime": "packed"},
}


def prompts(path: Path, start: int, count: int, tokenizer: Any) -> list[str]:
    """Spread over the file, so that every category is there."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    chosen = rows[start :: max(len(rows) // count, 1)][:count]
    turns = [[{"role": "user", "content": row["turns"][0]}] for row in chosen]
    return [tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) for turn in turns]


def run(model: Any, batches: list[Any], tokens: int, ends: list[int], way: dict[str, Any]) -> dict[str, Any]:
    seconds, written, texts = 0.0, 0, []
    for inputs in batches:
        began = time.perf_counter()
        out = model.generate(**inputs, max_new_tokens=tokens, do_sample=False, **way)
        seconds += time.perf_counter() - began
        for row in out[:, inputs["input_ids"].shape[1] :].tolist():
            stop = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
            written += stop
            texts.append(row[:stop])
    return {"tokens": written, "seconds": seconds, "tok_s": written / seconds, "texts": texts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS))
    asked = parser.parse_args()
    tokenizer = load_tokenizer(asked.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer.padding_side = "left"
    model = AutoModelForCausalLM.from_pretrained(resolve(asked.model), dtype=getattr(torch, asked.dtype)).eval()
    named = model.generation_config.eos_token_id
    ends = named if isinstance(named, list) else [named]
    texts = prompts(asked.data, asked.start, asked.prompts, tokenizer)
    batches = [
        tokenizer(texts[i : i + asked.batch], return_tensors="pt", padding=True, add_special_tokens=False)
        for i in range(0, len(texts), asked.batch)
    ]
    alone = "transformers, prompt lookup 10"  # refuses batches
    names = [
        name for name in WAYS if name in ("transformers", *asked.ways) and (asked.batch == 1 or name != alone)
    ]
    ways = {name: WAYS[name] for name in names}
    for way in ways.values():
        run(model, batches[:1], 4, ends, way)
    found = {name: run(model, batches, asked.tokens, ends, way) for name, way in ways.items()}
    plain = found["transformers"]
    report, expected = {}, plain["texts"]
    print(f"{len(texts)} prompts, {asked.tokens} new tokens, batch {asked.batch}, {asked.dtype}, {asked.model}")
    print(f"{'':36} {'tok/s':>8} {'ratio':>6}  equal to transformers")
    for name, one in found.items():
        equal = sum(left == right for left, right in zip(one.pop("texts"), expected, strict=True))
        report[name] = one | {"ratio": one["tok_s"] / plain["tok_s"], "equal": equal}
        print(f"{name:36} {one['tok_s']:8.1f} {one['tok_s'] / plain['tok_s']:6.2f}  {equal} of {len(texts)}")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
