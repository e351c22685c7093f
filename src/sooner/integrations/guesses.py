"""From transformers' assistant keywords, and our own, to a drafter and its budget. Knows no laws and no ends."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sooner.budgets import TREES, budget_for
from sooner.config import MAX_K, Budget
from sooner.core.tree import EMPTY, Draft
from sooner.draft import registry
from sooner.draft.lookup import LookupDrafter
from sooner.draft.model import ModelDrafter
from sooner.draft.protocol import Context, Drafter, Outcome
from sooner.draft.translate import Foreign, TranslatingDrafter
from sooner.errors import ConfigError, ModelError, unknown
from sooner.integrations.auto import auto
from sooner.llm import words
from sooner.model import load as loading
from sooner.model.borrowed import borrow
from sooner.model.protocol import Model

# transformers' own, which it has filled in by the time we are called
_DEFAULTS = {
    "num_assistant_tokens": 20,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.4,
}
SCHEDULES = ("constant", "heuristic", "heuristic_transient")


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a caller said about guessing. draft, k, runtime: our keywords; the others: transformers'."""

    draft: str | Drafter = "auto"
    k: int | None = None
    assistant: Any = None
    tokenizer: Any = None
    assistant_tokenizer: Any = None
    runtime: str = "auto"

    def __post_init__(self) -> None:
        if not isinstance(self.draft, str | Drafter):
            raise ConfigError(f"draft must be a name or a Drafter, got {type(self.draft).__name__}.")
        if self.assistant is not None and self.draft != "auto":
            raise ConfigError("give either assistant_model or draft, not both.")
        budget_for("", self.k)


@dataclass(frozen=True, slots=True)
class Choice:
    """Who guesses, and how much at most. weighed: no more than pays by measured costs; else always as much."""

    drafter: Drafter
    budget: Budget
    weighed: bool = False


def choose(wishes: Wishes, config: Any, module: Any, target: Model) -> Choice:
    """config: the GenerationConfig. module: the caller's model, target: what we made of it.

    transformers' keywords say how much is guessed; where none is given it is weighed, unless k says it.
    """
    if not isinstance(wishes.draft, str):
        return Choice(wishes.draft, budget_for("", wishes.k), wishes.k is None)
    if wishes.draft != "auto":
        return _named(wishes, module, target)
    if wishes.assistant is not None:
        config = _with_its_own(config, wishes.assistant)
        drafter = _scheduled(_assistant(wishes, config, module, target), config)
        return Choice(drafter, _assisted(wishes, config, drafter))
    if config.assistant_early_exit is not None:
        early = loading.first_layers(target, int(config.assistant_early_exit))
        exiting = ModelDrafter(early, target.vocab_size, confidence=_confidence(config), name="early-exit")
        drafter = _scheduled(exiting, config)
        return Choice(drafter, _assisted(wishes, config, drafter))
    if config.prompt_lookup_num_tokens is not None:
        count = int(config.prompt_lookup_num_tokens)
        longest = int(config.max_matching_ngram_size or 2)
        return Choice(LookupDrafter(longest=longest, weak=max(count, 1)), _chain(wishes.k, count))
    return Choice(auto(module, target), _limit("auto", wishes.k, target), wishes.k is None)


def _limit(name: str, k: int | None, target: Model) -> Budget:
    """As in sooner.LLM: trees where they are exact to the bit, chains otherwise."""
    return budget_for(name, k, 1 if name in TREES and not loading.even_trees(target) else None)


def _named(wishes: Wishes, module: Any, target: Model) -> Choice:
    spec = registry.parse(str(wishes.draft))

    def load_draft(wanted: registry.Spec) -> Model | Foreign:
        name = wanted.argument or ""
        if wanted.name == "early-exit":
            return loading.first_layers(target, int(name) if name else None)
        if wanted.name == "self":
            raise ConfigError(f"draft '{wanted}' would be a second copy of the weights; use sooner.LLM for that.")
        loaded = loading.load(name)
        if wishes.tokenizer is None or loading.same_tokens(wishes.tokenizer, loaded.tokenizer):
            return loaded.model
        return Foreign(loaded.model, words(loaded), words(_loaded("the target", module, target, wishes.tokenizer)))

    drafter = registry.make(spec, target, load_draft)
    return Choice(drafter, _limit(spec.name, wishes.k, target), wishes.k is None)


