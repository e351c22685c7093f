"""Tries a grammar in a process of its own, which can be killed: both ends of the pipe. Knows no library.

A schema or an expression comes from whoever sends a request, and compiling it may take for ever, or all
memory, or end in a crash. So it is compiled once over there, against the clock; what passes is compiled
again over here.
(Sending the result over was measured: as JSON it takes 4 to 250 times as long as compiling.)

    -> the vocabulary                               <- {}
    -> {"library", "kind", "source", "seconds"}     <- {} when the library is there, {} or {"error"} when tried
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from sooner.engine.grammar_constraint import GrammarError, GrammarLibrary, check_sound
from sooner.engine.grammar_vocab import Vocabulary
from sooner.errors import ConfigError

STARTUP_S = 60.0  # importing torch and a library, on a busy machine
MEMORY = 4 * 2**30  # bytes a grammar may take while it is compiled
STACK = 4 * 2**20  # and of stack: half of what threads have over here, where deep grammars must fit with room
LIBRARIES = ("xgrammar", "llguidance")

_WARNING = re.compile(r"Warning: (.*)")


class TooSlow(Exception):
    """Compiling took longer than the bound."""


def library(name: str, vocab: Vocabulary) -> GrammarLibrary:
    """Raises ConfigError, with the command that installs it, where a library is missing."""
    try:
        module = import_module(f"sooner.engine.grammar_{name}")
    except ImportError as error:
        raise ConfigError(
            f"structured_outputs need the package {name}, which is not there ({error}): "
            "pip install 'sooner[structured]'"
        ) from error
    made: GrammarLibrary = module.make(vocab)
    return made


class Worker:
    """This side's end. The process starts with the first trial, ends with this object or with this process,
    and is started anew if it had to be killed. One trial at a time; safe to use from several threads."""

    def __init__(self, vocab: Callable[[], Vocabulary], seconds: float) -> None:
        self._vocab, self._seconds = vocab, seconds
        self._lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None

    def check(self, name: str, kind: str, source: str) -> None:
        """Raises GrammarError with the reason, or TooSlow."""
        question = {"library": name, "kind": kind, "source": source, "seconds": self._seconds}
        with self._lock:
            self._ready(question)
            try:
                answer = self._exchange(None, self._seconds)
            except OSError as error:
                raise GrammarError("compiling it ran out of memory, or crashed") from error
        if "error" in answer:
            raise GrammarError(answer["error"])

    def close(self) -> None:
        with self._lock:
            self._end()

    def _ready(self, question: object) -> None:
        """Have the process take the question in, starting it if it is not there."""
        try:
            if self.process is None or self.process.poll() is not None:
                self._end()
                self.process = _start()
                self._finalizer = weakref.finalize(self, _stop, self.process)
                self._exchange(self._vocab().to_json(), STARTUP_S)
            self._exchange(question, STARTUP_S)
        except (OSError, TooSlow) as error:
            raise ConfigError(
                "structured_outputs cannot be compiled: the process that does so did not start. Does "
                f"`{sys.executable} -m sooner.engine.grammar_worker` start?"
            ) from error

    def _exchange(self, question: object, seconds: float) -> dict[str, str]:
        """Send a line, if there is one to send, and read one. Whatever goes wrong ends the process."""
        process = self.process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        late = threading.Event()

        def kill() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(seconds, kill)
        timer.start()
        line = b""
        with contextlib.suppress(OSError):
            if question is not None:
                process.stdin.write(json.dumps(question).encode() + b"\n")
                process.stdin.flush()
            line = process.stdout.readline()
        timer.cancel()
        timer.join()  # if it has begun it kills: better before we look than after
        if late.is_set() or not line:
            self._end()
            raise TooSlow if late.is_set() else BrokenPipeError
        answer: dict[str, str] = json.loads(line)
        return answer

    def _end(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self.process = self._finalizer = None


def _start() -> subprocess.Popen[bytes]:
    # -P and our own path: the same packages as here, and none from the folder we happen to be in.
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "sooner.engine.grammar_worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
    )


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # what was still to be written has no reader
                pipe.close()


def main() -> None:
    """The other side's end: answers until the pipe closes, which it does when our parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    replies = os.fdopen(os.dup(1), "wb")
    with tempfile.TemporaryFile() as notes:
        os.dup2(notes.fileno(), 1)
        os.dup2(notes.fileno(), 2)
        threading.stack_size(STACK)
        serving = threading.Thread(target=_serve, args=(sys.stdin.buffer, replies, notes))
        serving.start()
        serving.join()


def _serve(questions: IO[bytes], replies: IO[bytes], notes: IO[bytes]) -> None:
    def reply(answer: dict[str, str]) -> None:
        replies.write(json.dumps(answer).encode() + b"\n")
        replies.flush()

    vocab = Vocabulary.from_json(json.loads(questions.readline()))
    reply({})
    made: dict[str, GrammarLibrary] = {}
    for line in questions:
        question = json.loads(line)
        name = question["library"]
        made[name] = made.get(name) or library(name, vocab)
        reply({})
        with _within(question["seconds"]):
            reply(_try(made[name], vocab, question, notes))


def _try(made: GrammarLibrary, vocab: Vocabulary, question: dict[str, str], notes: IO[bytes]) -> dict[str, str]:
    notes.truncate(0)
    notes.seek(0)
    try:
        check_sound(made.compile(question["kind"], question["source"]), vocab)
    except GrammarError as error:
        return {"error": str(error)}
    except MemoryError:
        return {"error": "compiling it ran out of memory"}
    # A library that warns has passed over a part of the schema; then the text would not keep to it.
    notes.seek(0)
    warned = _WARNING.search(notes.read().decode(errors="replace"))
    return {"error": warned[1].strip()} if warned else {}


@contextlib.contextmanager
def _within(seconds: float) -> Iterator[None]:
    """End this process, whatever it is doing, when the parent that should have is gone. And bound memory."""
    _bound_memory()
    if not hasattr(signal, "setitimer"):
        yield
        return
    signal.setitimer(signal.ITIMER_REAL, math.ceil(2 * seconds) + 1)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)


def _bound_memory() -> None:
    """Let this process grow by MEMORY at most, where the system can say so."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return
    import resource

    used = int(statm.read_text().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = used + MEMORY if hard == resource.RLIM_INFINITY else min(used + MEMORY, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))


if __name__ == "__main__":
    main()
