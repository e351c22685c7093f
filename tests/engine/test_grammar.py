"""Compiling grammars: what is refused and how, what it may cost, and that no process is left behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sooner.core.tree import EMPTY
from sooner.engine.grammar import GrammarCompiler, Refused, Shelf
from sooner.engine.grammar_worker import Worker
from sooner.errors import ConfigError
from sooner.structured import StructuredOutputs
from tests.engine.grammars import BACKENDS, EOS, NAMES, WIDTH, pieces

SLOW = StructuredOutputs(  # takes far more than 10 s
    json={
        "type": "array",
        "minItems": 100_000,
        "maxItems": 400_000,
        "items": {"type": "string", "pattern": "^[a-z]{1,10000}$"},
    },
    backend="xgrammar",
)
DEEP = StructuredOutputs(  # runs out of stack: the process ends at once, with everything in it
    grammar="root ::= r3800\n" + "".join(f"r{i} ::= r{i - 1}\n" for i in range(3800, 0, -1)) + 'r0 ::= "a"',
    backend="llguidance",
)
GOOD = StructuredOutputs(regex="(ab)*c")


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    one = make()
    yield one
    one.close()


def make(**options: Any) -> GrammarCompiler:
    return GrammarCompiler(pieces(), WIDTH, (EOS,), **options)


def works(compiler: GrammarCompiler, wanted: StructuredOutputs = GOOD) -> bool:
    mask = compiler.compile(wanted).masks(EMPTY)[0]
    return {name for i, name in enumerate(NAMES) if mask[i]} >= {"ab", "c"}


def process_of(compiler: GrammarCompiler) -> subprocess.Popen[bytes] | None:
    return compiler.worker.process


def running(pid: int) -> bool:
    """Whether a process is there and not just waiting to be buried."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("wanted", "named"),
    [
        (dict(regex="(ab"), "regex cannot be compiled: .*(not closed|unclosed)"),
        (dict(regex="a(?=b)"), "regex cannot be compiled: .*([Ll]ookahead|look-ahead)"),
        (dict(json={"type": "strng"}), "json cannot be compiled: .*strng"),
        (dict(json={"$ref": "#/nowhere"}), "json cannot be compiled: .*nowhere"),
        (dict(json="false"), "json cannot be compiled: .*false"),
        (dict(grammar="root ::= other"), "grammar cannot be compiled: .*other"),
        (dict(grammar="root ::= root"), "grammar cannot be compiled: .*no text fits it"),
        (dict(grammar='root ::= ""'), "grammar cannot be compiled: .*only the empty text fits it"),
        (dict(regex="(" * 3000 + "a" + ")" * 3000), "regex cannot be compiled: .*([Nn]est|deep)"),
        (
            dict(grammar="root ::= " + "(" * 3000 + '"a"' + ")" * 3000),
            "grammar cannot be compiled: .*(Nest|recursion)",
        ),
        (dict(choice=("\ud800",)), "choice cannot be compiled: .*"),
    ],
)
@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
def test_what_is_unsound_is_refused_by_kind_and_reason(
    compiler: GrammarCompiler, backend: str, wanted: dict[str, Any], named: str
) -> None:
    """In one line, without the library's clock and source files; the next one compiles."""
    with pytest.raises(ConfigError, match=named) as caught:
        compiler.compile(StructuredOutputs(**wanted, backend=backend))
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 800
    assert not any(trace in message for trace in (".cc", "/project", "[0", "[1", "[2", "Traceback"))
    assert works(compiler)


@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
def test_expressions_that_explode_elsewhere_are_compiled_at_once(compiler: GrammarCompiler, backend: str) -> None:
    """Nested repetition, and choices between the same letters: both libraries build automata."""
    for regex in ("(a+)+b", "((a|b|ab)+)+c", "(a|b)*a(a|b){20}", "(((a{1,30}){1,30}){1,30})"):
        began = time.perf_counter()
        compiler.compile(StructuredOutputs(regex=regex, backend=backend))
        assert time.perf_counter() - began < 30


