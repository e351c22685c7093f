"""transformers' generate on our engine: `model.generate(..., custom_generate=sooner.generate)`.

transformers prepares the arguments by its own rules; this reads them and hands rows to the engine, which is
the same as everywhere. The model is borrowed (model/borrowed.py): its own objects are only read.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sooner.control.fixed import FixedController
from sooner.draft.protocol import Drafter
from sooner.errors import ConfigError
from sooner.integrations import call, ends, laws, run
from sooner.integrations.auto import adaptive
from sooner.integrations.guesses import Wishes, choose
from sooner.integrations.output import CallStats
from sooner.model.borrowed import borrow
from sooner.params import Rule

_MOST_LANES = 256  # rows of one call that are written at a time


class _Signature:
    """The signature of a Generate, which transformers asks for while it still holds what it is about to forget."""

    def __get__(self, instance: object, owner: type) -> inspect.Signature:
        if instance is None:
            raise AttributeError("__signature__")
        call.hand_on(sys._getframe(1))
        return inspect.signature(owner.__call__)


class Generate:
    """transformers' generate, speculative, exact and in batches.

        >>> out = model.generate(**inputs, max_new_tokens=64, custom_generate=sooner.generate)  # doctest: +SKIP
        >>> out = sooner.generate(model, **inputs, max_new_tokens=64)                           # doctest: +SKIP

    All arguments of `model.generate` keep their meaning; those for assisted decoding choose the drafter.
    Beside them:

    draft: "auto" (the assistant or the prompt lookup that was asked for, else the best that needs no model),
        "none", "lookup", another drafter's name as on the command line, or a Drafter.
    k: tokens guessed every step, at most. None: as many as pay, weighed step by step, or what transformers'
        keywords for assisted decoding say.
    rule: how guesses are judged, see SamplingParams; all are exact.
    seed: the text is then a function of model, prompt, parameters and seed alone. Without it draws depend on
        torch's global generator, as in transformers.
    runtime: "native" runs our own decoder on the model's weights where they lie, "hf" its own modules, "auto" the
        first of these that serves it here. "packed" and "fused" run our own decoders on a copy of the weights,
        packed for the call: a second copy, but faster passes for texts of more than a few tokens.

    What is returned is what transformers returns, with `sooner_stats` (a CallStats) on it. Raises ConfigError,
    ModelError or RequestError, by name, for what is not supported; see docs/transformers.md.
    """

    __signature__ = _Signature()

    def __call__(
        self,
        model: Any,
        inputs: Tensor | None = None,
        *,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: Any = None,
        streamer: Any = None,
        draft: str | Drafter = "auto",
        k: int | None = None,
        rule: Rule = "auto",
        seed: int | None = None,
        runtime: str = "auto",
        assistant_model: Any = None,
        tokenizer: Any = None,
        assistant_tokenizer: Any = None,
        sooner_assistant: Any = None,
        sooner_streamer: Any = None,
        **keywords: Any,
    ) -> Any:
        """Called by transformers with prepared arguments, or by a user with those of `model.generate`."""
        held = call.still_at_hand(sys._getframe(1), model) if _prepared(generation_config) else {}
        assistant = sooner_assistant or assistant_model or held.get("assistant_model")
        wishes = Wishes(draft, k, assistant, tokenizer, assistant_tokenizer, runtime)
        if not _prepared(generation_config):
            return model.generate(
                inputs,
                generation_config=generation_config,
                logits_processor=logits_processor,
                stopping_criteria=stopping_criteria,
                streamer=streamer,
                custom_generate=self,
                draft=draft,
                k=k,
                rule=rule,
                seed=seed,
                runtime=runtime,
                sooner_assistant=wishes.assistant,
                **_given(tokenizer=tokenizer, assistant_tokenizer=assistant_tokenizer),
                **keywords,
            )
        call.check(model, generation_config, keywords)
        one = _read(
            inputs, generation_config, logits_processor, stopping_criteria, keywords,
            rule=rule, seed=seed, streamer=sooner_streamer or streamer or held.get("streamer"),
        )  # fmt: skip
        [written], stats = _run(model, wishes, generation_config, [one], min(len(one.rows), _MOST_LANES))
        return run.result(written, stats)


generate = Generate()


@dataclass(frozen=True, slots=True)
class Generated:
    """One text of generate_batch. ids: new tokens, an end-of-text id included; text: None without tokenizer."""

    ids: tuple[int, ...]
    text: str | None


class Batch(list[Generated]):
    """The texts, in the order of their prompts, and the record of how they were written."""

    def __init__(self, texts: Sequence[Generated], stats: CallStats) -> None:
        super().__init__(texts)
        self.sooner_stats = stats


def generate_batch(
    model: Any,
    prompts: Sequence[str | Sequence[int]],
    *,
    tokenizer: Any = None,
    lanes: int = 16,
    draft: str | Drafter = "auto",
    k: int | None = None,
    rule: Rule = "auto",
    seed: int | None = None,
    runtime: str = "auto",
    assistant_model: Any = None,
    assistant_tokenizer: Any = None,
    **keywords: Any,
) -> Batch:
    """Many prompts through the scheduler: no padding, and a prompt moves up as soon as a text has ended.

        >>> sooner.generate_batch(model, ["One.", "Two."], tokenizer=tok, max_new_tokens=9)  # doctest: +SKIP

    prompts: strings (these need the tokenizer) or token ids. lanes: how many are written at a time.
    Keywords are those of `model.generate`, for every prompt alike. With a seed, prompt i is written as by
    `generate(seed=seed + i)`.
    """
    if not prompts or type(lanes) is not int or lanes < 1:
        raise ConfigError(
            f"generate_batch needs at least one prompt and one lane, got {len(prompts)} and {lanes!r}."
        )
    if keywords.get("streamer") is not None:
        raise ConfigError("streamer: generate_batch hands out whole texts; sooner.generate streams.")
    wishes = Wishes(draft, k, assistant_model, tokenizer, assistant_tokenizer, runtime)
    device = model.get_input_embeddings().weight.device
    read: list[run.Prepared] = []
    configs = []

    def keep(model: Any, input_ids: Tensor, **prepared: Any) -> Tensor:
        config = prepared.pop("generation_config")
        processors, criteria = prepared.pop("logits_processor"), prepared.pop("stopping_criteria")
        call.check(model, config, prepared)
        own = None if seed is None else seed + len(read)
        read.append(_read(input_ids, config, processors, criteria, prepared, rule=rule, seed=own))
        configs.append(config)
        return input_ids

    for ids in [_ids(prompt, tokenizer) for prompt in prompts]:
        inputs = torch.tensor([ids], device=device)
        mask = torch.ones_like(inputs)
        model.generate(
            inputs,
            attention_mask=mask,
            custom_generate=Keeper(keep),
            **_given(tokenizer=tokenizer),
            **keywords,
        )
    written, stats = _run(model, wishes, configs[0], read, lanes)
    texts = [tuple(ids) for one in written for ids in one.written]
    return Batch([Generated(ids, _text(ids, tokenizer)) for ids in texts], stats)


class Keeper:
    """A custom_generate that keeps what transformers prepared and runs nothing."""

    __signature__ = _Signature()

    def __init__(self, keep: Any) -> None:
        self._keep = keep

    def __call__(self, model: Any, input_ids: Tensor, *, tokenizer: Any = None, **prepared: Any) -> Any:
        return self._keep(model, input_ids, **prepared)


def _run(
    model: Any, wishes: Wishes, config: Any, calls: Sequence[run.Prepared], lanes: int
) -> tuple[list[run.Written], CallStats]:
    target = borrow(model, wishes.runtime)
    choice = choose(wishes, config, model, target)
    if not choice.weighed:
        return run.run(target, choice.drafter, FixedController(choice.budget), calls, lanes)
    controller, keep_costs = adaptive(model, target, choice.drafter.name, choice.budget)
    # How much is guessed depends on the clock; torch.manual_seed must fix the text: only "match" does not mind.
    written = run.run(target, choice.drafter, controller, calls, lanes, drawn_rule="match")
    keep_costs()
    return written


def _read(
    input_ids: Any,
    config: Any,
    processors: Any,
    criteria: Any,
    keywords: Any,
    *,
    rule: Rule,
    seed: int | None,
    streamer: Any = None,
) -> run.Prepared:
    """A prepared call of transformers, as the engine takes it."""
    laws.check(processors)
    asked = bool(config.return_dict_in_generate)
    pad = config._pad_token_tensor
    return run.Prepared(
        input_ids,
        call.rows(input_ids, keywords.get("attention_mask"), keywords.get("position_ids")),
        processors,
        ends.read(criteria, input_ids.shape[1]),
        sampled=bool(config.do_sample),
        copies=int(config.num_return_sequences or 1),
        pad=None if pad is None else int(pad),
        rule=rule,
        seed=seed,
        streamer=streamer,
        wants_dict=asked,
        wants_scores=asked and bool(config.output_scores),
        wants_logits=asked and bool(config.output_logits),
    )


def _prepared(config: Any) -> bool:
    """Whether transformers has been over a generation config (a copy of the caller's)."""
    return config is not None and hasattr(config, "_pad_token_tensor") and hasattr(config, "_eos_token_tensor")


def _given(**named: Any) -> dict[str, Any]:
    return {name: value for name, value in named.items() if value is not None}


def _ids(prompt: str | Sequence[int], tokenizer: Any) -> list[int]:
    if not isinstance(prompt, str):
        ids = [int(token) for token in prompt]
        if not ids:
            raise ConfigError("a prompt is empty; it needs at least one token.")
        return ids
    if tokenizer is None:
        raise ConfigError("prompts that are strings need tokenizer=.")
    return _ids(tokenizer(prompt)["input_ids"], tokenizer)


def _text(ids: Sequence[int], tokenizer: Any) -> str | None:
    if tokenizer is None:
        return None
    text: str = tokenizer.decode(ids, skip_special_tokens=True)
    return text
