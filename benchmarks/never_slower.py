"""Is speculation ever slower than plain decoding? Workloads times load, plain, fixed and adaptive in one run.

    python benchmarks/never_slower.py --trace question.jsonl            # every cell
    python benchmarks/never_slower.py --trace question.jsonl --quick    # four cells, within a minute
    python benchmarks/never_slower.py --merge part1.json part2.json --plot heat.png

A cell is a workload at a number of requests at once. All requests of a cell begin together and write the same
number of tokens; throughput = tokens after everybody's first / seconds after it, so the time of prompts does not
count. Settings take turns, each cell is run `--repeats` times, and the ratio of a setting is the median over the
repeats of its throughput over that of plain decoding in the same turn. The adaptive controller knows nothing at
the start of a workload but what a pass costs, and keeps what it learns from cell to cell, as a server would.
So that the whole takes a quarter of an hour: a fixed setting that has taken twice as long as plain decoding is
ended then, and its throughput is that of what it wrote (and its text compared as far as it got); one that was
slower than 0.8 of the best in the first turn takes no further turn.

Drafters: `--draft` for text (default lookup); scripted ones that are always wrong, always right, and wrong up to
the middle of the text and right from there on. Every text is compared with that of plain decoding.
Last line: JSON with worst_ratio (adaptive over plain, the worst cell), geomean_ratio, worst_best_ratio (adaptive
over the best fixed setting), equal.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random

from rich.console import Console
from rich.table import Table

from sooner import SamplingParams
from sooner.config import Budget, EngineConfig
from sooner.control.adaptive import AdaptiveController
from sooner.control.cost import Costs, PassCost
from sooner.control.fixed import FixedController
from sooner.control.protocol import Controller
from sooner.core.tree import Draft, chain
from sooner.draft import registry
from sooner.draft.protocol import Context, Drafter
from sooner.engine.engine import Engine
from sooner.errors import ConfigError, SoonerError
from sooner.measure.bench import encode
from sooner.measure.plots import heat_map
from sooner.measure.report import machine
from sooner.measure.workload import choose, read
from sooner.model.load import Loaded, load
from sooner.model.protocol import Model
from sooner.model.pull import DEFAULT_MODEL
from sooner.testing import ScriptedDrafter

CONCURRENCY = (1, 2, 4, 8, 16, 32)
FIXED = (2, 4, 8)
WORKLOADS = ("quote", "chat", "random", "wrong", "right", "half")
QUICK = (("quote", 1), ("chat", 4), ("wrong", 4), ("right", 8))
DEEPEST, NODES = 16, 16
PROMPT = 1024  # tokens of a prompt at most; the end of it, where the question is

TWICE, HOPELESS = 2.0, 0.8

Texts = dict[tuple[int, ...], tuple[int, ...]]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    try:
        cells = _merged(options.merge) if options.merge else _measure(options)
    except SoonerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    _print(cells)
    if options.plot:
        ratios: dict[str, dict[int, float]] = {}
        for cell in cells:
            ratios.setdefault(cell["workload"], {})[cell["concurrency"]] = cell["ratios"]["adaptive"]
        heat_map(ratios, options.plot, title="adaptive / plain, tokens a second")
    print(json.dumps(_summary(cells)))
    return 0


def _measure(options: argparse.Namespace) -> list[dict]:
    target = load(options.model, dtype=options.dtype)
    gc.collect()
    gc.freeze()  # else looking through all that was loaded halts whoever happens to run, for 0.2 s
    passes = PassCost()
    wanted = QUICK if options.quick else [(w, c) for w in options.workloads for c in options.concurrency]
    fixed = (4,) if options.quick else FIXED
    cells = []
    for workload in dict.fromkeys(w for w, _ in wanted):
        levels = [c for w, c in wanted if w == workload]
        prompts = _prompts(target, workload, max(levels), options)
        bench = Bench(target, workload, options, passes, fixed)
        bench.learn(prompts)
        for level in levels:
            cells.append(bench.cell(prompts[:level], options.repeats))
            print(json.dumps(cells[-1]), file=sys.stderr, flush=True)
    if options.out:
        options.out.write_text(json.dumps({"cells": cells, "machine": machine()}))
    return cells


class Bench:
    """All settings on one workload, over one target."""

    def __init__(
        self, target: Loaded, workload: str, options: argparse.Namespace, passes: PassCost, fixed: Sequence[int]
    ) -> None:
        self.workload = workload
        self.params = SamplingParams(max_tokens=options.max_tokens, ignore_eos=True)
        self.texts: Texts = {}
        costs = Costs()
        costs.passes = passes
        limit = Budget(DEEPEST, options.width, NODES * options.width)
        controllers: dict[str, Controller] = {"plain": FixedController(Budget.chain(0))}
        controllers |= {f"k={k}": FixedController(Budget(k, options.width, k * options.width)) for k in fixed}
        controllers["adaptive"] = AdaptiveController(limit, costs)
        config = EngineConfig(max_requests=max(CONCURRENCY), step_rows=4096)
        self.engines = {
            name: Engine(target.model, self._drafter(target.model, options), controller, config=config)
            for name, controller in controllers.items()
        }

    def learn(self, prompts: Sequence[Sequence[int]]) -> None:
        """Plain decoding of all prompts: the right texts, and prompts whose keys are there already."""
        for i in range(0, len(prompts), max(CONCURRENCY)):
            some = prompts[i : i + max(CONCURRENCY)]
            _, texts = run(self.engines["plain"], some, self.params)
            self.texts |= {tuple(p): t for p, t in zip(some, texts, strict=True)}
        run(self.engines["adaptive"], prompts[:1], self.params)

    def cell(self, prompts: Sequence[Sequence[int]], repeats: int) -> dict:
        names = list(self.engines)
        rates: dict[str, list[float]] = {name: [] for name in names}
        equal = compared = 0
        most = math.inf
        for turn in range(repeats):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                kept = name in ("plain", "adaptive")
                rate, texts = run(self.engines[name], prompts, self.params, math.inf if kept else most)
                rates[name].append(rate)
                if name == "plain":
                    most = TWICE * sum(len(text) - 1 for text in texts) / rate
                equal += sum(self.texts[tuple(p)][: len(t)] == t for p, t in zip(prompts, texts, strict=True))
                compared += len(texts)
            best = max(found[-1] for found in rates.values())
            names = [n for n in names if n in ("plain", "adaptive") or rates[n][-1] >= HOPELESS * best]
        ratio = {
            name: statistics.median(own / plain for own, plain in zip(found, rates["plain"], strict=False))
            for name, found in rates.items()
        }
        return {
            "workload": self.workload,
            "concurrency": len(prompts),
            "plain_tok_s": round(statistics.median(rates["plain"]), 2),
            "ratios": {name: round(value, 4) for name, value in ratio.items()},
            "spread": [round(a / b, 3) for a, b in zip(rates["adaptive"], rates["plain"], strict=True)],
            "equal": equal,
            "texts": compared,
        }

    def _drafter(self, model: Model, options: argparse.Namespace) -> Drafter:
        if self.workload in ("wrong", "right", "half"):
            return ScriptedDrafter(self._script(model.vocab_size))
        spec = registry.parse(options.draft)
        return registry.make(spec, model, lambda wanted: _no_models(wanted))

    def _script(self, vocab: int) -> Callable[[Context, Budget], Draft]:
        def script(context: Context, budget: Budget) -> Draft:
            written = len(context.tokens) - context.prompt
            text = self.texts.get(tuple(context.tokens[: context.prompt]), ())
            right = text[written : written + min(budget.depth, budget.nodes)]
            wrong = tuple((token + 1) % vocab for token in right)
            use = self.workload == "right" or (self.workload == "half" and 2 * written >= len(text))
            return chain(right if use else wrong)

        return script


def run(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams, most: float = math.inf
) -> tuple[float, list[tuple[int, ...]]]:
    """Tokens a second once every request has its first token, for `most` seconds; and the texts."""
    requests = [engine.add(prompt, params) for prompt in prompts]
    while engine.busy and any(not request.written for request in requests):
        engine.step()
    began, before = time.perf_counter(), sum(request.written for request in requests)
    while engine.busy and time.perf_counter() - began < most:
        engine.step()
    took = time.perf_counter() - began
    for request in requests:
        engine.abort(request)
    rate = (sum(request.written for request in requests) - before) / took
    if isinstance(engine.guard.drafter, ScriptedDrafter):
        for kept in (engine.guard.drafter.contexts, engine.guard.drafter.outcomes, engine.guard.drafter.forgotten):
            kept.clear()
    return rate, [tuple(request.tokens[len(request.prompt) :]) for request in requests]


def _prompts(target: Loaded, workload: str, count: int, options: argparse.Namespace) -> list[list[int]]:
    if workload in ("random", "wrong", "right", "half"):
        random = Random(1)
        return [[random.randrange(1000, 40_000) for _ in range(64)] for _ in range(count)]
    if options.trace is None:
        raise ConfigError("workloads quote and chat need prompts: give --trace question.jsonl.")
    groups = ("rag", "summarization") if workload == "quote" else ("mt_bench",)
    questions = [q for q in read(options.trace) if q.group in groups]
    found = encode(target, choose(questions, limit=count), raw=False, room=0)
    cut = [prompt[-PROMPT:] for prompt in found]
    more = [prompt[7 * (i // len(cut)) :] for i, prompt in enumerate(cut * (count // len(cut) + 1))]
    return more[:count]


def _no_models(wanted: object) -> Model:
    raise ConfigError(f"this benchmark takes drafters without a model of their own, got {wanted}.")


def _merged(paths: Sequence[Path]) -> list[dict]:
    return [cell for path in paths for cell in json.loads(path.read_text())["cells"]]


def _print(cells: Sequence[Mapping]) -> None:
    names = list(cells[0]["ratios"])
    table = Table(caption="tokens a second after everybody's first, over plain decoding in the same turn; median")
    for column in ("workload", "at once", "plain tok/s", *names[1:], "adaptive / best fixed", "equal"):
        table.add_column(column, justify="right" if column != "workload" else "left")
    for cell in cells:
        ratios = cell["ratios"]
        shown = [f"{ratios[name]:.2f}" for name in names[1:]]
        counts = (f"{_of_best(ratios):.2f}", f"{cell['equal']} of {cell['texts']}")
        table.add_row(cell["workload"], str(cell["concurrency"]), str(cell["plain_tok_s"]), *shown, *counts)
    Console(width=120).print(table)


def _of_best(ratios: Mapping[str, float]) -> float:
    return ratios["adaptive"] / max(value for name, value in ratios.items() if name != "adaptive")


def _summary(cells: Sequence[Mapping]) -> dict:
    adaptive = [cell["ratios"]["adaptive"] for cell in cells]
    return {
        "cells": len(cells),
        "worst_ratio": round(min(adaptive), 4),
        "geomean_ratio": round(math.exp(statistics.fmean(map(math.log, adaptive))), 4),
        "worst_best_ratio": round(min(_of_best(cell["ratios"]) for cell in cells), 4),
        "equal": sum(cell["equal"] for cell in cells),
        "texts": sum(cell["texts"] for cell in cells),
    }


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--draft", default="lookup")
    parser.add_argument("--width", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--workloads", type=lambda text: text.split(","), default=list(WORKLOADS))
    parser.add_argument(
        "--concurrency", type=lambda text: [int(c) for c in text.split(",")], default=list(CONCURRENCY)
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--merge", type=Path, nargs="+")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
