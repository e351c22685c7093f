"""`sooner verify`: is the text really the same? Knows no model; the judging is in measure/."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from sooner.cli import options
from sooner.cli.pull import pull_first
from sooner.cli.terminal import console, progress
from sooner.errors import ConfigError
from sooner.model.pull import DEFAULT_MODEL

FOUND_A_BUG = 1


def verify(
    model: options.Model = DEFAULT_MODEL,
    draft: Annotated[
        list[str] | None,
        typer.Option(
            metavar="D",
            help="What drafts: lookup, model:PATH, ...; may be given several times.",
            show_default="lookup",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Prompts, in the format of Spec-Bench's question.jsonl.",
            show_default="prompts of our own",
        ),
    ] = None,
    prompts: Annotated[int, typer.Option(metavar="N", help="So many prompts, spread over the categories.")] = 12,
    max_tokens: options.MaxTokens = 64,
    temperature: Annotated[float, typer.Option(metavar="T", help="That of the sampled texts.")] = 1.0,
    seed: Annotated[int, typer.Option(metavar="S", help="Seed of the sampled texts.")] = 0,
    batch: Annotated[int, typer.Option(metavar="N", help="Serve so many prompts at once when drafting.")] = 1,
    k: options.K = None,
    width: options.Width = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    runtime: options.Runtime = "auto",
    quantize: options.Quantize = None,
    threads: options.Threads = None,
    raw: options.Raw = False,
    inject_fault: Annotated[
        bool,
        typer.Option(
            "--inject-fault", help="Shift one position id in every draft, to see that this is called a BUG."
        ),
    ] = False,
    only_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Prove on this machine that drafting does not change the text.

    Every prompt is answered by plain decoding and with each drafter, greedy and sampled with a seed. **PASS**:
    all texts are identical. **NUMERIC**: some part at a near-tie, whose margin is within what rounding does in
    this dtype. **BUG**: some part where the model was sure; exit status 1.
    """
    from sooner.measure.workload import choose, read

    if prompts < 1:
        raise ConfigError(f"--prompts must be at least 1, got {prompts}.")
    drafts = tuple(draft or ("lookup",))
    from sooner.measure.prompts import PROMPTS

    questions = choose(PROMPTS if trace is None else read(trace), limit=prompts)
    pull_first(model, *(name.removeprefix("model:") for name in drafts))
    with progress(f"loading {model}", "verifying") as (advance, expect):
        from sooner.measure import exact, verdict

        setup = exact.Setup(
            model=model,
            drafts=drafts,
            k=k,
            width=width,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            batch=batch,
            dtype=dtype,
            device=device,
            runtime=runtime,
            quantize=quantize,
            threads=threads,
            raw=raw,
            inject_fault=inject_fault,
        )
        expect(exact.texts(setup, len(questions)))
        found = exact.verify(setup, questions, advance)
    if only_json:
        typer.echo(json.dumps({**verdict.as_dict(setup, found), "prompts": len(questions)}))
    else:
        screen = console()
        for part in (*verdict.tables(found), *verdict.lines(setup, found)):
            screen.print(part, soft_wrap=False)
    if found.word == "BUG":
        raise typer.Exit(FOUND_A_BUG)
