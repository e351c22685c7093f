"""Runs the `sooner` command inside the test process. Knows no verb."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
from transformers.utils import logging

from sooner.cli.main import run


class Ended(NamedTuple):
    """How a run of the command line ended."""

    status: object
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """The user's error: one line on stderr and nothing else anywhere."""
        assert self.status == 2
        assert self.out == ""
        assert "Traceback" not in self.err
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("error: ")
        return lines[0].removeprefix("error: ")


Sooner = Callable[..., Ended]


@pytest.fixture
def sooner(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Sooner]:
    """`sooner("generate", "hello", "--k", 3)` with stdout and stderr captured; neither is a terminal."""
    # What the command sets for its own process; set here first, so that it does not outlive the test.
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    monkeypatch.setenv("HF_HUB_VERBOSITY", "error")
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()

    def call(*arguments: object) -> Ended:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            run([str(argument) for argument in arguments])
        return Ended(ended.value.code, *capsys.readouterr())

    yield call
    if bars:
        logging.enable_progress_bar()
