"""Plain decoding of many requests at once: ours against transformers' continuous batching, in one run.

    python benchmarks/batching.py --trace question.jsonl
    python benchmarks/batching.py --trace question.jsonl --concurrency 16 --max-tokens 32 --repeats 1

Both get the same prompts (their last `--prompt` tokens, so many at once), write the same number of tokens, greedy,
and take turns. Throughput = all tokens written / seconds from the first prompt begun to the last token, prompts
included. transformers' side is `generate_batch` with its own settings for this machine, on a copy of the weights;
what it takes to set up (its thread, memory for pages) is left out, by the times it notes itself.
Last line: JSON with tokens a second of both by concurrency, their ratio, and ours over ours at 1.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, GenerationConfig

from sooner import SamplingParams
from sooner.config import Budget, EngineConfig
from sooner.control.fixed import FixedController
from sooner.draft.none import NoDrafter
from sooner.engine.engine import Engine
from sooner.errors import SoonerError
from sooner.measure.bench import encode
from sooner.measure.report import machine
from sooner.measure.workload import choose, read
from sooner.model.load import Loaded, load, resolve
from sooner.model.pull import DEFAULT_MODEL

Run = Callable[[Sequence[Sequence[int]]], float]
"""Seconds to answer all of these prompts, at once."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    try:
        found = _measure(options)
    except SoonerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for level, row in found.items():
        print(f"{level:>3} at once: " + ", ".join(f"{name} {value}" for name, value in row.items()))
    settings = {"model": options.model, "max_tokens": options.max_tokens, "prompt": options.prompt}
    print(json.dumps({"concurrency": found, **settings, "machine": machine()}))
    return 0


def _measure(options: argparse.Namespace) -> dict[int, dict[str, float]]:
    target = load(options.model, dtype=options.dtype)
    most = max(options.concurrency)
    questions = choose(read(options.trace), limit=most)
    whole = [prompt[-options.prompt :] for prompt in encode(target, questions, raw=False, room=0)]
    prompts = [prompt[i // len(whole) :] for i, prompt in enumerate(whole * (most // len(whole) + 1))][:most]
    ways: dict[str, Run] = {"sooner": _ours(target, options.max_tokens, most)}
    if not options.alone:
        ways["transformers"] = _theirs(target, options.max_tokens)
    gc.collect()
    gc.freeze()
    for way in ways.values():
        way(prompts[:2])
    found: dict[int, dict[str, float]] = {}
    for level in options.concurrency:
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(options.repeats):
            for name in list(ways)[:: 1 if turn % 2 else -1]:
                rates[name].append(level * options.max_tokens / ways[name](prompts[:level]))
        row = {name: round(statistics.median(values), 1) for name, values in rates.items()}
        if "transformers" in row:
            row["ratio"] = round(row["sooner"] / row["transformers"], 3)
        found[level] = row
        row["scaling"] = round(row["sooner"] / found[options.concurrency[0]]["sooner"], 2)
        print(json.dumps({level: row}), file=sys.stderr, flush=True)
    return found


def _ours(target: Loaded, tokens: int, most: int) -> Run:
    config = EngineConfig(max_requests=most, step_rows=max(1024, 32 * most), reuse_prefixes=False)
    engine = Engine(target.model, NoDrafter(), FixedController(Budget.chain(0)), config=config)
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)

    def run(prompts: Sequence[Sequence[int]]) -> float:
        began = time.perf_counter()
        requests = [engine.add(prompt, params) for prompt in prompts]
        while engine.busy:
            engine.step()
        took = time.perf_counter() - began
        assert all(request.written == tokens for request in requests)
        return took

    return run


def _theirs(target: Loaded, tokens: int) -> Run:
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    dtype = target.model.lanes.store.dtype
    module: Any = AutoModelForCausalLM.from_pretrained(resolve(target.name), dtype=dtype).eval()
    pad = target.eos_ids[0] if target.eos_ids else 0
    config = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=pad)

    def run(prompts: Sequence[Sequence[int]]) -> float:
        inputs = [list(prompt) for prompt in prompts]
        # Not a manager that stays: its thread would take time from ours.
        done = module.generate_batch(inputs, generation_config=config, progress_bar=False).values()
        lengths = [len(one.generated_tokens) for one in done]
        assert lengths == [tokens] * len(prompts), lengths
        return float(max(one.lifespan[1] for one in done) - min(one.lifespan[0] for one in done))

    return run


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--alone", action="store_true", help="without transformers")
    parser.add_argument(
        "--concurrency", type=lambda text: [int(c) for c in text.split(",")], default=[1, 2, 4, 8, 16, 32]
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
