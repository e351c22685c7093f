"""A constraint over any grammar library: which ids may follow, and when the text has ended.

Knows no library: it asks a Matcher for packed masks and tells it what was written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from sooner.core.tree import EMPTY, Draft
from sooner.engine.grammar_vocab import Vocabulary

WORD = 32  # ids a word of a packed mask


class GrammarError(ValueError):
    """Why a schema, an expression or a grammar cannot be used, in one line."""


class Matcher(Protocol):
    """Follows one text through one grammar; what a library has to offer."""

    @property
    def complete(self) -> bool:
        """Whether the text may end here."""

    def accept(self, token: int) -> bool:
        """Go on by one token; False if the grammar refuses it. Never called with an end-of-text id."""

    def bits(self, draft: Draft) -> Tensor:
        """int32 [1 + n, words]: bit b of word w is id 32 w + b. What may follow the root and each node; the
        vocabulary's stops may where the text may end. Rows of nodes that are refused, or are stops, are
        anything. Leaves the state as it was."""

    def forced(self) -> Sequence[int]:
        """A guess at the tokens that spell what must follow."""


class Grammar(Protocol):
    """A compiled grammar; shared by all texts that must keep to it."""

    @property
    def size(self) -> int:
        """About how many bytes it keeps."""

    def matcher(self) -> Matcher:
        """At the beginning of a text."""


class GrammarLibrary(Protocol):
    """A backend, made for one vocabulary."""

    def compile(self, kind: str, source: str) -> Grammar:
        """Raises GrammarError; `kind` and `source` are those of StructuredOutputs."""


class GrammarConstraint:
    """Keeps the Constraint protocol.

    The text ends with an end-of-text id, or as soon as nothing but one may follow: then none is written.
    """

    def __init__(self, matcher: Matcher, vocab: Vocabulary) -> None:
        self._matcher, self._vocab = matcher, vocab
        self._stops = frozenset(vocab.stops)
        self._stop_bits = pack(vocab.stops, vocab.end + 1)
        self._writable = pack([i for i, word in enumerate(vocab.spelled) if word], vocab.end + 1)
        self._ended = self._lost = False

    @property
    def ended(self) -> bool:
        return self._ended

    def masks(self, draft: Draft) -> Tensor:
        width = self._vocab.end
        if self._ended:
            return torch.ones((1 + len(draft), width), dtype=torch.bool)
        if self._lost:
            rows = torch.ones((1 + len(draft), width), dtype=torch.bool)
            rows[0] = False
            return rows
        words = self._matcher.bits(draft)
        rows = unpack(words & (self._writable | self._stop_bits), width)
        rows[[not reached for reached in self._reached(draft, words)]] = True
        return rows

    def advance(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if self._ended or self._lost:
                return  # nothing after the end belongs to the text
            if token in self._stops:
                self._ended = True
            elif not self._vocab.spelled[token] or not self._matcher.accept(token):
                self._lost = True  # a library at one of its limits refuses what its mask allowed: no law is left
            else:
                self._ended = self._matcher.complete and self._closed(self._matcher.bits(EMPTY))[0]

    def forced(self, limit: int) -> tuple[int, ...]:
        if limit <= 0 or self._ended or self._lost:
            return ()
        return tuple(self._matcher.forced()[:limit])

    def _reached(self, draft: Draft, words: Tensor) -> list[bool]:
        """For each row, whether the text can get there and go on; the root always."""
        reached, closed = [True], self._closed(words)
        for i, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True), start=1):
            allowed = token not in self._stops and has(words, parent + 1, token)
            reached.append(reached[parent + 1] and allowed and not closed[i])
        return reached

    def _closed(self, words: Tensor) -> list[bool]:
        """For each row, whether the text may end there and nothing else may follow."""
        ends = (words & self._stop_bits).ne(0).any(-1)
        goes_on = (words & self._writable).ne(0).any(-1)
        closed: list[bool] = (ends & ~goes_on).tolist()
        return closed


def check_sound(grammar: Grammar, vocab: Vocabulary) -> None:
    """Raise GrammarError if no text with at least one token fits the grammar."""
    matcher = grammar.matcher()
    words = matcher.bits(EMPTY)
    if not bool((words & pack([i for i, word in enumerate(vocab.spelled) if word], vocab.end + 1)).any()):
        raise GrammarError("only the empty text fits it" if matcher.complete else "no text fits it")


def has(words: Tensor, row: int, token: int) -> bool:
    """Whether a row of a packed mask holds an id."""
    return bool(int(words[row, token // WORD]) >> (token % WORD) & 1)


def pack(ids: Sequence[int], count: int) -> Tensor:
    """A packed mask of `count` ids, int32 [words], that holds `ids`."""
    flags = torch.zeros((-(-count // WORD), WORD), dtype=torch.int64)
    flags.view(-1)[list(ids)] = 1
    words = (flags << torch.arange(WORD)).sum(-1)
    return words.to(torch.int32)  # bit 31 wraps to the sign, as it does in the libraries' own masks


def unpack(words: Tensor, width: int) -> Tensor:
    """bool [n, width] from packed masks [n, words]."""
    flags = _FLAGS[words.contiguous().view(torch.uint8).long()]  # [n, bytes, 8]
    return flags.view(len(words), -1)[:, :width].contiguous()


# The eight flags of every byte, lowest bit first: one look-up a byte beats shifting every id.
_FLAGS = (torch.arange(256)[:, None] >> torch.arange(8) & 1).bool()
