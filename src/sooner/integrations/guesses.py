"""From transformers' assistant keywords, and our own, to a drafter and its budget. Knows no laws and no ends."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sooner.config import MAX_K, Budget
from sooner.core.tree import EMPTY, Draft
from sooner.draft import registry
from sooner.draft.lookup import LookupDrafter
from sooner.draft.model import ModelDrafter
from sooner.draft.protocol import Context, Drafter, Outcome
from sooner.errors import ConfigError, ModelError, unknown
from sooner.llm import budget_for
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


def choose(wishes: Wishes, config: Any, target: Model) -> tuple[Drafter, Budget]:
    """The drafter and its budget. config: the GenerationConfig."""
    if not isinstance(wishes.draft, str):
        return wishes.draft, budget_for("", wishes.k)
    if wishes.draft != "auto":
        return _named(wishes, target)
    if wishes.assistant is not None:
        config = _with_its_own(config, wishes.assistant)
        drafter = _assistant(wishes, config, target.vocab_size)
        return drafter, _assisted(wishes, config, drafter)
    if config.assistant_early_exit is not None:
        early = loading.first_layers(target, int(config.assistant_early_exit))
        exiting = ModelDrafter(early, target.vocab_size, confidence=_confidence(config), name="early-exit")
        drafter = _scheduled(exiting, config)
        return drafter, _assisted(wishes, config, drafter)
    if config.prompt_lookup_num_tokens is not None:
        count = int(config.prompt_lookup_num_tokens)
        longest = int(config.max_matching_ngram_size or 2)
        return LookupDrafter(longest=longest, weak=max(count, 1)), _chain(wishes.k, count)
    return LookupDrafter(), budget_for("lookup", wishes.k)


def _named(wishes: Wishes, target: Model) -> tuple[Drafter, Budget]:
    spec = registry.parse(str(wishes.draft))

    def load_draft(wanted: registry.Spec) -> Model:
        name = wanted.argument or ""
        if wanted.name == "early-exit":
            return loading.first_layers(target, int(name) if name else None)
        if wanted.name == "self":
            raise ConfigError(f"draft '{wanted}' would be a second copy of the weights; use sooner.LLM for that.")
        loaded = loading.load(name)
        if wishes.tokenizer is not None:
            loading.check_same_tokens(wishes.tokenizer, loaded.tokenizer, ("the target", name))
        return loaded.model

    return registry.make(spec, target, load_draft), budget_for(spec.name, wishes.k)


def _assistant(wishes: Wishes, config: Any, vocab: int) -> Drafter:
    """The assistant's weights are borrowed like the target's."""
    try:
        model = borrow(wishes.assistant, wishes.runtime)
    except ModelError as error:
        raise ModelError(f"assistant_model: {error}") from error
    if wishes.tokenizer is not None and wishes.assistant_tokenizer is not None:
        loading.check_same_tokens(wishes.tokenizer, wishes.assistant_tokenizer, ("the target", "assistant_model"))
    elif model.vocab_size != vocab:
        raise ConfigError(
            f"the assistant's vocabulary ({model.vocab_size}) is not the target's ({vocab}). If only padding "
            "differs, pass tokenizer= and assistant_tokenizer= so that this can be checked."
        )
    return _scheduled(ModelDrafter(model, vocab, confidence=_confidence(config)), config)


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
