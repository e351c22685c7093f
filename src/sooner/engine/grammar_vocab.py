"""What every token id spells, as bytes, and which ids end a text. Knows no grammar and no model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer

from sooner.errors import ConfigError

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Decoders that only touch the whole text's ends, or bytes that make up a character: no token's own spelling.
_HARMLESS = ("Fuse", "Strip", "ByteFallback")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """spelled: the bytes of each id below the width of the logits; b"" = a grammar may never write it
    (special tokens, padding of the vocabulary). ends: ids that end a text.

    encode: text to ids as the tokenizer has it; lost on the way through JSON.
    """

    spelled: tuple[bytes, ...]
    ends: tuple[int, ...]
    encode: Callable[[str], Sequence[int]] = field(default=lambda text: (), compare=False)

    def spell(self, text: str) -> list[int]:
        """Ids whose bytes are exactly those of `text`, as the model is used to; none where the tokenizer adds
        something of its own (a space before the first word) or does not know a letter."""
        ids = list(self.encode(text))
        known = all(i < len(self.spelled) for i in ids)
        return ids if known and b"".join(self.spelled[i] for i in ids) == text.encode() else []

    @property
    def end(self) -> int:
        """An id of our own that means "the text may end here", also where the model has no id for it."""
        return len(self.spelled)

    @property
    def stops(self) -> tuple[int, ...]:
        return (*self.ends, self.end)

    def to_json(self) -> str:
        return json.dumps({"spelled": [word.decode("latin-1") for word in self.spelled], "ends": self.ends})

    @staticmethod
    def from_json(text: str) -> Vocabulary:
        parts = json.loads(text)
        return Vocabulary(tuple(word.encode("latin-1") for word in parts["spelled"]), tuple(parts["ends"]))


def vocabulary(tokenizer: Tokenizer, width: int, ends: Sequence[int]) -> Vocabulary:
    """The vocabulary of a tokenizer under a model with logits of `width` ids.

    Raises ConfigError for a tokenizer whose tokens are not pieces of the text (WordPiece, ...).
    """
    spell = speller(tokenizer)
    spelled = [b""] * width
    for token, i in tokenizer.get_vocab(with_added_tokens=True).items():
        if i < width:
            spelled[i] = spell(token)
    special = [i for i, added in tokenizer.get_added_tokens_decoder().items() if added.special]
    known = tuple(dict.fromkeys(i for i in ends if i < width))
    for i in (*special, *known):
        if i < width:
            spelled[i] = b""

    def encode(text: str) -> Sequence[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    return Vocabulary(tuple(spelled), known, encode)


def speller(tokenizer: Tokenizer) -> Callable[[str], bytes]:
    """From a token as the tokenizer writes it to the bytes it stands for, as its decoder would have it."""
    steps = list(_steps(_decoder(tokenizer)))
    kinds = [step["type"] for step in steps]
    if "ByteLevel" in kinds:
        return _byte_level(_alphabet())
    swaps = [_swap(step) for step in steps if step["type"] not in _HARMLESS]
    fallback = "ByteFallback" in kinds

    def spell(token: str) -> bytes:
        byte = _BYTE.fullmatch(token) if fallback else None
        if byte:
            return bytes([int(byte[1], 16)])
        for old, new in swaps:
            token = token.replace(old, new)
        return token.encode()

    return spell


def _decoder(tokenizer: Tokenizer) -> Mapping[str, Any]:
    decoder = tokenizer.decoder
    if decoder is None:
        raise ConfigError("structured_outputs are not supported with this tokenizer: it has no decoder.")
    state: Mapping[str, Any] = json.loads(decoder.__getstate__())
    return state


def _steps(decoder: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if decoder["type"] == "Sequence":
        for step in decoder["decoders"]:
            yield from _steps(step)
    else:
        yield decoder


def _swap(step: Mapping[str, Any]) -> tuple[str, str]:
    """What a decoder step replaces, and by what."""
    if step["type"] == "Metaspace":
        return step["replacement"], " "
    if step["type"] == "Replace" and "String" in step["pattern"]:
        return step["pattern"]["String"], step["content"]
    raise ConfigError(f"structured_outputs are not supported with a tokenizer that decodes by {step['type']}.")


def _byte_level(alphabet: Mapping[str, int]) -> Callable[[str], bytes]:
    def spell(token: str) -> bytes:
        try:
            return bytes(alphabet[letter] for letter in token)
        except KeyError:  # an added token in plain letters
            return token.encode()

    return spell


def _alphabet() -> dict[str, int]:
    """GPT-2's letters for bytes: printable ones stand for themselves, the others for 256 and up."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}