@pytest.mark.parametrize(
    ("wanted", "only"),
    [
        (dict(regex=r"\p{Ll}+"), "llguidance"),
        (dict(regex="(?i)ab|c"), "llguidance"),
        (dict(json={"allOf": [{"type": "integer", "minimum": 1}, {"maximum": 12}]}), "llguidance"),
        (dict(json={"oneOf": [{"type": "integer"}, {"type": "string"}], "title": "t"}), "both"),
        (dict(json={"type": "object", "propertyNames": {"pattern": "^a+$"}}), "xgrammar"),
    ],
)
def test_auto_takes_the_library_that_keeps_to_all_of_it(
    compiler: GrammarCompiler, wanted: dict[str, Any], only: str
) -> None:
    for backend in BACKENDS:
        if only in (backend, "both"):
            compiler.compile(StructuredOutputs(**wanted, backend=backend))
        else:
            with pytest.raises(ConfigError, match="cannot be compiled"):
                compiler.compile(StructuredOutputs(**wanted, backend=backend))
    compiler.compile(StructuredOutputs(**wanted))


def test_a_dot_is_no_line_break_for_either_library(compiler: GrammarCompiler) -> None:
    for backend in BACKENDS:
        for regex, allowed in ((".a", False), (r"[.\n]a", True), (r"\.a|\n", True), ("[^.]a", True)):
            mask = compiler.compile(StructuredOutputs(regex=regex, backend=backend)).masks(EMPTY)[0]
            assert bool(mask[NAMES.index("\n")]) is allowed, (backend, regex)


def test_choices_may_hold_anything(compiler: GrammarCompiler) -> None:
    """Quotes, backslashes, line breaks, what looks like a grammar, letters beyond 16 bits."""
    odd = ['"', "\\", "\n", '" | "x', "root ::= ", "\x00", "é", "🦉", "a.c", "[ab]"]
    for backend in BACKENDS:
        for text in odd:
            mask = compiler.compile(StructuredOutputs(choice=(text, "x"), backend=backend)).masks(EMPTY)[0]
            allowed = {NAMES[i] for i in range(len(NAMES)) if mask[i]}
            assert allowed == {name for name in NAMES[2:] if text.startswith(name)} | {"x"}, (backend, text)


def test_compiling_that_takes_too_long_is_killed_and_the_next_one_works() -> None:
    compiler = make(seconds=1.0)
    compiler.compile(StructuredOutputs(regex="abc"))  # the process and the library are there
    before = process_of(compiler)
    assert before is not None
    began = time.perf_counter()
    with pytest.raises(ConfigError, match="json took longer than 1 s to compile"):
        compiler.compile(SLOW)
    assert time.perf_counter() - began < 5
    assert before.poll() is not None, "the process has ended"
    assert works(compiler)
    after = process_of(compiler)
    assert after is not None
    assert after.pid != before.pid
    compiler.close()
    assert after.poll() is not None


def test_a_grammar_that_crashes_its_library_costs_no_more_than_itself() -> None:
    compiler = make(seconds=30)
    for _ in range(2):
        with pytest.raises(
            ConfigError, match="grammar cannot be compiled: compiling it ran out of memory, or crashed"
        ):
            compiler.compile(DEEP)
    assert works(compiler, StructuredOutputs(regex="ab|c")), "a new one has started"
    compiler.close()


def test_a_process_that_does_not_start_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = make()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ConfigError, match="did not start"):
        compiler.compile(GOOD)
    assert process_of(compiler) is None
    monkeypatch.undo()
    assert works(compiler)
    compiler.close()


def test_no_process_outlives_its_compiler() -> None:
    compiler = make()
    assert process_of(compiler) is None, "none starts before it is needed"
    compiler.compile(StructuredOutputs(choice=("a",)))
    compiler.compile(StructuredOutputs(json_object=True))
    assert process_of(compiler) is None, "grammars of our own need none"
    assert works(compiler)
    process = process_of(compiler)
    assert process is not None
    del compiler
    gc.collect()
    assert process.poll() is not None


