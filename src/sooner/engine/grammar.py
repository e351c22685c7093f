"""From structured outputs to a constraint: compiled within bounds, kept within bounds. Knows no library.

    compiler = GrammarCompiler(tokenizer, width_of_the_logits, end_of_text_ids)
    constraint = compiler.compile(StructuredOutputs(regex="(yes|no)"))

Schemas, expressions and grammars come from whoever sends a request. Their size and nesting are checked
when StructuredOutputs is made, compiling is tried in a process that is killed if it takes too long, and
what is compiled is kept up to a number of bytes, the least recently used going first.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from sooner.engine.constraint import Constraint
from sooner.engine.grammar_constraint import Grammar, GrammarConstraint, GrammarError, GrammarLibrary
from sooner.engine.grammar_vocab import Vocabulary, vocabulary
from sooner.engine.grammar_worker import LIBRARIES, TooSlow, Worker, library
from sooner.errors import ConfigError
from sooner.structured import StructuredOutputs

SECONDS = 5.0  # that compiling may take
KEPT = 64 * 2**20  # bytes of compiled grammars
_OWN = ("choice", "json_object")  # grammars we write ourselves need no trial
_LONGEST = 300  # letters of a library's reason that are passed on


class GrammarCompiler:
    """Compiles for one tokenizer and model. Safe to use from several threads.

    width: of the logits; ids the tokenizer does not have are never allowed. ends: end-of-text ids.
    seconds: bound of a compilation. kept: bytes of compiled grammars in memory.
    vocabulary(): what the ids spell, made when first asked for.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        width: int,
        ends: Sequence[int],
        *,
        seconds: float = SECONDS,
        kept: int = KEPT,
    ) -> None:
        self.vocabulary = _Once(tokenizer, width, tuple(ends))
        self._seconds = seconds
        self.shelf = Shelf(kept)
        self._lock = threading.Lock()
        self._libraries: dict[str, GrammarLibrary] = {}
        self.worker = Worker(self.vocabulary, seconds)

    def compile(self, wanted: StructuredOutputs) -> Constraint:
        """A fresh constraint for one text.

        Raises ConfigError naming the kind and the reason: it is unsound, it needs what no library here keeps
        to, no text fits it, compiling takes too long, or the libraries are not installed.
        """
        reasons = {}
        for name in LIBRARIES if wanted.backend == "auto" else (wanted.backend,):
            known = self._known(name, wanted)
            if not isinstance(known, Refused):
                return GrammarConstraint(known.matcher(), self.vocabulary())
            reasons[name] = known.reason
        raise ConfigError(f"structured_outputs {wanted.kind} cannot be compiled: {_joined(reasons)}.")

    def close(self) -> None:
        """End the process that tries grammars; it starts anew if it is needed again."""
        self.worker.close()

    def _known(self, name: str, wanted: StructuredOutputs) -> Grammar | Refused:
        key = (name, wanted.kind, wanted.source)
        known = self.shelf.get(key)
        if known is None:
            try:
                known = self._compile(*key)
            except GrammarError as error:
                known = Refused(_line(str(error)))
            except TooSlow as error:
                raise ConfigError(
                    f"structured_outputs {wanted.kind} took longer than {self._seconds:g} s to compile; "
                    "make it smaller, or its repetitions shorter."
                ) from error
            self.shelf.put(key, known)
        return known

    def _compile(self, name: str, kind: str, source: str) -> Grammar:
        with self._lock:
            if name not in self._libraries:
                self._libraries[name] = library(name, self.vocabulary())
            made = self._libraries[name]
        if kind not in _OWN:
            self.worker.check(name, kind, source)
        return made.compile(kind, source)


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a grammar cannot be used; kept like one that can, so that asking again costs nothing."""

    reason: str

    @property
    def size(self) -> int:
        return len(self.reason)


class Shelf:
    """Compiled grammars by library, kind and source, up to `limit` bytes, the latest used."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: OrderedDict[tuple[str, str, str], Grammar | Refused] = OrderedDict()
        self._lock = threading.Lock()
        self.size = 0

    def get(self, key: tuple[str, str, str]) -> Grammar | Refused | None:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def put(self, key: tuple[str, str, str], grammar: Grammar | Refused) -> None:
        with self._lock:
            self._drop(key)
            self._kept[key] = grammar
            self.size += grammar.size + len(key[2])
            while self.size > self._limit:
                self._drop(next(iter(self._kept)))

    def __len__(self) -> int:
        return len(self._kept)

    def _drop(self, key: tuple[str, str, str]) -> None:
        old = self._kept.pop(key, None)
        if old is not None:
            self.size -= old.size + len(key[2])


class _Once:
    """The vocabulary, made when it is first asked for: most engines never see a grammar."""

    def __init__(self, tokenizer: Tokenizer, width: int, ends: tuple[int, ...]) -> None:
        self._made_of = (tokenizer, width, ends)
        self._made: Vocabulary | None = None
        self._lock = threading.Lock()

    def __call__(self) -> Vocabulary:
        with self._lock:
            if self._made is None:
                self._made = vocabulary(*self._made_of)
            return self._made


def _joined(reasons: Mapping[str, str]) -> str:
    if len(reasons) == 1:
        return next(iter(reasons.values()))
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())


def _line(reason: str) -> str:
    """One readable line, without the full stop that the message around it has."""
    line = " ".join(reason.split()).rstrip(".")
    return line if len(line) <= _LONGEST else line[:_LONGEST] + " ..."
