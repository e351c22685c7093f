"""Tokenizers of the kinds that differ in how tokens join into text, made in memory. Knows no engine."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.tiny import tiny_tokenizer

_SPECIAL = ("<unk>", "<s>", "</s>")
_WORDS = (
    "▁",
    "a",
    "b",
    "c",
    "d",
    "▁a",
    "▁b",
    "▁c",
    "ab",
    "▁ab",
    "é",
    "€",
    "你",
    ".",
    "▁the",
    "▁end",
    "s",
    "▁sto",
    "p",
)


def byte_level() -> Tokenizer:
    """Like GPT-2 and Llama 3: every byte is a token, spaces belong to the token they precede."""
    backend: Tokenizer = tiny_tokenizer().backend_tokenizer
    return backend


def metaspace() -> Tokenizer:
    """Like SentencePiece models without byte fallback: a first space is dropped when decoding."""
    scores = [(word, -float(i)) for i, word in enumerate([*_SPECIAL, *_WORDS])]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=False))
    return _finished(tokenizer, pre_tokenizers.Metaspace(), decoders.Metaspace())


def byte_fallback() -> Tokenizer:
    """Like Llama 2, Mistral and Gemma: letters without a token become bytes, <0xE2><0x82><0xAC>."""
    names = [*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *_WORDS]
    merges = [("▁", "a"), ("▁", "b"), ("▁", "c"), ("a", "b"), ("▁", "ab")]
    model = models.BPE(
        vocab={name: i for i, name in enumerate(names)},
        merges=merges,
        byte_fallback=True,
        unk_token="<unk>",
        fuse_unk=True,
    )
    decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _finished(Tokenizer(model), pre_tokenizers.Metaspace(prepend_scheme="first", split=False), decoder)


def _finished(tokenizer: Tokenizer, before: object, after: object) -> Tokenizer:
    tokenizer.pre_tokenizer = before
    tokenizer.decoder = after
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in _SPECIAL])
    return tokenizer
