"""`sooner train`: makes drafters for a target. Shows progress; knows nothing of how they are made."""

from __future__ import annotations

import math
import sys
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
    share: Annotated[float, typer.Option(metavar="F", help="Part of the positions whose loss is taken.")] = 0.5,
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
    from sooner.train.eagle import Recipe
    from sooner.train.eagle import train as run
    from sooner.train.loop import Plan

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
