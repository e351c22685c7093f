"""The command as a process of its own: quick help, real terminals, readers that leave."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from sooner.cli.terminal import printable

COMMAND = "from sooner.cli.main import run; run()"


def start(*arguments: object, stdout: int) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "TERM": "xterm", "OMP_NUM_THREADS": "1"}
    environment.pop("NO_COLOR", None)
    command = [sys.executable, "-c", COMMAND, *map(str, arguments)]
    return subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, env=environment)


def test_help_does_not_wait_for_torch() -> None:
    script = (
        "import sys, sooner.cli.main\n"
        "assert sooner.__version__\n"
        "slow = {'torch', 'transformers', 'tokenizers', 'numpy'} & set(sys.modules)\n"
        "assert not slow, slow\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_terminal_gets_colours_where_a_pipe_gets_none(tiny: Path) -> None:
    screen, shown = pty.openpty()
    arguments = ("generate", "the library, the library", "--model", tiny, "--max-tokens", 40, "--k", 8)
    process = start(*arguments, stdout=shown)
    os.close(shown)
    seen = bytearray()
    while True:
        try:
            seen += os.read(screen, 4096)
        except OSError:  # how Linux says that the other side has closed
            break
    os.close(screen)
    assert process.stderr is not None
    closing = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait() == 0, closing
    assert b"\x1b[32m" in seen
    # stderr is a pipe here: the legend is there, since the screen has colours, but no codes.
    assert "green = guessed by auto and accepted" in closing
    assert "\x1b[" not in closing


def test_a_reader_that_leaves_ends_the_command_quietly(tiny: Path) -> None:
    process = start("generate", "hello", "--model", tiny, "--max-tokens", 40, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    said = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait() == 141
    assert said == ""


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\n\tä 漢 🙂", "plain\n\tä 漢 🙂"),
        ("\x1b[2Jgone", "\ufffd[2Jgone"),
        ("back\rover\x08\x7f\x9b", "back\ufffdover\ufffd\ufffd\ufffd"),
    ],
)
def test_a_text_cannot_steer_the_terminal(text: str, shown: str) -> None:
    assert printable(text) == shown
