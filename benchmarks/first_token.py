"""Time to the first token, by the length of the prompt: ours and transformers' own prefill; medians, interleaved.

    python benchmarks/first_token.py [--model M] [--dtype bfloat16] [--repeat 5] [--quick]

Ours: `LLM.generate` of one token with a fresh `cache_salt` each time, so nothing of a prompt is reused; all that a
caller waits for is in it. Theirs: one forward of the whole prompt with a cache and the likeliest token of the last
row, without `generate` around it. --quick: two lengths, one repeat. Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from sooner import LLM, SamplingParams
from sooner.model import load
from sooner.model.pull import DEFAULT_MODEL

LENGTHS = (16, 128, 512, 1024, 2048, 4096)


def main() -> None:
    options = _options()
    llm = LLM(options.model, draft="none", dtype=options.dtype)
    source, kind = load.resolve(options.model), getattr(torch, options.dtype)
    module = AutoModelForCausalLM.from_pretrained(source, dtype=kind, attn_implementation="sdpa").eval()
    random, limit = Random(0), llm.engine.context_limit
    found: dict[int, dict[str, float]] = {}
    for length in (16, 512) if options.quick else LENGTHS:
        if limit is not None and length >= limit:
            continue
        prompt = [random.randrange(1000, llm.target.model.vocab_size - 1000) for _ in range(length)]
        found[length] = _both(llm, module, prompt, 1 if options.quick else options.repeat)
    _print(options.model, found)
    ratios = {f"ratio_{length}": round(ms["ours"] / ms["theirs"], 3) for length, ms in found.items()}
    print(json.dumps({"model": options.model, "threads": torch.get_num_threads(), **ratios, "ms": found}))


def _both(llm: LLM, module: Any, prompt: list[int], repeat: int) -> dict[str, float]:
    salts = (str(i) for i in range(2 * repeat + 2))

    def ours() -> None:
        llm.generate(prompt, SamplingParams(max_tokens=1, cache_salt=next(salts)))

    def theirs() -> None:
        with torch.inference_mode():
            out = module(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
            out.logits[0, -1].argmax().item()

    ours(), theirs()  # what is touched first is cold
    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    for _ in range(repeat):
        times["ours"].append(_ms(ours))
        times["theirs"].append(_ms(theirs))
    return {name: round(statistics.median(own), 2) for name, own in times.items()}


def _ms(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e3


def _print(name: str, found: dict[int, dict[str, float]]) -> None:
    table = Table(title=f"{name}: ms to the first token")
    for column in ("tokens of prompt", "ours", "transformers", "ratio", "tokens a second"):
        table.add_column(column, justify="right")
    for length, ms in found.items():
        ratio, rate = ms["ours"] / ms["theirs"], length / ms["ours"] * 1e3
        table.add_row(f"{length:,}", f"{ms['ours']:.1f}", f"{ms['theirs']:.1f}", f"{ratio:.2f}", f"{rate:,.0f}")
    Console().print(table)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(load.DTYPES))
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
