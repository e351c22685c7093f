"""`sooner train`: makes drafters for a target. Knows nothing of how they are made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sooner.cli import progress
from sooner.cli.options import Device, Dtype, Model
from sooner.cli.pull import pull_first
from sooner.errors import ConfigError
from sooner.model.pull import DEFAULT_MODEL

if TYPE_CHECKING:
    from sooner.model.load import Loaded
    from sooner.model.protocol import Ends
    from sooner.train.features import Document
    from sooner.train.loop import History, Plan
    from sooner.train.recipe import Recipe

train = typer.Typer(help="Make drafters for a model, from text the model itself writes.", no_args_is_help=True)

Data = Annotated[
    list[Path] | None,
    typer.Option(help="Text to train on: folders of shards, .jsonl or .txt files. May be given again."),
]
SelfGenerate = Annotated[
    int,
    typer.Option(metavar="N", help="Let the model write until N tokens are there (kept under OUT/text)."),
]
Out = Annotated[Path, typer.Option(help="Folder for the result; a run that was killed goes on there.")]
Steps = Annotated[int, typer.Option(metavar="N", help="Batches to train on.")]
Minutes = Annotated[
    float | None,
    typer.Option(
        metavar="M",
        help="Train so long at most, all runs together; the rate falls in time.",
        show_default="no limit",
    ),
]
Rate = Annotated[float, typer.Option(metavar="R", help="Highest learning rate.")]
Vocab = Annotated[int, typer.Option(metavar="N", help="Ids that are guessed, the most frequent of the text.")]
Window = Annotated[int, typer.Option(metavar="N", help="Tokens of one sequence.")]
Batch = Annotated[int, typer.Option(metavar="N", help="Sequences of one batch.")]
Share = Annotated[float, typer.Option(metavar="F", help="Part of the positions whose loss is taken.")]
Every = Annotated[int, typer.Option(metavar="N", help="Batches between scores on held-out text.")]
Seed = Annotated[int, typer.Option(help="Of the text written, the first weights, the order of the text.")]


@train.command()
def eagle(
    out: Out,
    model: Model = DEFAULT_MODEL,
    data: Data = None,
    self_generate: SelfGenerate = 0,
    steps: Steps = 8000,
    minutes: Minutes = None,
    rate: Rate = 1.5e-3,
    vocab: Vocab = 8192,
    window: Window = 512,
    batch: Batch = 2,
    unroll: Annotated[int, typer.Option(metavar="N", help="Steps of training-time test.")] = 3,
    share: Share = 0.25,
    every: Every = 250,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Train an EAGLE-3 head. Draft with it by `--draft eagle:OUT`.

    The target's features are stored under OUT/features first (about 3.7 KB a token for the default model),
    then the head is trained on them. Killed at any time, the same command goes on, less than a minute back.
    """
    from sooner.train.eagle import train as run
    from sooner.train.loop import Plan
    from sooner.train.recipe import Recipe

    recipe = Recipe(vocab=vocab, window=window, batch=batch, unroll=unroll, share=share, seed=seed)
    plan = Plan(steps, rate, every=every, minutes=minutes)
    _run(run, out, recipe, plan, model, data, self_generate, dtype, device)


