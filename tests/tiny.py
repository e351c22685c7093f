"""Makes a tiny random model with tokenizer and chat template in a folder. Knows no test and no network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCAB = 320
END, USER, ANSWER = "<|end|>", "<|user|>", "<|answer|>"  # ids 0, 1, 2

# What the merges are learned from; ASCII on purpose, so that other letters take several tokens.
_TEXT = (
    "the same text, sooner. a cheap drafter guesses several tokens, the target checks them all in one pass, "
    "and what comes out is what the target alone would have written. once upon a time there was a library "
    "that opened at nine in the morning and closed at six in the evening. the end of the text ends the text."
)
_SURE = 6.0  # the LM head's weights are this many times as wide as the others'
_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|user|>' if message['role'] == 'user' else '<|answer|>' }}{{ message['content'] + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|answer|>' }}{% endif %}"
)


def make_tiny(
    folder: Path,
    *,
    seed: int,
    vocab: int = VOCAB,
    layers: int = 2,
    hidden: int = 32,
    family: str = "llama",
    eos: int | list[int] | None = None,
    context: int = 256,
) -> Path:
    """Save a random model of `family` and its tokenizer into `folder`; returns the folder.

    The same arguments give the same weights. vocab: width of the logits; the tokenizer has VOCAB ids,
    so ids above are padding. eos: end-of-text id or ids, None = the text never ends by itself.
    The scales are chosen so that texts vary, repeat themselves at times (lookup finds something), and
    are written with some confidence (a model that drafts for itself drafts more than one token).
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = AutoConfig.for_model(
        family,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(_SURE)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def tiny_tokenizer() -> Any:
    """A byte-level BPE tokenizer of VOCAB ids: END, USER and ANSWER, the 256 bytes, and some merges."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[END, USER, ANSWER],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator([_TEXT], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=END, additional_special_tokens=[USER, ANSWER]
    )
    tokenizer.chat_template = _TEMPLATE
    return tokenizer
