"""From token ids to text, one token at a time. Never gives out half a character; knows no stop rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_HALF = "\ufffd"  # what a decoder puts in place of bytes that are no character (yet)
_TAIL = 4  # prompt tokens that tell how the first new token joins


class Detokenizer(Protocol):
    """Decodes the tokens of one request."""

    def push(self, token: int) -> str:
        """The text this token completes; empty while a character is unfinished."""

    def finish(self) -> str:
        """What is left at the end: bytes that never became a character show as U+FFFD."""


MakeDetokenizer = Callable[[Sequence[int], bool], Detokenizer]
"""From the prompt's tokens and skip_special_tokens to a fresh Detokenizer."""


class StreamDetokenizer:
    """On `tokenizers.decoders.DecodeStream`, begun behind the end of the prompt.

    Starting there keeps the space between prompt and text, which some tokenizers only write between
    two words.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], skip_special: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special
        tail = list(prompt[-_TAIL:])
        while tail and _HALF in self._decode(tail):
            tail.pop(0)
        self._before = self._decode(tail)
        self._ids = tail
        self._stream = DecodeStream(ids=list(tail), skip_special_tokens=skip_special)
        self._given = 0

    def push(self, token: int) -> str:
        self._ids.append(token)
        try:
            text = self._stream.step(self._tokenizer, token) or ""
        except Exception:  # byte fallback: a broken character changes how the letters before it decode
            text = self.finish()
            self._stream = DecodeStream(ids=[token], skip_special_tokens=self._skip)
        self._given += len(text)
        return text

    def finish(self) -> str:
        return self._decode(self._ids)[len(self._before) + self._given :]

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=self._skip)
        return text


class NoText:
    """For models without a tokenizer: every token's text is empty."""

    def push(self, token: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


def no_text(prompt: Sequence[int], skip_special: bool) -> Detokenizer:
    return NoText()