@train.command()
def medusa(
    out: Out,
    model: Model = DEFAULT_MODEL,
    data: Data = None,
    self_generate: SelfGenerate = 0,
    steps: Steps = 4000,
    minutes: Minutes = None,
    rate: Rate = 2e-3,
    heads: Annotated[int, typer.Option(metavar="N", help="Heads; each guesses one token further.")] = 4,
    blocks: Annotated[int, typer.Option(metavar="N", help="Blocks of a head.")] = 1,
    vocab: Vocab = 8192,
    window: Window = 512,
    batch: Batch = 4,
    share: Share = 0.25,
    every: Every = 250,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Train Medusa heads that share the target's LM head. Draft with them by `--draft medusa:OUT`.

    The target's last states are stored under OUT/features first (about 1.4 KB a token for the default model),
    then the heads are trained on them. Killed at any time, the same command goes on, less than a minute back.
    """
    from sooner.train.loop import Plan
    from sooner.train.medusa import train as run
    from sooner.train.recipe import Recipe

    recipe = Recipe(vocab=vocab, window=window, batch=batch, unroll=heads, share=share, seed=seed)
    plan = Plan(steps, rate, every=every, minutes=minutes)
    _run(run, out, recipe, plan, model, data, self_generate, dtype, device, blocks=blocks)


@train.command()
def draft(
    out: Out,
    model: Model = DEFAULT_MODEL,
    data: Data = None,
    self_generate: SelfGenerate = 0,
    layers: Annotated[int, typer.Option(metavar="N", help="Layers that stay, at even distances.")] = 4,
    steps: Steps = 4000,
    minutes: Minutes = None,
    rate: Rate = 5e-4,
    window: Window = 512,
    batch: Batch = 2,
    share: Share = 0.25,
    every: Every = 250,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Train a draft model: some of the target's layers, taught to say what it says. Draft by `--draft model:OUT`.

    The target's law at every token is stored under OUT/features first (200 bytes a token), then the layers are
    trained; embedding and LM head stay. OUT is an ordinary transformers folder. Killed at any time, the same
    command goes on, less than a minute back.
    """
    from sooner.train.draft import train as run
    from sooner.train.loop import Plan
    from sooner.train.recipe import Recipe

    recipe = Recipe(window=window, batch=batch, share=share, seed=seed)
    plan = Plan(steps, rate, every=every, minutes=minutes)
    _run(run, out, recipe, plan, model, data, self_generate, dtype, device, layers=layers)


@train.command()
def table(
    out: Out,
    model: Model = DEFAULT_MODEL,
    self_generate: SelfGenerate = 0,
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
    from sooner.model.load import fingerprint
    from sooner.train import shards
    from sooner.train.table import make

    loaded = _loaded(model, out, self_generate, seed, dtype, device)
    paths = [path for folder in (out / "text", *(data or ())) for path in shards.paths(folder)]
    if not paths:
        raise ConfigError("data is missing: give --self-generate N, or --data with a folder of shards.")
    about = {"model": loaded.name, "fingerprint": fingerprint(loaded), "seed": seed}
    with progress.steps("counting", len(paths), "shards") as report:
        made, score = make(paths, loaded.model.vocab_size, about, report)
    save(made, out / "table.safetensors")
    size, keys = (out / "table.safetensors").stat().st_size / 1e6, sum(map(len, made.keys))
    typer.echo(
        f"{out / 'table.safetensors'}: {made.about['rows']:,} tokens, {keys:,} keys, {size:.1f} MB; "
        f"held out, simulated: {score.tokens_per_step:.2f} tokens per step with lookup+recycle"
    )


def _loaded(model: str, out: Path, self_generate: int, seed: int, dtype: str, device: str) -> Loaded:
    """The target, after it has written what it was asked to."""
    from sooner.model.load import load

    if self_generate < 0:
        raise ConfigError(f"--self-generate must be at least 0, got {self_generate}.")
    pull_first(model)
    loaded = load(model, dtype=dtype, device=device)
    out.mkdir(parents=True, exist_ok=True)
    if self_generate:
        from sooner.llm import LLM
        from sooner.train import text

        recorder = text.Recorder()
        llm = LLM(loaded, recorder, k=0, config=text.engine_config())
        with progress.steps("writing", self_generate, "tokens") as report:
            text.write(llm, recorder, out / "text", self_generate, seed=seed, progress=report)
    return loaded


def _ready(
    model: str, out: Path, data: list[Path] | None, self_generate: int, seed: int, dtype: str, device: str
) -> tuple[Loaded, list[Document]]:
    """The target and all text to train on: its own under OUT/text, and --data."""
    from sooner.train import data as texts

    if not data and not self_generate:
        raise ConfigError("data is missing: give --self-generate N, or --data with text of the model's own.")
    loaded = _loaded(model, out, self_generate, seed, dtype, device)
    own = [out / "text"] if self_generate else []
    longest = min(loaded.model.context_limit or 4096, 4096)
    encode: Callable[[str], list[int]] = loaded.encode
    documents = texts.read([*own, *(data or ())], encode, vocab=loaded.model.vocab_size, longest=longest)
    return loaded, documents


def _ends(loaded: Loaded) -> Ends:
    from sooner.model.protocol import WithEnds

    if not isinstance(loaded.model, WithEnds):
        raise ConfigError(f"{loaded.name} does not hand over its embedding, so no head can be trained for it.")
    return loaded.model.ends()


def _run(
    run: Callable[..., History],
    out: Path,
    recipe: Recipe,
    plan: Plan,
    model: str,
    data: list[Path] | None,
    self_generate: int,
    dtype: str,
    device: str,
    **more: int,
) -> None:
    """Text, training by `run`, and what came of it. more: settings of that kind of head alone."""
    from sooner.train import curve

    curve.check()
    loaded, documents = _ready(model, out, data, self_generate, recipe.seed, dtype, device)
    with progress.training() as report:
        history = run(loaded.model, _ends(loaded), loaded.name, documents, out, recipe, plan, report, **more)
    said = progress.figures(history.entries[-1])
    typer.echo(f"{out}: {history.tokens:,} tokens in {history.seconds / 60:.1f} min, {said}")
