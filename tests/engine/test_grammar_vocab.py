"""What token ids spell, held to what the tokenizer's own decoder writes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from sooner.engine.grammar_vocab import Vocabulary, speller, vocabulary
from sooner.errors import ConfigError
from tests.engine.alphabets import byte_fallback, byte_level, metaspace
from tests.engine.grammars import pieces

KINDS = {"byte level": byte_level, "metaspace": metaspace, "byte fallback": byte_fallback, "pieces": pieces}


def special(tokenizer: Tokenizer) -> set[int]:
    return {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_every_token_spells_what_the_decoder_writes_for_it(make: Callable[[], Tokenizer]) -> None:
    """Behind another token, so that nothing is stripped as the beginning of a text; whole letters only."""
    tokenizer = make()
    count = tokenizer.get_vocab_size()
    vocab = vocabulary(tokenizer, count, ())
    anchor = tokenizer.token_to_id("a")
    compared = 0
    for i in set(range(count)) - special(tokenizer):
        try:
            spelled = vocab.spelled[i].decode()
        except UnicodeDecodeError:
            continue
        compared += 1
        assert tokenizer.decode([anchor, i], skip_special_tokens=False) == "a" + spelled, i
    assert compared > 15


def test_bytes_that_make_up_a_letter_are_spelled_one_by_one() -> None:
    for tokenizer, prefix in ((byte_level(), ""), (byte_fallback(), "<unk>")):
        vocab = vocabulary(tokenizer, tokenizer.get_vocab_size(), ())
        ids = [i for i in tokenizer.encode("ß🦉").ids if tokenizer.id_to_token(i) not in (prefix, "▁")]
        assert b"".join(vocab.spelled[i] for i in ids).decode() == "ß🦉"
        assert len(ids) > 4


def test_an_added_token_in_plain_letters_is_spelled_as_the_decoder_has_it() -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<a b>", special=False)])
    assert speller(tokenizer)("<a b>") == b"<a b>"


def test_special_tokens_ends_and_padding_spell_nothing() -> None:
    tokenizer = byte_level()
    count = tokenizer.get_vocab_size()
    vocab = vocabulary(tokenizer, count + 5, (7, count + 99, 7))
    assert vocab.ends == (7,), "once each, and only ids that the logits have"
    silent = {i for i, word in enumerate(vocab.spelled) if not word}
    assert silent == special(tokenizer) | {7} | set(range(count, count + 5))
    assert vocab.stops == (7, count + 5)


def test_logits_narrower_than_the_tokenizer_cut_the_vocabulary() -> None:
    vocab = vocabulary(byte_level(), 100, (5, 200))
    assert len(vocab.spelled) == vocab.end == 100
    assert vocab.ends == (5,)


def test_a_vocabulary_survives_its_way_through_json() -> None:
    tokenizer = byte_level()
    vocab = vocabulary(tokenizer, tokenizer.get_vocab_size() + 2, (0,))
    again = Vocabulary.from_json(vocab.to_json())
    assert again == vocab
    assert b"\xff" in again.spelled
    assert again.encode("a") == ()


def test_a_text_is_spelled_exactly_or_not_at_all() -> None:
    """Metaspace adds a space before the first word, and has no letter for everything."""
    tokenizer = byte_level()
    vocab = vocabulary(tokenizer, tokenizer.get_vocab_size(), ())
    assert vocab.spell("the time") == tokenizer.encode("the time").ids
    cut = vocabulary(tokenizer, 50, ())
    assert cut.spell("the time") == [], "ids that the logits do not have"
    other = metaspace()
    vocab = vocabulary(other, other.get_vocab_size(), ())
    assert vocab.spell("a") == []
    assert vocab.spell("🦉") == []


@pytest.mark.parametrize(
    ("decoder", "named"),
    [(decoders.WordPiece(), "WordPiece"), (decoders.CTC(), "CTC"), (None, "no decoder")],
)
def test_a_tokenizer_whose_tokens_are_no_pieces_of_the_text_is_refused(decoder: object, named: str) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    if decoder is not None:
        tokenizer.decoder = decoder
    with pytest.raises(ConfigError, match=named):
        vocabulary(tokenizer, 1, ())
