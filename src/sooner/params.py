"""What a caller may ask of one request. Knows nothing of how it is served."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from sooner.errors import ConfigError, unknown

Rule = Literal["auto", "match", "reject"]
RULES: tuple[str, ...] = get_args(Rule)

MAX_SEED = 2**63 - 1
MAX_STOPS = 32
MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    max_tokens: most tokens to write, at least 1; None = until the text ends or the context is full.
    temperature: 0 (greedy, the default) or more; logits are divided by it.
    top_k: keep the k likeliest tokens; 0 or -1 = all.
    top_p: keep the smallest set of likeliest tokens whose mass reaches top_p, in (0, 1].
    min_p: keep tokens at least min_p times as likely as the likeliest, in [0, 1].
    seed: 0 to 2**63 - 1; the text is then a function of target, prompt, parameters and seed alone.
        None = fresh randomness for each request.
    stop: strings that end the text; the text is cut before the first one.
    stop_token_ids: ids that end the text beside the model's own end-of-text ids.
    ignore_eos: go on after the model's end-of-text ids.
    include_stop_str_in_output: cut after the stop string, not before it.
    skip_special_tokens: leave special tokens out of `text` (never out of `token_ids`).
    logprobs: None, or how many alternatives (0 to 20) to report beside each emitted token's own
        log-probability; taken from the raw logits, before temperature and filters.
    rule: "match", "reject" or "auto" (greedy or seeded -> match, else reject).

    Raises ConfigError naming the parameter, its value and what is allowed.
    """

    max_tokens: int | None = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    rule: Rule = "auto"

    def __post_init__(self) -> None:
        stop: object = self.stop
        object.__setattr__(self, "stop", (stop,) if isinstance(stop, str) else _strings("stop", stop))
        object.__setattr__(self, "stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        _integer("max_tokens", self.max_tokens, 1, None, optional=True)
        _integer("top_k", self.top_k, -1, None)
        _integer("seed", self.seed, 0, MAX_SEED, optional=True)
        _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS, optional=True)
        _number("temperature", self.temperature, 0.0, math.inf)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            raise ConfigError("top_p must be above 0 and at most 1, got 0. Use temperature=0 for greedy.")
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, got {getattr(self, name)!r}.")
        if len(self.stop) > MAX_STOPS or not all(self.stop):
            raise ConfigError(f"stop takes up to {MAX_STOPS} non-empty strings, got {self.stop!r}.")
        if self.rule not in RULES:
            raise ConfigError(unknown("rule", str(self.rule), RULES))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def _integer(name: str, value: object, low: int, high: int | None, *, optional: bool = False) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be a whole number{' or None' if optional else ''}, got {value!r}.")
    if value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ConfigError(f"{name} must be {bound}, got {value}.")


def _number(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} must be a number, got {value!r}.")
    if not math.isfinite(value) or not low <= value <= high:
        bound = f"{low:g} or more" if high == math.inf else f"from {low:g} to {high:g}"
        raise ConfigError(f"{name} must be a finite number, {bound}; got {value!r}.")


def _strings(name: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise ConfigError(f"{name} must be a string or a list of strings, got {value!r}.")
    return tuple(value)


def _ids(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple | set | frozenset):
        raise ConfigError(f"{name} must be a list of token ids, got {value!r}.")
    for item in value:
        _integer(f"every id in {name}", item, 0, None)
    return tuple(value)
