"""`sooner train`: makes drafters for a target. Shows progress; knows nothing of how they are made."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sooner.cli.options import Device, Dtype, Model
from sooner.cli.pull import pull_first
from sooner.errors import ConfigError
from sooner.model.pull import DEFAULT_MODEL

if TYPE_CHECKING:
    from rich.progress import TaskID

    from sooner.train.loop import Progress

train = typer.Typer(help="Make drafters for a model, from text the model itself writes.", no_args_is_help=True)

Data = Annotated[
    list[Path] | None,
    typer.Option(help="Text to train on: folders of shards, .jsonl or .txt files. May be given again."),
]
Out = Annotated[Path, typer.Option(help="Folder for the result; a run that was killed goes on there.")]


@train.command()
def eagle(
    out: Out,
    model: Model = DEFAULT_MODEL,
    data: Data = None,
    steps: Annotated[int, typer.Option(metavar="N", help="Batches to train on.")] = 8000,
    rate: Annotated[float, typer.Option(metavar="R", help="Highest learning rate.")] = 1.5e-3,
    vocab: Annotated[
        int, typer.Option(metavar="N", help="Ids of the head's own LM head, the most frequent.")
    ] = 8192,
    window: Annotated[int, typer.Option(metavar="N", help="Tokens of one sequence.")] = 512,
    batch: Annotated[int, typer.Option(metavar="N", help="Sequences of one batch.")] = 2,
    unroll: Annotated[int, typer.Option(metavar="N", help="Steps of training-time test.")] = 3,
    share: Annotated[float, typer.Option(metavar="F", help="Part of the positions whose loss is taken.")] = 0.25,
    every: Annotated[int, typer.Option(metavar="N", help="Batches between scores on held-out text.")] = 250,
    seed: Annotated[int, typer.Option(help="Of the first weights and the order of the text.")] = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Train an EAGLE-3 head. Draft with it by `--draft eagle:OUT`.

    The target's features are stored under OUT/features first (about 3.7 KB a token for the default model),
    then the head is trained on them. Killed at any time, the same command goes on, less than a minute back.
    """
    from sooner.model.load import load
    from sooner.train import curve
    from sooner.train import data as texts
    from sooner.train.eagle import train as run
    from sooner.train.loop import Plan
    from sooner.train.recipe import Recipe

    curve.check()
    recipe = Recipe(vocab=vocab, window=window, batch=batch, unroll=unroll, share=share, seed=seed)
    plan = Plan(steps, rate, every=every)
    if not data:
        raise ConfigError("data is missing: give --data with text of the model's own.")
    pull_first(model)
    loaded = load(model, dtype=dtype, device=device)
    ends = getattr(loaded.model, "ends", None)
    if ends is None:
        raise ConfigError(f"{model} does not hand over its embedding, so no head can be trained for it.")
    longest = min(loaded.model.context_limit or 4096, 4096)
    documents = texts.read(data, loaded.encode, vocab=loaded.model.vocab_size, longest=longest)
    out.mkdir(parents=True, exist_ok=True)
    with _bar() as report:
        history = run(loaded.model, ends(), loaded.name, documents, out, recipe, plan, report)
    last = history.entries[-1]
    typer.echo(f"{out}: {history.tokens:,} tokens in {history.seconds / 60:.1f} min, {_figures(last)}")


@train.command()
def table(
    out: Out,
    model: Model = DEFAULT_MODEL,
    self_generate: Annotated[
        int, typer.Option(metavar="N", help="Let the model write until N tokens are there (kept under OUT/text).")
    ] = 0,
    data: Annotated[
        list[Path] | None, typer.Option(help="A folder of shards to count as well. May be given again.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of what the model writes.")] = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Count a warm table. Draft with it by `--draft recycle:OUT/table.safetensors`, or lookup+recycle:...

    The model writes user turns, documents and answers itself (60 bytes a token on disk; 300,000 tokens and
    more pay), then the table is counted, a few MB. Killed at any time, the same command goes on.
    """
    from sooner.draft.table import save
    from sooner.llm import LLM
    from sooner.model.load import fingerprint, load
    from sooner.train import shards, text
    from sooner.train.table import make

    if self_generate < 0:
        raise ConfigError(f"--self-generate must be at least 0, got {self_generate}.")
    pull_first(model)
    loaded = load(model, dtype=dtype, device=device)
    own = out / "text"
    own.mkdir(parents=True, exist_ok=True)
    if self_generate:
        recorder = text.Recorder()
        llm = LLM(loaded, recorder, k=0, config=text.engine_config())
        with _steps("writing", self_generate, "tokens") as report:
            text.write(llm, recorder, own, self_generate, seed=seed, progress=report)
    paths = [path for folder in (own, *(data or ())) for path in shards.paths(folder)]
    if not paths:
        raise ConfigError("data is missing: give --self-generate N, or --data with a folder of shards.")
    about = {"model": loaded.name, "fingerprint": fingerprint(loaded), "seed": seed}
    with _steps("counting", len(paths), "shards") as report:
        made, score = make(paths, loaded.model.vocab_size, about, report)
    save(made, out / "table.safetensors")
    size = (out / "table.safetensors").stat().st_size / 1e6
    typer.echo(
        f"{out / 'table.safetensors'}: {made.about['rows']:,} tokens, {len(made.pairs):,} pairs, {size:.1f} MB; "
        f"held out, simulated: {score.tokens_per_step:.2f} tokens per step with lookup+recycle"
    )


@contextmanager
def _steps(what: str, total: int, unit: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr that is told (done, done in this run) and shows how many a second."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description:<8}"),
        BarColumn(bar_width=20),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[said]}"),
    )
    began = time.perf_counter()
    with Progress(*columns, console=Console(file=sys.stderr)) as bar:
        task = bar.add_task(what, total=total, said="")

        def report(done: int, fresh: int) -> None:
            rate = fresh / max(time.perf_counter() - began, 1e-9)
            bar.update(task, completed=min(done, total), said=f"{rate:,.0f} {unit}/s")

        yield report


@contextmanager
def _bar() -> Iterator[Callable[[str, Progress], None]]:
    """A progress bar on stderr: tokens a second, loss, and the scores of held-out text."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description:<8}"),
        BarColumn(bar_width=20),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[said]}"),
    )
    tasks: dict[str, TaskID] = {}
    with Bar(*columns, console=Console(file=sys.stderr)) as bar:

        def report(stage: str, now: Progress) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=now.steps, said="")
            said = f"{now.tokens_per_s:,.0f} tok/s"
            if not math.isnan(now.loss):
                said += f", loss {now.loss:.3f}"
            bar.update(tasks[stage], completed=now.step, said=f"{said}, {_figures(now.scores)}".rstrip(", "))

        yield report


def _figures(scores: Mapping[str, float]) -> str:
    """Scores on held-out text, in words."""
    if not scores:
        return ""
    return (
        f"held out: loss {scores['held_out_loss']:.3f}, "
        f"tokens a step {scores['chain']:.2f} (chain of 3), {scores['tree']:.2f} (4 wide)"
    )
