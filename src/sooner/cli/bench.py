"""`sooner bench`: drafters side by side on your prompts. Knows no model; the measuring is in measure/."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from sooner.cli import options
from sooner.cli.load import Wishes, bench_load
from sooner.cli.pull import pull_first
from sooner.cli.terminal import console, progress
from sooner.errors import ConfigError
from sooner.measure.workload import choose, read
from sooner.model.pull import DEFAULT_MODEL
from sooner.params import SamplingParams


def bench(
    trace: Annotated[
        Path, typer.Option(metavar="FILE", help="Prompts, in the format of Spec-Bench's question.jsonl.")
    ],
    model: options.Model = DEFAULT_MODEL,
    drafts: Annotated[
        str,
        typer.Option(
            metavar="A,B,...",
            help="As --draft of generate; transformers, transformers:lookup = its own generate.",
        ),
    ] = "none,lookup",
    category: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="Only prompts of these categories.")
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(metavar="N", help="So many prompts, spread over the categories.", show_default="all"),
    ] = None,
    max_tokens: options.MaxTokens = 128,
    k: options.K = None,
    width: options.Width = None,
    temperature: options.Temperature = 0.0,
    seed: Annotated[int, typer.Option(metavar="S", help="Seed of the sampling, the same for all.")] = 0,
    repeat: Annotated[int, typer.Option(metavar="N", help="Run each prompt N times; the median counts.")] = 1,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    runtime: options.Runtime = "auto",
    quantize: options.Quantize = None,
    threads: options.Threads = None,
    kv_memory: options.KvMemory = None,
    raw: options.Raw = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Show where the time goes: the target's pass, and all around it.")
    ] = False,
    concurrency: Annotated[
        str | None,
        typer.Option(metavar="1,4,...", help="So many requests at once, plain, fixed and adaptive."),
    ] = None,
    arrival: Annotated[
        str, typer.Option(metavar="WHEN", help="With --concurrency: closed, or poisson:RATE (requests a second).")
    ] = "closed",
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help="With --concurrency: a picture of the figures."),
    ] = None,
    only_json: Annotated[
        bool, typer.Option("--json", help="Print the last line alone, without the tables.")
    ] = False,
) -> None:
    """Compare drafters on your prompts: speed, tokens per step, and whether the text is the same.

    All run in one process over one target, taking turns prompt by prompt, one request at a time; only the
    first turn of each line is used. "none" is always among them. The last line is one JSON object.

    With --concurrency the requests overlap, and the first draft named is run with 2, 4, 8 and as many guesses as
    pay, beside plain decoding; figures have the names of `vllm bench serve`.
    """
    if kv_memory is not None and concurrency is None:
        raise ConfigError("kv_memory limits many requests at once; give --concurrency too.")
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    questions = choose(read(trace), limit=limit, categories=category.split(",") if category else ())
    names = tuple(drafts.split(","))
    pull_first(model, *(name.removeprefix("model:") for name in names))
    if concurrency is not None:
        draft = next((name for name in names if name != "none"), "none")
        how = (dtype, device, runtime, quantize, threads)
        wishes = Wishes(model, draft, concurrency, arrival, plot, repeat, width, *how, kv_memory, raw, only_json)
        bench_load(wishes, questions, params)
        return
    with progress(f"loading {model}") as (advance, expect):
        from sooner.measure import bench as measure
        from sooner.measure import report

        setup = measure.Setup(model, names, k, width, dtype, device, raw, repeat, runtime, quantize, threads)
        expect(len(setup.contenders) * len(questions) * repeat)
        comparison = measure.bench(setup, questions, params, advance)
    rows = report.rows(comparison)
    splits = report.splits(comparison) if profile else {}
    if not only_json:
        screen = console()
        for table in (*report.tables(rows), *([report.profile(splits)] if profile else [])):
            screen.print(table)
    settings = {"max_tokens": max_tokens, "k": k, "width": width, "temperature": temperature, "seed": seed}
    summary = {
        "drafts": {name: row.as_dict() for name, row in rows.items()},
        "prompts": len(questions),
        "model": model,
        "dtype": comparison.dtype,
        "settings": {**settings, "raw": raw, "repeat": repeat, "quantize": quantize},
        "device": comparison.device,
        "machine": report.machine(),
    }
    if profile:
        plain = splits[measure.BASELINE]
        summary["profile"] = {name: {**parts.as_dict(), "c": parts.cost(plain)} for name, parts in splits.items()}
    typer.echo(json.dumps(summary))
