"""Throughput and latency under load: the same requests for every setting, taking turns. Knows no plots.

Requests come either as others end, so many at a time (closed), or at random at a given rate (Poisson), the same
moments for every setting. Figures have the names of `vllm bench serve`.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from rich.table import Table

from sooner.config import EngineConfig
from sooner.engine.engine import Engine
from sooner.engine.request import Request
from sooner.engine.stats import Acceptance
from sooner.errors import ConfigError
from sooner.llm import LLM
from sooner.model.load import Loaded
from sooner.params import SamplingParams

PERCENTILES = (50, 90, 99)
_NAP = 0.0005  # seconds, while nothing runs and nothing has come


@dataclass(frozen=True, slots=True)
class Arrival:
    """When requests come. rate: a second, on average; None = closed, each comes when there is a place for it."""

    rate: float | None = None

    @staticmethod
    def parse(text: str) -> Arrival:
        """Read "closed" or "poisson:RATE". Raises ConfigError."""
        kind, colon, rate = text.partition(":")
        if text == "closed":
            return Arrival()
        try:
            value = float(rate)
        except ValueError:
            value = 0.0
        if kind != "poisson" or not colon or not math.isfinite(value) or value <= 0:
            raise ConfigError(f'arrival must be "closed" or "poisson:RATE" with a rate above 0, got {text!r}.')
        return Arrival(value)

    def moments(self, count: int, seed: int) -> list[float]:
        """Seconds after the start at which each request comes; all 0 when closed."""
        if self.rate is None:
            return [0.0] * count
        random, now, found = Random(seed), 0.0, []
        for _ in range(count):
            now += random.expovariate(self.rate)
            found.append(now)
        return found


@dataclass(frozen=True, slots=True)
class Order:
    """One request as it is sent."""

    prompt: tuple[int, ...]
    params: SamplingParams


@dataclass(slots=True)
class Served:
    """One request as it was answered. times: when each group of tokens came, and how many; seconds from start."""

    came: float
    times: list[tuple[float, int]] = field(default_factory=list)
    tokens: tuple[int, ...] = ()
    prompt: int = 0
    stats: Acceptance = field(default_factory=Acceptance)
    failed: bool = False

    @property
    def ttft(self) -> float:
        return self.times[0][0] - self.came

    @property
    def latency(self) -> float:
        return self.times[-1][0] - self.came

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first; None for a text of one."""
        written = sum(count for _, count in self.times)
        return (self.times[-1][0] - self.times[0][0]) / (written - 1) if written > 1 else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between tokens; those that came together have 0 between them."""
        found = [0.0] * (self.times[0][1] - 1) if self.times else []
        for (before, _), (now, count) in zip(self.times, self.times[1:], strict=False):
            found += [now - before] + [0.0] * (count - 1)
        return found


@dataclass(frozen=True, slots=True)
class LoadRun:
    """All requests of one run."""

    served: tuple[Served, ...]
    duration: float
    most_at_once: int

    @property
    def output_tokens(self) -> int:
        return sum(len(one.tokens) for one in self.served)

    @property
    def output_throughput(self) -> float:
        """Tokens written a second, all requests together."""
        return self.output_tokens / self.duration


def serve(
    engine: Engine,
    orders: Sequence[Order],
    concurrency: int,
    arrival: Arrival,
    *,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> LoadRun:
    """Send the orders, at most `concurrency` at once, and wait for all of them."""
    if concurrency < 1:
        raise ConfigError(f"concurrency must be at least 1, got {concurrency}.")
    moments = arrival.moments(len(orders), seed)
    served: list[Served] = []
    requests: dict[str, tuple[Request, Served]] = {}
    start, sent, most = clock(), 0, 0
    while requests or sent < len(orders):
        now = clock() - start
        while sent < len(orders) and len(requests) < concurrency and moments[sent] <= now:
            request = engine.add(orders[sent].prompt, orders[sent].params)
            one = Served(moments[sent] if arrival.rate is not None else now, prompt=len(request.prompt))
            served.append(one)
            requests[request.id] = (request, one)
            sent += 1
        most = max(most, len(requests))
        if not requests:
            time.sleep(_NAP)
            continue
        events = engine.step()
        now = clock() - start
        for event in events:
            request, one = requests[event.request.id]
            if event.tokens:
                one.times.append((now, len(event.tokens)))
            if event.finish is not None:
                del requests[request.id]
                one.tokens = tuple(request.tokens[len(request.prompt) :])
                one.stats, one.failed = request.tally.close(), event.finish == "error" or not one.times
    return LoadRun(tuple(served), clock() - start, most)


def figures(run: LoadRun) -> dict[str, object]:
    """The run in vLLM's key names; times in milliseconds."""
    good = [one for one in run.served if not one.failed]
    prompts, written = sum(one.prompt for one in good), sum(len(one.tokens) for one in good)
    found: dict[str, object] = {
        "duration": run.duration,
        "completed": len(good),
        "failed": len(run.served) - len(good),
        "total_input_tokens": prompts,
        "total_output_tokens": written,
        "request_throughput": len(good) / run.duration,
        "output_throughput": written / run.duration,
        "total_token_throughput": (prompts + written) / run.duration,
        "max_concurrent_requests": run.most_at_once,
    }
    found |= _spread("ttft_ms", [one.ttft for one in good])
    found |= _spread("tpot_ms", [one.tpot for one in good if one.tpot is not None])
    found |= _spread("itl_ms", [gap for one in good for gap in one.gaps])
    found |= _spread("e2el_ms", [one.latency for one in good])
    return found | _speculative([one.stats for one in good])


