"""Grammars by llguidance: slower masks, and more of JSON schema and of regular expressions. Knows no request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import llguidance
import torch
from torch import Tensor

from sooner.core.tree import ROOT, Draft, children
from sooner.engine import grammar_schema
from sooner.engine.grammar_constraint import WORD, Grammar, GrammarError, Matcher, has, pack
from sooner.engine.grammar_vocab import Vocabulary

# As in grammar_xgrammar: room to indent, but no text of spaces.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,20}"
# Fewer lexer states than it would take by default (250,000 of 1 to 2 kB each), and no state in messages.
_LIMITS = llguidance.LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
_SIZE = 2**20  # it does not say what a grammar keeps; this is what a lexer of a few hundred states does


def make(vocab: Vocabulary) -> LLGuidance:
    return LLGuidance(vocab)


class LLGuidance:
    """Keeps the GrammarLibrary protocol."""

    def __init__(self, vocab: Vocabulary) -> None:
        wrapped: Any = llguidance.TokenizerWrapper(_Tokens(vocab))
        self._tokenizer = llguidance.LLTokenizer(wrapped, eos_token=[vocab.end, *vocab.ends])
        self._vocab = vocab

    def compile(self, kind: str, source: str) -> Grammar:
        try:
            text = _grammar(kind, source)
            matcher = llguidance.LLMatcher(self._tokenizer, text, log_level=0, limits=_LIMITS)
        except (ValueError, RecursionError) as error:
            raise GrammarError(_reason(str(error) or type(error).__name__)) from error
        if matcher.is_error():
            raise GrammarError(_reason(matcher.get_error()))
        return LLGuidanceGrammar(matcher, _SIZE + 16 * len(source), self._vocab)


class LLGuidanceGrammar:
    """Keeps the Grammar protocol."""

    def __init__(self, matcher: llguidance.LLMatcher, size: int, vocab: Vocabulary) -> None:
        self._matcher, self._vocab = matcher, vocab
        self._stop_bits = pack(vocab.stops, vocab.end + 1)
        self.size = size

    def matcher(self) -> Matcher:
        return LLGuidanceMatcher(self._matcher.deep_copy(), self._vocab, self._stop_bits)


class LLGuidanceMatcher:
    """Keeps the Matcher protocol."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab: Vocabulary, stop_bits: Tensor) -> None:
        self._matcher, self._vocab, self._stop_bits = matcher, vocab, stop_bits

    @property
    def complete(self) -> bool:
        return bool(self._matcher.is_accepting())

    def accept(self, token: int) -> bool:
        return bool(self._matcher.consume_token(token))

    def bits(self, draft: Draft) -> Tensor:
        masks = torch.full((1 + len(draft), len(self._stop_bits)), -1, dtype=torch.int32)
        self._fill(masks, ROOT, self._matcher, draft, children(draft.parents))
        return masks

    def forced(self) -> Sequence[int]:
        return [token for token in self._matcher.compute_ff_tokens() if token < self._vocab.end]

    def _fill(
        self, masks: Tensor, node: int, matcher: llguidance.LLMatcher, draft: Draft, below: dict[int, list[int]]
    ) -> None:
        """The row of a node, and those of all that hang off it. A copy goes down each branch, so that one that
        runs into a limit does not spoil the others."""
        row = masks[node + 1]
        matcher.unsafe_compute_mask_ptr(row.data_ptr(), len(row) * WORD // 8)
        if matcher.is_error():
            row.zero_()
        elif not matcher.is_accepting():
            row &= ~self._stop_bits  # a dead end is no end
        for child in below.get(node, ()):
            token = draft.tokens[child]
            if token < self._vocab.end and self._vocab.spelled[token] and has(masks, node + 1, token):
                ahead = matcher.deep_copy()
                ahead.consume_token(token)
                self._fill(masks, child, ahead, draft, below)


class _Tokens:
    """The vocabulary, in the shape llguidance asks for.

    Where bytes are forced its masks hold the tokens that this spells them with, and no others: they must fit.
    """

    def __init__(self, vocab: Vocabulary) -> None:
        self._vocab = vocab
        self._ids = {word: i for i, word in enumerate(vocab.spelled) if word}
        self._longest = max(map(len, self._ids), default=1)
        self.eos_token_id = vocab.end
        self.bos_token_id = None
        self.tokens = [*vocab.spelled, b""]
        self.special_token_ids = [i for i, word in enumerate(self.tokens) if not word]

    def __call__(self, text: str | bytes) -> list[int]:
        word = text.encode() if isinstance(text, str) else text
        return self._vocab.spell(word.decode(errors="replace")) or self._longest_first(word)

    def _longest_first(self, text: bytes) -> list[int]:
        ids: list[int] = []
        while text:
            fits = (self._ids.get(text[:length]) for length in range(self._longest, 0, -1))
            token = next((i for i in fits if i is not None), None)
            if token is None:
                break  # bytes no token has; the text cannot go on there anyway
            ids.append(token)
            text = text[len(self.tokens[token]) :]
        return ids


def _grammar(kind: str, source: str) -> str:
    """In llguidance's own form. Raises ValueError."""
    if kind in ("json", "json_object"):
        schema = json.loads(source) if kind == "json" else {"type": "object"}
        if schema is False:
            raise ValueError("the schema 'false' accepts nothing")
        text = json.dumps(grammar_schema.closed({} if schema is True else schema))
        made = llguidance.LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": _WHITESPACE})
    else:
        formats = {"regex": "regex", "choice": "choice", "grammar": "gbnf"}
        made = llguidance.grammar_from(formats[kind], source)
    return str(made)


def _reason(message: str) -> str:
    """The one line of a message that says what is wrong."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    named = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (named or lines or ["it was refused without a reason"])[0]