_PARENT = """
import sys, threading, time
from tests.engine.test_grammar import GOOD, SLOW, make
compiler = make(seconds=1)
compiler.compile(GOOD)
print(compiler.worker.process.pid, flush=True)
if sys.argv[1] == "busy":
    question = {"library": "xgrammar", "kind": SLOW.kind, "source": SLOW.source, "seconds": 1}
    compiler.worker._exchange(question, 60)
    print("compiling", flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("state", ["idle", "busy"])
def test_no_process_outlives_a_parent_that_is_killed(state: str) -> None:
    """An idle one sees its pipe close; one in the middle of a grammar ends at twice its bound."""
    with subprocess.Popen([sys.executable, "-c", _PARENT, state], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        if state == "busy":
            assert parent.stdout.readline() == "compiling\n"
        assert running(pid)
        os.kill(parent.pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not running(pid)


def test_compiling_may_take_a_bounded_number_of_bytes() -> None:
    """In the process that tries; said in a process of its own, which is not spoilt for the other tests."""
    code = (
        "from sooner.engine import grammar_worker as w; w.MEMORY = 2**26; w._bound_memory(); bytearray(2**25)\n"
        "try: bytearray(2**27)\n"
        "except MemoryError: print('bounded')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "bounded\n"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_missing_library_is_named_with_the_command_that_installs_it(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, backend, None)
    monkeypatch.delitem(sys.modules, f"sooner.engine.grammar_{backend}", raising=False)
    with pytest.raises(ConfigError, match=rf"package {backend}.*pip install 'sooner\[structured\]'"):
        make().compile(StructuredOutputs(choice=("a",), backend=backend))


def test_a_grammar_is_tried_once_and_so_is_one_that_is_refused(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []
    check = Worker.check

    def counting(worker: Worker, name: str, kind: str, source: str) -> None:
        tried.append((name, source))
        check(worker, name, kind, source)

    monkeypatch.setattr(Worker, "check", counting)
    for _ in range(3):
        compiler.compile(StructuredOutputs(regex="abab"))
        compiler.compile(StructuredOutputs(regex="(?i)ab"))
        with pytest.raises(ConfigError):
            compiler.compile(StructuredOutputs(regex="(abc"))
    assert tried == [
        ("xgrammar", "abab"),
        ("xgrammar", "(?i)ab"),
        ("llguidance", "(?i)ab"),
        ("xgrammar", "(abc"),
        ("llguidance", "(abc"),
    ]


def test_texts_of_one_grammar_do_not_share_their_state(compiler: GrammarCompiler) -> None:
    for backend in BACKENDS:
        wanted = StructuredOutputs(regex="(ab)*c", backend=backend)
        one, other = compiler.compile(wanted), compiler.compile(wanted)
        before = other.masks(EMPTY)
        one.advance([NAMES.index("ab"), NAMES.index("c")])
        assert one.ended
        assert not other.ended
        assert bool((other.masks(EMPTY) == before).all())


def test_the_shelf_keeps_to_its_bytes_and_drops_what_was_used_longest_ago() -> None:
    shelf = Shelf(100)
    keys = [("library", "regex", str(i)) for i in range(5)]
    for key in keys[:3]:
        shelf.put(key, Refused("x" * 29))
    assert (len(shelf), shelf.size) == (3, 90)
    assert shelf.get(keys[0]) is not None
    shelf.put(keys[3], Refused("x" * 29))
    assert [shelf.get(key) is not None for key in keys] == [True, False, True, True, False]
    shelf.put(keys[3], Refused("x" * 39))
    assert (len(shelf), shelf.size) == (3, 100)
    shelf.put(keys[4], Refused("x" * 100))
    assert (len(shelf), shelf.size) == (0, 0), "what is too large for the shelf is not kept"


@pytest.mark.parametrize(("backend", "kept"), [("xgrammar", 2**18), ("llguidance", 3 * 2**20)])
def test_compiled_grammars_take_a_bounded_number_of_bytes(backend: str, kept: int) -> None:
    compiler = make(kept=kept)
    for i in range(40):
        compiler.compile(StructuredOutputs(choice=tuple(f"{i} {j}" for j in range(300)), backend=backend))
        assert 0 < compiler.shelf.size <= kept
    assert 0 < len(compiler.shelf) < 40


def test_threads_may_compile_at_once(compiler: GrammarCompiler) -> None:
    failures: list[BaseException] = []

    def compile_some(i: int) -> None:
        try:
            for j in range(5):
                assert works(compiler, StructuredOutputs(regex=f"(ab)*c|{'x' * (i % 3 + j)}"))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=compile_some, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
