"""One call of transformers' generate, read: its rows, and what of it is not supported. Runs nothing.

transformers has prepared the arguments by its own rules (defaults, generation config files, processors,
criteria, padding) before it hands them to a `custom_generate`; this file only reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from sooner.errors import ConfigError
from sooner.model.borrowed import check_model

# transformers (5.0 to 5.24 at least) reads these keywords and then forgets them when custom_generate is a
# function. They are handed on under the names on the right; tokenizer it needs itself, for stop strings.
_FORGOTTEN = {
    "assistant_model": "sooner_assistant",
    "streamer": "sooner_streamer",
    "tokenizer": "tokenizer",
    "assistant_tokenizer": "assistant_tokenizer",
}
HANDED = tuple(_FORGOTTEN.values())

# Keywords of the forward pass that say nothing we do not know.
_KNOWN = frozenset(
    {"attention_mask", "position_ids", "use_cache", "logits_to_keep", "cache_position", "return_dict"}
    | {"output_attentions", "output_hidden_states"}  # the generation config has them too
)
_CACHES = ("cache", "past_key_values", "cache_params")

# (attribute of the generation config, values that ask for nothing, what it is)
_REFUSED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("num_beams", (None, 1), "beam search"),
    ("num_beam_groups", (None, 1), "group beam search"),
    ("constraints", (None,), "constrained beam search"),
    ("force_words_ids", (None,), "constrained beam search"),
    ("penalty_alpha", (None, 0, 0.0), "contrastive search"),
    ("dola_layers", (None,), "DoLa decoding"),
    ("use_mtp", (None, False), "multi-token prediction"),
    ("speculation_type", (None,), "this kind of speculation"),
    ("assistant_ensemble_weight", (None,), "ensemble verification (it changes the distribution)"),
    ("cache_implementation", (None, "dynamic"), "a cache of another kind (ours are lanes, which can be cut)"),
)
_REFUSED_IN_DICTIONARIES: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("output_attentions", (None, False), "returning attentions"),
    ("output_hidden_states", (None, False), "returning hidden states"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the batch. given: all its ids; prompt: those that the mask keeps."""

    given: tuple[int, ...]
    prompt: tuple[int, ...]

    def shown(self, tokens: Sequence[int]) -> list[int]:
        """What transformers would show of a text that begins with the prompt: what is masked, too."""
        return [*self.given, *tokens[len(self.prompt) :]]


def hand_on(frame: FrameType | None) -> None:
    """Put the forgotten keywords back where transformers will hand them to us.

    It asks for our signature while they are at hand, a few frames up; called from there. An assistant and a
    streamer that were silently dropped would be a promise broken: a stream that never ends, a draft never used.
    """
    for _ in range(8):
        if frame is None:
            return
        if frame.f_code.co_name == "_extract_generation_mode_kwargs":
            read, keywords = frame.f_locals.get("generation_mode_kwargs"), frame.f_locals.get("kwargs")
            if isinstance(read, dict) and isinstance(keywords, dict):
                for name, ours in _FORGOTTEN.items():
                    if read.get(name) is not None:
                        keywords[ours] = read[name]
            return
        frame = frame.f_back


def still_at_hand(frame: FrameType | None, model: Any) -> dict[str, Any]:
    """The assistant and streamer of the `model.generate` that is calling us through a function of the caller's.

    Such a function is asked for its own signature, so nothing is handed on; but generate holds them to the end.
    """
    for _ in range(8):
        if frame is None:
            break
        held = frame.f_locals if frame.f_code.co_name == "generate" else {}
        if held.get("self") is model and "custom_generate" in held:
            return {name: held[name] for name in ("assistant_model", "streamer") if held.get(name) is not None}
        frame = frame.f_back
    return {}


def check(model: Any, config: Any, keywords: Mapping[str, Any]) -> None:
    """Raise ConfigError or ModelError, by name, for what is not supported; before anything runs."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise ConfigError(f"{type(model).__name__} is an encoder-decoder; sooner.generate takes causal models.")
    asked = _REFUSED_IN_DICTIONARIES if config.return_dict_in_generate else ()
    for name, nothing, what in (*_REFUSED, *asked):
        value = getattr(config, name, None)
        if not any(value is one or value == one for one in nothing):
            raise ConfigError(f"{name}={value!r}: {what} is not supported by sooner.generate; leave it out.")
    check_model(model)
    for name, value in keywords.items():
        if name in _CACHES:
            _check_cache(name, value)
        elif name == "synced_gpus":
            if value:
                raise ConfigError("synced_gpus: a model that is split over processes is not supported.")
        elif name not in _KNOWN and value is not None and value is not False:
            raise ConfigError(f"{name} is not supported by sooner.generate: it takes token ids and a mask.")


def rows(input_ids: Tensor, mask: Tensor | None, position_ids: Tensor | None) -> list[Row]:
    """The rows of a batch. What is masked is left out of a prompt: nothing sees it, and positions do not count it.
    Raises ConfigError where the last token is masked, whose law is asked for."""
    if input_ids.ndim != 2 or not input_ids.shape[1]:
        raise ConfigError(f"input_ids must be [rows, tokens], with a token at least; got {list(input_ids.shape)}.")
    if mask is not None and mask.shape != input_ids.shape:
        raise _other_length(0, mask.shape[-1], input_ids.shape[1])
    keep = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.bool()
    found = []
    for r, (ids, kept) in enumerate(zip(input_ids.tolist(), keep.tolist(), strict=True)):
        if not kept[-1]:
            raise ConfigError(
                f"row {r}: the attention mask leaves out the last token of the prompt, after which the text "
                'goes on; set padding_side="left" in the tokenizer.'
            )
        found.append(Row(tuple(ids), tuple(compress(ids, kept))))
    if position_ids is not None:
        _check_positions(position_ids.expand(len(found), -1), keep)
    return found


def _check_positions(position_ids: Tensor, keep: Tensor) -> None:
    for r, (given, kept) in enumerate(zip(position_ids, keep, strict=True)):
        if len(given) != len(kept):
            raise _other_length(r, len(given), len(kept))
        if given[kept].tolist() != list(range(int(kept.sum()))):
            raise ConfigError(f"row {r}: position_ids other than 0, 1, 2, ... are not supported; leave them out.")


def _other_length(r: int, given: int, tokens: int) -> ConfigError:
    """transformers may hand on a mask as itself or as the positions it made of it."""
    return ConfigError(f"row {r}: attention_mask or position_ids are for {given} tokens, input_ids has {tokens}.")


def _check_cache(name: str, cache: Any) -> None:
    length = getattr(cache, "get_seq_length", None)
    if cache is not None and (length is None or length() > 0):
        raise ConfigError(f"{name}: going on from a filled cache is not supported; pass all the ids instead.")
