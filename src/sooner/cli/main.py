"""The `sooner` command: its verbs, and how it ends. Knows no model.

Exit status: 0; 1 for a bug of ours, with its traceback or as `verify` found it; 2 for whatever the user can
mend, in one line; 130 after Ctrl-C; 141 when whoever read the output has gone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated, Any, NoReturn

import typer

from sooner.cli.bench import bench
from sooner.cli.generate import generate
from sooner.cli.options import in_options
from sooner.cli.pull import pull
from sooner.cli.terminal import complain, quieten_libraries
from sooner.cli.train import train
from sooner.cli.verify import verify
from sooner.errors import ConfigError, SoonerError

USER_ERROR, INTERRUPTED, READER_GONE = 2, 130, 141

app = typer.Typer(name="sooner", add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)
app.command()(generate)
app.command()(bench)
app.command()(verify)
app.command()(pull)
app.add_typer(train, name="train")


@app.callback(invoke_without_command=True)
def _front(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """The same text, sooner: exact speculative decoding for causal language models."""
    if show_version:
        typer.echo(f"sooner {version('sooner')}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit. arguments: those after the program's name, sys.argv's by default."""
    quieten_libraries()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that cannot show a character is no reason to fail
            stream.reconfigure(errors="backslashreplace")
    sys.exit(_status(sys.argv[1:] if arguments is None else list(arguments)))


def _status(arguments: list[str]) -> int:
    try:
        status = _invoke(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Python flushes once more at exit; that must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE


def _invoke(arguments: list[str]) -> int:
    command: Any = typer.main.get_command(app)
    try:
        with command.make_context("sooner", arguments) as context:
            command.invoke(context)
        return 0
    except SoonerError as error:
        complain(in_options(str(error)) if isinstance(error, ConfigError) else str(error))
        return USER_ERROR
    except typer.Exit as ended:
        return ended.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except Exception as error:
        # typer carries its own copy of click in some versions, so its usage errors are known by their shape.
        if not hasattr(error, "format_message"):
            raise
        where = getattr(error, "ctx", None)
        said = str(error.format_message())
        said += "" if said.endswith((".", "?")) else "."
        complain(f"{said} Try: {where.command_path if where else 'sooner'} --help")
        return USER_ERROR
