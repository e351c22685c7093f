"""Progress bars of long jobs, on stderr. Know no job."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import TaskID

    from sooner.train.loop import Progress


@contextmanager
def steps(what: str, total: int, unit: str) -> Iterator[Callable[[int, int], None]]:
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
def training() -> Iterator[Callable[[str, Progress], None]]:
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
            bar.update(tasks[stage], completed=now.step, said=f"{said}, {figures(now.scores)}".rstrip(", "))

        yield report


def figures(scores: Mapping[str, float]) -> str:
    """Scores on held-out text, in words."""
    if not scores:
        return ""
    return (
        f"held out: loss {scores['held_out_loss']:.3f}, "
        f"tokens a step {scores['chain']:.2f} (chain), {scores['tree']:.2f} (4 wide)"
    )
