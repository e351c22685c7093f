"""Is speculation ever slower than plain decoding? Workloads times load, plain, fixed and adaptive in one run.

    python benchmarks/never_slower.py --trace question.jsonl            # every cell
    python benchmarks/never_slower.py --trace question.jsonl --quick    # four cells, in about a minute
    python benchmarks/never_slower.py --merge part1.json part2.json --plot heat.png

A cell is a workload at a number of requests at once. The requests of a batch begin together and are timed from
everybody's first token on, so the time of prompts does not count, until the batch has written `--max-tokens`
for each of them, whoever wrote them, or one has written ROOM times as many: so there are always as many at once
as the cell says, and no setting is timed while its last request finishes alone. Throughput = tokens / seconds;
plain decoding has no drafter at all. A cell is some batches, one after another. All settings run a batch side
by side, each for SLICE seconds in turn: a machine that gets slower for a second gets slower for all of them.
Each cell is run `--repeats` times, and the ratio of a setting is the median over the turns of its throughput
over that of plain decoding in the same turn. Drafters begin every turn without memories, so no text has been
seen before; the adaptive controller knows nothing at the start of a workload but what a pass costs, and keeps
what it learns from turn to turn, as a server would. A fixed setting that has taken twice as long as plain
decoding is ended then, and its throughput is that of what it wrote; one that was slower than 0.8 of the best in
the first turn takes no further turn.

Drafters: `--draft` for text (default auto, with what comes with the package); scripted ones that are always wrong,
always right, and wrong for half of `--max-tokens` and right from there on. k = 2, 4, 8 guesses a step, of the
same drafter. Every text is compared with that of plain decoding in the same turn, as far as it got, and that
with what plain decoding wrote before, in other company.
Last line: JSON with worst_ratio (adaptive over plain, the worst cell), geomean_ratio, worst_best_ratio (adaptive
over the best fixed setting), controller (its share of the time of adaptive's steps, of all cells together), equal.
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
from dataclasses import dataclass
from pathlib import Path
from random import Random

from rich.console import Console
from rich.table import Table

from sooner import SamplingParams, shipped
from sooner.budgets import budget_for
from sooner.config import Budget, EngineConfig
from sooner.control.adaptive import AdaptiveController
from sooner.control.cost import Costs
from sooner.control.fixed import FixedController
from sooner.control.passes import PassCost
from sooner.control.protocol import Controller, StepRecord
from sooner.core.tree import Draft, chain
from sooner.draft import registry
from sooner.draft.none import NoDrafter
from sooner.draft.protocol import Context, Drafter
from sooner.engine.calibrate import calibrate
from sooner.engine.engine import Engine
from sooner.engine.request import Request
from sooner.errors import ConfigError, SoonerError
from sooner.measure.bench import encode
from sooner.measure.plots import heat_map
from sooner.measure.report import machine
from sooner.measure.workload import choose, read
from sooner.model.load import Loaded, fingerprint, load
from sooner.model.protocol import Model
from sooner.model.pull import DEFAULT_MODEL
from sooner.testing import ScriptedDrafter

CONCURRENCY = (1, 2, 4, 8, 16, 32)
FIXED = (2, 4, 8)
WORKLOADS = ("quote", "chat", "random", "wrong", "right", "half")
SCRIPTED = ("wrong", "right", "half")
QUICK = (("quote", 1), ("chat", 4), ("wrong", 4), ("right", 8))
DEEPEST = 16
PROMPT = 1024  # tokens of a prompt at most; the end of it, where the question is

TWICE, HOPELESS = 2.0, 0.8
KEPT = ("plain", "adaptive")
ROOM = 2  # times `--max-tokens` is what one request may write
SLICE = 0.05  # seconds a setting runs before the next one does
BATCHES = {1: 4, 2: 4, 4: 3, 8: 2, 16: 2, 32: 1}  # batches of a cell, by how many requests are in one
CONFIG = EngineConfig(max_requests=max(CONCURRENCY), step_rows=4096)

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
    calibrate(target.model, passes)
    wanted = QUICK if options.quick else [(w, c) for w in options.workloads for c in options.concurrency]
    fixed = (4,) if options.quick else FIXED
    batches: dict[str, dict[int, int]] = {}
    for workload, level in wanted:
        batches.setdefault(workload, {})[level] = 1 if options.quick else BATCHES.get(level, 2)
    counts = {workload: max(n * level for level, n in of.items()) for workload, of in batches.items()}
    scripted = max((counts[workload] for workload in SCRIPTED if workload in counts), default=0)
    texts = plain_texts(target.model, _prompts(target, "random", scripted, options), options)
    cells = []
    for workload, of in batches.items():
        prompts = _prompts(target, workload, counts[workload], options)
        bench = Bench(target, workload, options, passes, fixed, texts)
        for level, n in of.items():
            cells.append(bench.cell(prompts[: n * level], level, options.repeats))
            print(json.dumps(cells[-1]), file=sys.stderr, flush=True)
    if options.out:
        options.out.write_text(json.dumps({"cells": cells, "machine": machine()}))
    return cells


def plain_texts(model: Model, prompts: Sequence[Sequence[int]], options: argparse.Namespace) -> Texts:
    """What plain decoding writes after each prompt: what the scripted drafters know."""
    engine = Engine(model, NoDrafter(), FixedController(Budget.chain(0)), config=CONFIG)
    requests = [engine.add(prompt, _params(options)) for prompt in prompts]
    while engine.busy:
        engine.step()
    return {tuple(r.prompt): tuple(r.tokens[len(r.prompt) :]) for r in requests}


def _params(options: argparse.Namespace) -> SamplingParams:
    return SamplingParams(max_tokens=ROOM * options.max_tokens, ignore_eos=True)


class Bench:
    """All settings on one workload, over one target. texts: what plain decoding has written."""

    def __init__(
        self,
        target: Loaded,
        workload: str,
        options: argparse.Namespace,
        passes: PassCost,
        fixed: Sequence[int],
        texts: Texts,
    ) -> None:
        self.target, self.workload, self.options = target, workload, options
        self.share = options.max_tokens
        self.params = _params(options)
        self.texts = texts
        costs = Costs()
        costs.passes = passes
        scripted = workload in SCRIPTED
        self.spec = shipped.fitted(registry.parse(options.draft), target.name, lambda: fingerprint(target))
        limit = Budget.chain(DEEPEST) if scripted else budget_for(self.spec.name, None, options.width)
        self.controllers: dict[str, Controller] = {"plain": FixedController(Budget.chain(0))}
        self.controllers |= {f"k={k}": FixedController(Budget(k, limit.width, k)) for k in fixed}
        self.controllers["adaptive"] = AdaptiveController(limit, costs)
        self.control_s = self.step_s = 0.0  # of adaptive, in this cell

    def engines(self, names: Sequence[str]) -> dict[str, Engine]:
        """One for each setting, with a drafter that has seen nothing yet."""
        model = self.target.model
        drafters = {name: NoDrafter() if name == "plain" else self._drafter() for name in names}
        made = {n: Engine(model, drafters[n], self.controllers[n], config=CONFIG) for n in names}
        if "adaptive" in made:
            made["adaptive"].watch = self._spent
        return made

    def _spent(self, record: StepRecord) -> None:
        self.control_s += record.control_s
        self.step_s += record.step_s

    def cell(self, prompts: Sequence[Sequence[int]], level: int, repeats: int) -> dict:
        names = list(self.controllers)
        rates: dict[str, list[float]] = {name: [] for name in names}
        equal = compared = 0
        self.control_s = self.step_s = 0.0
        for _ in range(repeats):
            engines = self.engines(names)
            ran = {name: Ran() for name in names}
            for batch in _batches(prompts, level):
                raced = race(engines, batch, self.params, self.share)
                right = raced["plain"][1]
                for name, (took, texts) in raced.items():
                    ran[name].tokens += took.tokens
                    ran[name].seconds += took.seconds
                    held_to = self._known(batch, texts) if name == "plain" else right
                    equal += sum(_agree(own, text) for own, text in zip(held_to, texts, strict=True))
                    compared += len(texts)
            for name in names:
                rates[name].append(ran[name].tokens / ran[name].seconds)
            best = max(found[-1] for found in rates.values())
            names = [n for n in names if n in KEPT or rates[n][-1] >= HOPELESS * best]
        ratio = {
            name: statistics.median(own / plain for own, plain in zip(found, rates["plain"], strict=False))
            for name, found in rates.items()
        }
        return {
            "workload": self.workload,
            "concurrency": level,
            "plain_tok_s": round(statistics.median(rates["plain"]), 2),
            "ratios": {name: round(value, 4) for name, value in ratio.items()},
            "spread": [round(a / b, 3) for a, b in zip(rates["adaptive"], rates["plain"], strict=True)],
            "control_s": self.control_s,
            "step_s": self.step_s,
            "equal": equal,
            "texts": compared,
        }

    def _known(self, prompts: Sequence[Sequence[int]], texts: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """What plain decoding wrote after these prompts before; what it wrote now is known from now on."""
        known = [self.texts.get(tuple(prompt), ()) for prompt in prompts]
        for prompt, text, before in zip(prompts, texts, known, strict=True):
            self.texts[tuple(prompt)] = max(before, text, key=len)
        return known

    def _drafter(self) -> Drafter:
        model = self.target.model
        if self.workload in SCRIPTED:
            return ScriptedDrafter(self._script(model.vocab_size))
        return registry.make(self.spec, model, lambda wanted: _no_models(wanted))

    def _script(self, vocab: int) -> Callable[[Context, Budget], Draft]:
        def script(context: Context, budget: Budget) -> Draft:
            written = len(context.tokens) - context.prompt
            text = self.texts.get(tuple(context.tokens[: context.prompt]), ())
            right = text[written : written + min(budget.depth, budget.nodes)]
            wrong = tuple((token + 1) % vocab for token in right)
            use = self.workload == "right" or (self.workload == "half" and 2 * written >= self.share)
            return chain(right if use else wrong)

        return script


@dataclass(slots=True)
class Ran:
    """What one setting wrote, prompts and first tokens left out. over: it needs to write no more."""

    tokens: int = 0
    seconds: float = 0.0
    over: bool = False


def race(
    engines: Mapping[str, Engine], prompts: Sequence[Sequence[int]], params: SamplingParams, share: int
) -> dict[str, tuple[Ran, list[tuple[int, ...]]]]:
    """Each engine writes `share` tokens a prompt, in slices of time by turns; what it took, and the texts.

    At last plain decoding goes on until it has written as much of each text as anybody."""
    requests = {name: [engine.add(prompt, params) for prompt in prompts] for name, engine in engines.items()}
    for name, engine in engines.items():
        while engine.busy and any(not request.written for request in requests[name]):
            engine.step()
    ran = {name: Ran() for name in requests}
    enough, most = len(prompts) * (share - 1), math.inf
    while any(_goes_on(name, ran[name], most) for name in engines):
        for name, engine in engines.items():
            if _goes_on(name, ran[name], most):
                _slice(engine, ran[name], enough)
        if ran["plain"].over:
            most = TWICE * ran["plain"].seconds
    longest = [max(request.written for request in of) for of in zip(*requests.values(), strict=True)]
    plain = engines["plain"]
    while plain.busy and any(one.written < to for one, to in zip(requests["plain"], longest, strict=True)):
        plain.step()
    return {name: (ran[name], _end(engine, requests[name])) for name, engine in engines.items()}


def _agree(one: Sequence[int], other: Sequence[int]) -> bool:
    """As far as both go."""
    both = min(len(one), len(other))
    return one[:both] == other[:both]


def _end(engine: Engine, requests: Sequence[Request]) -> list[tuple[int, ...]]:
    """The texts so far; nothing of them is kept."""
    for request in requests:
        engine.abort(request)
    drafter = engine.guard.drafter
    if isinstance(drafter, ScriptedDrafter):
        for kept in (drafter.contexts, drafter.outcomes, drafter.forgotten):
            kept.clear()
    return [tuple(request.tokens[len(request.prompt) :]) for request in requests]


def _goes_on(name: str, ran: Ran, most: float) -> bool:
    return not ran.over and (name in KEPT or ran.seconds < most)


def _slice(engine: Engine, ran: Ran, enough: int) -> None:
    began = time.perf_counter()
    while not ran.over and time.perf_counter() - began < SLICE:
        events = engine.step()
        ran.tokens += sum(len(event.tokens) for event in events)
        ran.over = ran.tokens >= enough or not engine.busy or any(event.finish for event in events)
    ran.seconds += time.perf_counter() - began


def _batches(prompts: Sequence[Sequence[int]], size: int) -> list[Sequence[Sequence[int]]]:
    return [prompts[i : i + size] for i in range(0, len(prompts), size)]


def _prompts(target: Loaded, workload: str, count: int, options: argparse.Namespace) -> list[list[int]]:
    if workload == "random" or workload in SCRIPTED:
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
    columns = ("workload", "at once", "plain tok/s", *names[1:], "adaptive / best fixed", "controller", "equal")
    for column in columns:
        table.add_column(column, justify="right" if column != "workload" else "left")
    for cell in cells:
        ratios = cell["ratios"]
        shown = [f"{ratios[name]:.2f}" for name in names[1:]]
        share = cell["control_s"] / cell["step_s"]
        more = (f"{_of_best(ratios):.2f}", f"{100 * share:.1f} %", f"{cell['equal']} of {cell['texts']}")
        table.add_row(cell["workload"], str(cell["concurrency"]), str(cell["plain_tok_s"]), *shown, *more)
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
        "controller": round(sum(c["control_s"] for c in cells) / sum(c["step_s"] for c in cells), 4),
        "equal": sum(cell["equal"] for cell in cells),
        "texts": sum(cell["texts"] for cell in cells),
    }


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--width", type=int)
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
