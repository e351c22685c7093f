"""Grammars by xgrammar, the default. Knows nothing of requests or of how long compiling may take."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Sequence

import torch
import xgrammar
from torch import Tensor

from sooner.core.tree import ROOT, Draft
from sooner.engine import grammar_schema
from sooner.engine.grammar_constraint import Grammar, GrammarError, Matcher
from sooner.engine.grammar_vocab import Vocabulary

# Most spaces and line breaks in a row between the parts of JSON: enough to indent, but no text of spaces.
WHITESPACE = 20
# "[23:42:35] /project/cpp/json_schema_converter.cc:5082: " before what a user may care for.
_PLACE = re.compile(r"^\[[\d:]+\] \S+:\d+: (Check failed: .* is false: )?")


def make(vocab: Vocabulary) -> XGrammar:
    return XGrammar(vocab)


class XGrammar:
    """Keeps the GrammarLibrary protocol."""

    def __init__(self, vocab: Vocabulary) -> None:
        info = xgrammar.TokenizerInfo(
            [*vocab.spelled, b""],
            xgrammar.VocabType.RAW,
            vocab_size=vocab.end + 1,
            stop_token_ids=list(vocab.stops),
            add_prefix_space=False,
        )
        self._vocab = vocab
        self._words = _Words(vocab)
        # Its own cache stays off: ours is bounded, and knows both libraries.
        self._compiler = xgrammar.GrammarCompiler(info, cache_enabled=False)

    def compile(self, kind: str, source: str) -> Grammar:
        try:
            return XGrammarGrammar(self._compile(kind, source), self._words)
        except (RuntimeError, UnicodeError, ValueError) as error:  # UnicodeError: half a surrogate pair
            raise GrammarError(_reason(error)) from error

    def _compile(self, kind: str, source: str) -> xgrammar.CompiledGrammar:
        if kind == "json":
            passed_over = grammar_schema.unread(json.loads(source))
            if passed_over:
                raise GrammarError(f"{passed_over} is not supported")
            return self._compiler.compile_json_schema(source, max_whitespace_cnt=WHITESPACE)
        if kind == "json_object":
            return self._compiler.compile_json_schema('{"type": "object"}', max_whitespace_cnt=WHITESPACE)
        if kind == "regex":
            return self._compiler.compile_regex(_lines(source))
        if kind == "choice":
            return self._compiler.compile_grammar("root ::= " + " | ".join(map(_quoted, json.loads(source))))
        return self._compiler.compile_grammar(source)


class XGrammarGrammar:
    """Keeps the Grammar protocol."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, words: _Words) -> None:
        self._compiled, self._words = compiled, words
        self.size = int(compiled.memory_size_bytes)

    def matcher(self) -> Matcher:
        return XGrammarMatcher(xgrammar.GrammarMatcher(self._compiled), self._words)


class XGrammarMatcher:
    """Keeps the Matcher protocol."""

    def __init__(self, matcher: xgrammar.GrammarMatcher, words: _Words) -> None:
        self._matcher, self._words = matcher, words

    @property
    def complete(self) -> bool:
        return bool(self._matcher.is_completed())

    def accept(self, token: int) -> bool:
        return bool(self._matcher.accept_token(token))

    def bits(self, draft: Draft) -> Tensor:
        masks: Tensor = xgrammar.allocate_token_bitmask(1 + len(draft), self._words.count)
        if not len(draft):
            self._matcher.fill_next_token_bitmask(masks)
            return masks
        first, following = _links(draft)
        tokens = torch.tensor([0, *draft.tokens])  # the root's own token is not looked at
        self._matcher.traverse_draft_tree(first, following, tokens, masks)
        return masks

    def forced(self) -> Sequence[int]:
        text = self._matcher.find_jump_forward_string()
        return self._words.spell(text) or self._matcher.find_jump_forward_tokens() if text else ()


class _Words:
    """Spells a text that must follow as the model would: with its own tokenizer."""

    def __init__(self, vocab: Vocabulary) -> None:
        self.count = vocab.end + 1
        self._vocab = vocab
        self._sorted = sorted(word for word in vocab.spelled if word)

    def spell(self, text: str) -> list[int]:
        """Without a last id that may be the beginning of a longer token."""
        ids = self._vocab.spell(text)
        return ids[:-1] if ids and self._open(self._vocab.spelled[ids[-1]]) else ids

    def _open(self, word: bytes) -> bool:
        after = bisect_right(self._sorted, word)
        return after < len(self._sorted) and self._sorted[after].startswith(word)


def _links(draft: Draft) -> tuple[Tensor, Tensor]:
    """First child and next sibling of the root and every node, int64 [1 + n] each, -1 = none."""
    first = [ROOT] * (1 + len(draft))
    following = [ROOT] * (1 + len(draft))
    for node in range(len(draft) - 1, -1, -1):
        parent = draft.parents[node] + 1
        following[node + 1] = first[parent]
        first[parent] = node + 1
    return torch.tensor(first), torch.tensor(following)


def _lines(regex: str) -> str:
    """The expression with dots that do not stand for a line break, as in Python and JavaScript."""
    parts, escaped, bracket = [], False, False
    for letter in regex:
        if not escaped and not bracket and letter == ".":
            parts.append(r"[^\n]")
            continue
        parts.append(letter)
        if not escaped and letter in "[]":
            bracket = letter == "["
        escaped = not escaped and letter == "\\"
    return "".join(parts)


def _quoted(text: str) -> str:
    """A literal of EBNF: letters and digits as they are, everything else by its number."""
    text.encode()  # half of a surrogate pair has a number, but no bytes: UnicodeEncodeError
    return '"' + "".join(c if c.isascii() and c.isalnum() else f"\\U{ord(c):08x}" for c in text) + '"'


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return _PLACE.sub("", lines[0]) if lines else type(error).__name__