def _speculative(stats: Sequence[Acceptance]) -> dict[str, object]:
    total = sum(stats, Acceptance())
    drafts = total.drafted_by_depth[0] if total.drafted_by_depth else 0
    return {
        "spec_decode_acceptance_rate": 100 * total.acceptance,
        "spec_decode_acceptance_length": 1 + total.accepted / drafts if drafts else 1.0,
        "spec_decode_num_drafts": drafts,
        "spec_decode_draft_tokens": total.drafted,
        "spec_decode_accepted_tokens": total.accepted,
        "spec_decode_per_position_acceptance_rates": [n / drafts for n in total.accepted_by_depth if drafts],
        "tokens_per_step": total.tokens_per_step,
        "reused_prompt_tokens": total.reused,
        "estimated_speedup": total.speedup,
    }


def _spread(name: str, seconds: Sequence[float]) -> dict[str, object]:
    """Mean, median, standard deviation and percentiles, in milliseconds; 0 where nothing was measured."""
    values = sorted(1000 * s for s in seconds) or [0.0]
    found: dict[str, object] = {
        f"mean_{name}": statistics.fmean(values),
        f"median_{name}": statistics.median(values),
        f"std_{name}": statistics.pstdev(values),
    }
    return found | {f"p{p}_{name}": percentile(values, p) for p in PERCENTILES}


def percentile(ordered: Sequence[float], p: float) -> float:
    """With linear interpolation between neighbours, as numpy does."""
    place = (len(ordered) - 1) * p / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True, slots=True)
class Cell:
    """What one setting did at one concurrency. runs: one for each repeat. equal: texts that are those of plain."""

    runs: tuple[LoadRun, ...]
    equal: int

    @property
    def throughput(self) -> float:
        return statistics.median(run.output_throughput for run in self.runs)

    @property
    def middle(self) -> LoadRun:
        """The run with the median throughput."""
        ordered = sorted(self.runs, key=lambda run: run.output_throughput)
        return ordered[(len(ordered) - 1) // 2]


def compare(
    engines: Mapping[str, Engine],
    orders: Sequence[Order],
    concurrency: int,
    arrival: Arrival,
    *,
    repeats: int = 1,
    seed: int = 0,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, Cell]:
    """Every engine serves the same orders, `repeats` times, taking turns; the first is plain decoding."""
    names = list(engines)
    runs: dict[str, list[LoadRun]] = {name: [] for name in names}
    for turn in range(repeats):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            runs[name].append(serve(engines[name], orders, concurrency, arrival, seed=seed + turn))
            progress()
    plain = [one.tokens for one in runs[names[0]][0].served]
    return {name: Cell(tuple(done), _equal(done, plain)) for name, done in runs.items()}


def _equal(runs: Sequence[LoadRun], plain: Sequence[tuple[int, ...]]) -> int:
    """Orders whose text was that of plain decoding in every run."""
    texts = zip(*([one.tokens for one in run.served] for run in runs), strict=True)
    return sum(set(found) == {expected} for found, expected in zip(texts, plain, strict=True))


FIXED = (2, 4, 8)
KEYS = ("output_throughput", "median_ttft_ms", "p99_ttft_ms", "mean_itl_ms", "p99_itl_ms", "tokens_per_step")


def contenders(
    target: Loaded, draft: str, concurrency: Sequence[int], width: int | None, kv_memory: str | None = None
) -> dict[str, Engine]:
    """Plain decoding, fixed drafts of 2, 4 and 8, and the adaptive controller, each an engine over one target.

    kv_memory: the limit that each keeps by itself, as LLM takes it."""
    most = max(concurrency)
    # Shared beginnings would give the second to come what the first has computed.
    config = EngineConfig(max_requests=most, step_rows=max(1024, 64 * most), reuse_prefixes=False)
    how: dict[str, Any] = {"config": config, "kv_memory": kv_memory}
    made = {"plain": LLM(target, "none", k=0, **how).engine}
    made |= {f"k={k}": LLM(target, draft, k=k, width=width, **how).engine for k in FIXED}
    return made | {"adaptive": LLM(target, draft, width=width, **how).engine}


def bench(
    engines: Mapping[str, Engine],
    orders: Sequence[Order],
    concurrency: Sequence[int],
    arrival: Arrival,
    *,
    repeats: int = 1,
    seed: int = 0,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, dict[int, dict[str, object]]]:
    """found[setting][concurrency] = figures by vLLM's names, of the run with the median throughput.

    ratio: output throughput over that of plain decoding; equal: texts that are those of plain decoding.
    """
    for engine in engines.values():
        serve(engine, [Order(orders[0].prompt, replace(orders[0].params, max_tokens=8))], 1, Arrival())
    found: dict[str, dict[int, dict[str, object]]] = {name: {} for name in engines}
    for level in concurrency:
        cells = compare(engines, orders, level, arrival, repeats=repeats, seed=seed, progress=progress)
        plain = next(iter(cells.values())).throughput
        for name, cell in cells.items():
            extra = {"ratio": cell.throughput / plain, "equal": cell.equal, "max_concurrency": level}
            found[name][level] = figures(cell.middle) | extra
    return found


def table(found: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> Table:
    """For people: one row for each concurrency and setting."""
    shown = Table(caption="output_throughput: tokens a second, all requests; ratio: over plain; times in ms")
    for column in ("at once", "setting", *KEYS, "ratio", "equal"):
        shown.add_column(column, justify="left" if column == "setting" else "right", overflow="fold")
    for level in next(iter(found.values())):
        for name, cells in found.items():
            cell = cells[level]
            values = [f"{cell[key]:.2f}" for key in (*KEYS, "ratio")]
            shown.add_row(str(level), name, *values, f"{cell['equal']} of {cell['completed']}")
    return shown
