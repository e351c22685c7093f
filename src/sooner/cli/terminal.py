"""What commands do with the terminal: colours, a spinner, errors in one line. Knows no command."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TextIO

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

_WIDTH = 110  # of tables where nobody says how wide the screen is

# Control characters of a text could move the cursor or change the terminal's state; a terminal gets U+FFFD.
_CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """The text without anything a terminal would obey."""
    return text.translate(_CONTROLS)


def coloured(stream: TextIO) -> bool:
    """Whether the stream is a terminal whose user wants colours (see no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def dim(line: str) -> None:
    """A line beside the text: on stderr, dim where that can be shown."""
    typer.echo(typer.style(line, dim=True) if coloured(sys.stderr) else line, err=True)


def complain(message: str) -> None:
    """An error of the user's, on stderr."""
    label = typer.style("error:", fg=typer.colors.RED, bold=True) if coloured(sys.stderr) else "error:"
    typer.echo(f"{label} {message}", err=True)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Shows a spinner while something takes long, if anybody looks at stderr."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(what):
        yield


class Advance(Protocol):
    """Says that `count` more pieces of work are done."""

    def __call__(self, count: int = 1) -> None: ...


@contextmanager
def progress(what: str, doing: str = "measuring") -> Iterator[tuple[Advance, Callable[[int], None]]]:
    """A bar on stderr: (pieces are done, so many are expected). It shows `what` until the first is done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=Console(file=sys.stderr), transient=True, disable=not sys.stderr.isatty()
    ) as bar:
        task = bar.add_task(what, total=None)

        def advance(count: int = 1) -> None:
            bar.update(task, advance=count, description=doing)

        yield advance, lambda total: bar.update(task, total=total)


def console() -> Console:
    """Standard output for tables: as wide as the terminal, or wide enough where there is none."""
    from rich.console import Console

    return Console(no_color=not coloured(sys.stdout)) if sys.stdout.isatty() else Console(width=_WIDTH)


def quieten_libraries() -> None:
    """No bars or advice from the libraries underneath, unless the environment asks for them."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