def _assistant(wishes: Wishes, config: Any, module: Any, target: Model) -> Drafter:
    """The assistant's weights are borrowed like the target's. With both tokenizers it may have one of its own."""
    theirs, own = wishes.tokenizer, wishes.assistant_tokenizer
    confidence, vocab = _confidence(config), target.vocab_size
    try:
        model = borrow(wishes.assistant, wishes.runtime)
    except ModelError as error:
        raise ModelError(f"assistant_model: {error}") from error
    if theirs is not None and own is not None:
        if not loading.same_tokens(theirs, own):
            drafted = _loaded("assistant_model", wishes.assistant, model, own)
            foreign = Foreign(model, words(drafted), words(_loaded("the target", module, target, theirs)))
            return TranslatingDrafter(foreign, vocab, confidence)
    elif model.vocab_size != vocab:
        raise ConfigError(
            f"the assistant's vocabulary ({model.vocab_size}) is not the target's ({vocab}). Pass tokenizer= and "
            "assistant_tokenizer=, so that their ids can be compared, and translated where they differ."
        )
    return ModelDrafter(model, vocab, confidence=confidence)


def _loaded(name: str, module: Any, model: Model, tokenizer: Any) -> loading.Loaded:
    return loading.Loaded(name, model, tokenizer, loading.eos_ids(module))


def _with_its_own(config: Any, assistant: Any) -> Any:
    """What the call leaves at transformers' defaults the assistant's own generation config may say."""
    merged, own = copy.copy(config), getattr(assistant, "generation_config", None)
    for name, default in _DEFAULTS.items():
        said = getattr(own, name, None)
        if said is not None and getattr(config, name) in (None, default):
            setattr(merged, name, said)
    return merged


def _scheduled(drafter: Drafter, config: Any) -> Drafter:
    schedule = config.num_assistant_tokens_schedule or "constant"
    if schedule not in SCHEDULES:
        raise ConfigError(unknown("num_assistant_tokens_schedule", schedule, SCHEDULES))
    return drafter if schedule == "constant" else Scheduled(drafter, int(config.num_assistant_tokens))


def _assisted(wishes: Wishes, config: Any, drafter: Drafter) -> Budget:
    """A schedule of its own is bound by the engine's limit alone."""
    return _chain(wishes.k, MAX_K if isinstance(drafter, Scheduled) else int(config.num_assistant_tokens))


def _confidence(config: Any) -> float:
    return float(config.assistant_confidence_threshold or 0.0)


def _chain(k: int | None, asked: int) -> Budget:
    """transformers' own number of guesses, unless ours is given."""
    return budget_for("", min(max(asked, 0), MAX_K) if k is None else k)


class Scheduled:
    """transformers' "heuristic": two tokens more after a full accept, one less after any other (1 at least).

    Each request has a length of its own, and begins with `start`; nothing outlives the request, so a second
    call is like the first. The budget is the bound.
    """

    def __init__(self, inner: Drafter, start: int) -> None:
        self._inner, self._start = inner, start
        self.name, self.taps = inner.name, inner.taps
        self._lengths: dict[str, int] = {}

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        cut = [
            budget.within(self._lengths.get(context.request_id, self._start), budget.nodes)
            for context, budget in zip(contexts, budgets, strict=True)
        ]
        asked = [i for i, budget in enumerate(cut) if not budget.empty]
        made = self._inner.propose([contexts[i] for i in asked], [cut[i] for i in asked])
        drafts = dict(zip(asked, made, strict=True))
        return [drafts.get(i, EMPTY) for i in range(len(contexts))]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        for one in outcomes:
            if one.drafted:
                now = self._lengths.get(one.request_id, self._start)
                self._lengths[one.request_id] = now + 2 if one.accepted == one.drafted else max(1, now - 1)
        self._inner.observe(outcomes)

    def forget(self, request_id: str) -> None:
        self._lengths.pop(request_id, None)
        self._inner.forget(request_id)
