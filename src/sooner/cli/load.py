"""`sooner bench --concurrency`: plain, fixed and adaptive under load. Knows no model; see measure/load.py."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from sooner.cli.terminal import console, dim, progress
from sooner.errors import ConfigError
from sooner.measure.workload import Question
from sooner.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the command line asked for. concurrency: "1,4,8"; arrival: "closed" or "poisson:RATE"."""

    model: str
    draft: str
    concurrency: str
    arrival: str
    plot: Path | None
    repeat: int
    width: int | None
    dtype: str
    device: str
    runtime: str
    quantize: str | None
    threads: int | None
    kv_memory: str | None
    raw: bool
    only_json: bool

    @property
    def levels(self) -> list[int]:
        """Raises ConfigError for what is not a list of whole numbers above 0."""
        parts = self.concurrency.split(",")
        if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
            raise ConfigError(f"concurrency must be numbers like 1,4,16, got {self.concurrency!r}.")
        return sorted({int(part) for part in parts})


def bench_load(wishes: Wishes, questions: Sequence[Question], params: SamplingParams) -> None:
    """Serve the prompts at every concurrency with every setting; tables, plots, and one JSON object."""
    levels = wishes.levels
    with progress(f"loading {wishes.model}") as (advance, expect):
        from sooner.measure import load, plots, report
        from sooner.measure.bench import encode, open_target

        arrival = load.Arrival.parse(wishes.arrival)
        if wishes.plot is not None:
            plots.writable([wishes.plot])
        target = open_target(wishes)
        prompts = encode(target, questions, raw=wishes.raw, room=params.max_tokens or 1)
        engines = load.contenders(target, wishes.draft, levels, wishes.width, wishes.kv_memory)
        expect(len(engines) * len(levels) * wishes.repeat)
        orders = [load.Order(tuple(prompt), params) for prompt in prompts]
        seed = params.seed or 0
        found = load.bench(engines, orders, levels, arrival, repeats=wishes.repeat, seed=seed, progress=advance)
    if wishes.kv_memory is not None:
        dim(str(engines["adaptive"].memory))
    if wishes.plot is not None:
        plots.curves(found, wishes.plot)
    if not wishes.only_json:
        console().print(load.table(found))
    results = [
        {"setting": name, "max_concurrency": level, **figures}
        for name, cells in found.items()
        for level, figures in cells.items()
    ]
    summary = {"model": wishes.model, "draft": wishes.draft, "arrival": wishes.arrival, "prompts": len(questions)}
    typer.echo(json.dumps({**summary, "results": results, "machine": report.machine()}))
