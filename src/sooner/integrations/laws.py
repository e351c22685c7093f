"""From transformers' LogitsProcessorList to the law of one row. Knows neither passes nor ends of texts.

What the engine does itself (repetition penalty, temperature, top-k, top-p, min-p, typical-p, all of which
follow transformers to the tie) becomes parameters; whatever stands before runs as it is, row by row, on
that row's own ids with its own padding, so that lengths are those transformers would show.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    LogitNormalization,
    LogitsProcessorList,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from sooner.errors import ConfigError
from sooner.integrations.call import Row

# (type, its attribute, our parameter), in the order in which the engine applies them; that of transformers.
_SHAPES: tuple[tuple[type, str, str], ...] = (
    (TemperatureLogitsWarper, "temperature", "temperature"),
    (TopKLogitsWarper, "top_k", "top_k"),
    (TopPLogitsWarper, "top_p", "top_p"),
    (MinPLogitsWarper, "min_p", "min_p"),
    (TypicalLogitsWarper, "mass", "typical_p"),
)

# They keep a state from step to step or run the model themselves, so they cannot judge guesses row by row.
_REFUSED = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "guidance_scale",
    "ClassifierFreeGuidanceLogitsProcessor": "guidance_scale",
    "SynthIDTextWatermarkLogitsProcessor": "a SynthID watermark",
    "AlternatingCodebooksLogitsProcessor": "alternating codebooks",
}


def check(processors: Sequence[Any]) -> None:
    """Raise ConfigError, naming it, for a processor that cannot be followed along a draft."""
    for processor in processors:
        for kind in type(processor).__mro__:
            if kind.__name__ in _REFUSED:
                raise ConfigError(
                    f"{_REFUSED[kind.__name__]} ({kind.__name__}) is not supported with sooner.generate."
                )


def of_row(processors: Sequence[Any], row: int, copies: int) -> LogitsProcessorList:
    """The list as it acts on one row alone. copies: num_return_sequences, rows that share a prompt."""
    return LogitsProcessorList([_alone(processor, row, row // copies) for processor in processors])


class RowProcessor:
    """transformers' processors as one of ours: (tokens, logits [V]) -> logits [V].

    error: what a processor raised.
    """

    def __init__(self, processors: LogitsProcessorList, row: Row) -> None:
        self._processors, self._row = processors, row
        self.error: Exception | None = None

    def __call__(self, tokens: Sequence[int], logits: Tensor) -> Tensor:
        ids = torch.tensor([self._row.shown(tokens)], device=logits.device)
        try:
            made: Tensor = self._processors(ids, logits[None])[0]
        except Exception as error:
            self.error = error
            raise
        return made


def split(
    processors: LogitsProcessorList, row: Row, *, sampled: bool
) -> tuple[dict[str, Any], LogitsProcessorList]:
    """Parameters the engine takes over, and the processors that are left to be run as they are."""
    left = list(processors)
    taken: dict[str, Any] = {"temperature": 1.0 if sampled else 0.0}
    if left and type(left[-1]) is LogitNormalization:
        left.pop()  # a law does not change when its logits are shifted
    if sampled:
        _take_shapes(left, taken)
    if left and type(left[0]) is RepetitionPenaltyLogitsProcessor and _penalises_all(left[0], row):
        taken["repetition_penalty"] = float(left.pop(0).penalty)
    return taken, LogitsProcessorList(left)


def _take_shapes(left: list[Any], taken: dict[str, Any]) -> None:
    """Move the warpers at the end of the list into parameters, as long as their order is the engine's."""
    bound = len(_SHAPES)
    while left:
        place = next((i for i, (kind, *_) in enumerate(_SHAPES) if type(left[-1]) is kind), None)
        if place is None or place >= bound or not _plain(left[-1]):
            return
        _, attribute, name = _SHAPES[place]
        value = getattr(left[-1], attribute)
        if name == "top_p" and not 0 < value <= 1:
            return
        taken[name] = value
        left.pop()
        bound = place


def _plain(warper: Any) -> bool:
    keeps, filters = getattr(warper, "min_tokens_to_keep", 1), getattr(warper, "filter_value", -float("inf"))
    return bool(keeps == 1 and filters == -float("inf"))


def _penalises_all(penalty: Any, row: Row) -> bool:
    """Whether exactly the row's own tokens are penalised, neither what is masked nor less than the prompt."""
    ignored = getattr(penalty, "prompt_ignore_length", None)
    if ignored is None:
        return row.given == row.prompt
    masked = len(row.given) - len(row.prompt)
    return row.given[masked:] == row.prompt and isinstance(ignored, Tensor) and int(ignored[0]) == masked


def _alone(processor: Any, row: int, prompt: int) -> Any:
    """What depends on the place in the batch, for one row; everything else as it is."""
    if type(processor) is PrefixConstrainedLogitsProcessor:
        return PrefixConstrainedLogitsProcessor(
            partial(_asked_for, processor._prefix_allowed_tokens_fn, prompt), 1
        )
    if isinstance(getattr(processor, "prompt_ignore_length", None), Tensor):
        own = copy.copy(processor)
        own.prompt_ignore_length = processor.prompt_ignore_length[row : row + 1]
        return own
    if type(processor) is EncoderRepetitionPenaltyLogitsProcessor:
        own = copy.copy(processor)
        own.encoder_input_ids = processor.encoder_input_ids[prompt : prompt + 1]
        return own
    if type(processor) is EncoderNoRepeatNGramLogitsProcessor:
        own = copy.copy(processor)
        own.batch_size, own.generated_ngrams = 1, [processor.generated_ngrams[prompt]]
        return own
    return processor


def _asked_for(function: Any, prompt: int, _zero: int, ids: Tensor) -> Any:
    """A prefix function sees the prompt's place in the caller's batch, not in a batch of one."""
    return function(prompt, ids)
