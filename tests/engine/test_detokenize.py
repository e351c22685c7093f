"""Text comes out whole: pieces join to what decoding all ids at once gives, and no character comes in halves."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from sooner.engine.detokenize import NoText, StreamDetokenizer, no_text
from tests.engine.alphabets import byte_fallback, byte_level, metaspace

HALF = "\ufffd"
BYTE_LEVEL, METASPACE, BYTE_FALLBACK = byte_level(), metaspace(), byte_fallback()
WORDS = "ab c a ab é€你 . the end 😀"

many = settings(max_examples=300, deadline=None, derandomize=True)
ids = st.lists(st.integers(0, 2**16), max_size=12)


def ids_of(tokenizer: Tokenizer, numbers: list[int]) -> list[int]:
    """Any numbers as ids of the tokenizer."""
    return [number % tokenizer.get_vocab_size() for number in numbers]


def pieces(tokenizer: Tokenizer, prompt: list[int], new: list[int], *, skip: bool = True) -> list[str]:
    """What each new token gives out, and at last what `finish` does."""
    stream = StreamDetokenizer(tokenizer, prompt, skip)
    return [*(stream.push(token) for token in new), stream.finish()]


def behind(tokenizer: Tokenizer, prompt: list[int], new: list[int], *, skip: bool = True) -> str:
    """The part of the whole decoded text that does not belong to the prompt."""
    whole: str = tokenizer.decode(prompt + new, skip_special_tokens=skip)
    before: str = tokenizer.decode(prompt, skip_special_tokens=skip)
    assert whole.startswith(before)
    return whole[len(before) :]


@many
@given(prompt=ids, new=ids, skip=st.booleans())
def test_any_bytes_join_to_the_whole(prompt: list[int], new: list[int], skip: bool) -> None:
    start = BYTE_LEVEL.encode(WORDS).ids + ids_of(BYTE_LEVEL, prompt)
    while BYTE_LEVEL.decode(start).endswith(HALF):  # whose half character it is, nobody can say
        start.pop()
    tokens = ids_of(BYTE_LEVEL, new)
    *given_out, last = pieces(BYTE_LEVEL, start, tokens, skip=skip)
    assert "".join(given_out) + last == behind(BYTE_LEVEL, start, tokens, skip=skip)
    assert not any(piece.endswith(HALF) for piece in given_out)


@many
@given(prompt=ids, new=ids, skip=st.booleans())
def test_words_with_dropped_spaces_join_to_the_whole(prompt: list[int], new: list[int], skip: bool) -> None:
    start = METASPACE.encode("ab").ids + ids_of(METASPACE, prompt) + METASPACE.encode("c").ids
    tokens = ids_of(METASPACE, new)
    assert "".join(pieces(METASPACE, start, tokens, skip=skip)) == behind(METASPACE, start, tokens, skip=skip)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte level", "byte fallback"])
@many
@given(text=st.text("ab cé€你😀ß\n.", max_size=12), cut=st.integers(0, 40))
def test_characters_of_several_tokens_come_out_whole(tokenizer: Tokenizer, text: str, cut: int) -> None:
    tokens = tokenizer.encode("a" + text).ids
    cut = min(cut, len(tokens))
    while tokenizer.decode(tokens[:cut]).endswith(HALF):
        cut -= 1
    parts = pieces(tokenizer, tokens[:cut], tokens[cut:])
    assert "".join(parts) == behind(tokenizer, tokens[:cut], tokens[cut:])
    assert HALF not in "".join(parts)


@many
@given(new=ids)
def test_broken_byte_tokens_raise_nothing(new: list[int]) -> None:
    """<0x54> <0xE2> "." : the broken byte makes the decoder take back a "T" that is out already.

    `tokenizers` raises there ("Invalid prefix encountered"), which would end the step of every request.
    """
    start = BYTE_FALLBACK.encode("a b ab").ids
    tokens = ids_of(BYTE_FALLBACK, new)
    text = "".join(pieces(BYTE_FALLBACK, start, tokens))
    whole = behind(BYTE_FALLBACK, start, tokens)
    if HALF not in whole:
        assert text == whole


def test_text_goes_on_after_broken_byte_tokens() -> None:
    start = BYTE_FALLBACK.encode("a").ids
    broken = [BYTE_FALLBACK.token_to_id(name) for name in ("<0x54>", "<0xE2>")]
    after = BYTE_FALLBACK.encode("the end").ids
    text = "".join(pieces(BYTE_FALLBACK, start, broken + after))
    assert text.startswith("T")
    assert text.endswith(" the end")


@pytest.mark.parametrize("tokenizer", [METASPACE, BYTE_FALLBACK], ids=["metaspace", "byte fallback"])
def test_the_space_between_prompt_and_text_is_kept(tokenizer: Tokenizer) -> None:
    word = [tokenizer.token_to_id("▁a")]
    assert "".join(pieces(tokenizer, tokenizer.encode("ab").ids, word)) == " a"


def test_half_a_character_waits_for_the_other_half() -> None:
    tokens = BYTE_LEVEL.encode("€").ids
    assert len(tokens) == 3
    assert pieces(BYTE_LEVEL, BYTE_LEVEL.encode("a").ids, tokens) == ["", "", "€", ""]


def test_half_a_character_at_the_end_shows_as_a_replacement() -> None:
    tokens = BYTE_LEVEL.encode("€").ids[:2]
    assert pieces(BYTE_LEVEL, BYTE_LEVEL.encode("a").ids, tokens) == ["", "", HALF]


def test_a_prompt_that_ends_in_half_a_character_stops_nothing() -> None:
    first, *rest = BYTE_LEVEL.encode("€").ids
    text = "".join(pieces(BYTE_LEVEL, [*BYTE_LEVEL.encode("a").ids, first], [*rest, *BYTE_LEVEL.encode("bc").ids]))
    assert text.endswith("bc")


def test_special_tokens_show_only_when_asked_for() -> None:
    start, new = BYTE_LEVEL.encode("a").ids, [*BYTE_LEVEL.encode("b").ids, 0]
    assert "".join(pieces(BYTE_LEVEL, start, new)) == "b"
    assert "".join(pieces(BYTE_LEVEL, start, new, skip=False)) == "b<|end|>"


@pytest.mark.parametrize("prompt", [[0], [0, 1, 2, 0, 1]], ids=["one", "many"])
def test_a_prompt_of_special_tokens_alone_is_no_hindrance(prompt: list[int]) -> None:
    assert "".join(pieces(BYTE_LEVEL, prompt, BYTE_LEVEL.encode("abc").ids)) == "abc"


def test_no_tokens_no_text() -> None:
    assert pieces(BYTE_LEVEL, BYTE_LEVEL.encode("a").ids, []) == [""]


def test_a_model_without_a_tokenizer_writes_no_text() -> None:
    stream = no_text([1, 2], True)
    assert isinstance(stream, NoText)
    assert (stream.push(3), stream.finish()) == ("", "")
