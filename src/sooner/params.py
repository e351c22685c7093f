"""What a caller may ask of one request. Knows nothing of how it is served."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from sooner.errors import ConfigError, unknown
from sooner.structured import StructuredOutputs

Rule = Literal["auto", "match", "reject", "block", "traversal"]
RULES: tuple[str, ...] = get_args(Rule)
LogprobsMode = Literal["raw", "processed"]
Speculation = Literal["auto", "off"] | int
MODES: tuple[str, ...] = get_args(LogprobsMode)

MAX_SEED = 2**63 - 1
MAX_STOPS = 32
MAX_LOGPROBS = 20
MAX_N = 16
MAX_IDS = 1024
MAX_BAD_WORDS = 128
MAX_SPECULATION = 64
MAX_PRIORITY = 2**31 - 1
MAX_SALT = 256


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    Ends:
    max_tokens: most tokens to write, at least 1; None = until the text ends or the context is full.
    min_tokens: no end-of-text or stop id before so many tokens are written.
    stop: strings that end the text; the text is cut before the first one.
    stop_token_ids: ids that end the text beside the model's own end-of-text ids.
    ignore_eos: go on after the model's end-of-text ids.
    include_stop_str_in_output: cut after the stop string, not before it.

    What acts on logits, in this order:
    logit_bias: {id: -100..100} added to logits. allowed_token_ids: no other id may come.
    repetition_penalty: above 0; logits of ids in prompt or text are divided (if positive) or multiplied.
    presence_penalty, frequency_penalty: -2..2, taken off for ids in the text, once / per occurrence.
    bad_words: strings whose last token may not follow their first ones.
    structured_outputs: a StructuredOutputs: JSON, a regular expression, choices or a grammar.
    logits_processors: functions (tokens so far, logits [V]) -> logits [V]; must not keep state.

    What shapes the distribution, in this order:
    temperature: 0 (greedy, the default) or more; logits are divided by it.
    top_k: keep the k likeliest tokens; 0 or -1 = all.
    top_p: keep the smallest set of likeliest tokens whose mass reaches top_p, in (0, 1].
    min_p: keep tokens at least min_p times as likely as the likeliest, in [0, 1].
    typical_p: keep the tokens whose surprise is nearest the entropy, up to that mass, in (0, 1].

    seed: 0 to 2**63 - 1; the text is then a function of target, prompt, parameters and seed alone.
        None = fresh randomness for each request.
    n: how many texts; each has a random stream of its own. best_of: write so many, return the n likeliest.
    logprobs: None, or how many alternatives (0 to 20) to report beside each token's own log-probability.
    prompt_logprobs: the same for the prompt's tokens. logprobs_mode: "raw" (before everything above) or
        "processed" (the law the token was drawn from; greedy: after the logits edits).
    skip_special_tokens: leave special tokens out of `text` (never out of `token_ids`).
    rule: how guesses are judged: "match", "reject", "block", "traversal", or "auto" (greedy or seeded ->
        match, else traversal, which on a chain is block). All are exact; block judges trees as traversal.
    prediction: the text you expect back (a string, or token ids), as when a file is edited: it makes matching
        stretches faster and never changes the text. For the drafter "prediction".
    speculation: "auto" (as the controller finds best), "off", or how many tokens to guess a step (1 to 64).
    priority: smaller = admitted earlier, and later to make room when memory is short.
    deadline_s: seconds after which the text ends as it is, with finish_reason "deadline"; None = never.
    cache_salt: requests share the beginnings of their prompts only with those of the same salt; None = with all
        that have none.

    Raises ConfigError naming the parameter, its value and what is allowed.
    """

    max_tokens: int | None = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    min_tokens: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    n: int = 1
    best_of: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: LogprobsMode = "raw"
    logits_processors: tuple[Callable[..., Any], ...] = ()
    structured_outputs: StructuredOutputs | None = None
    rule: Rule = "auto"
    prediction: str | tuple[int, ...] | None = None
    speculation: Speculation = "auto"
    priority: int = 0
    deadline_s: float | None = None
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        self._normalise()
        self._check_numbers()
        self._check_lists()
        self._check_pairs()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def texts(self) -> int:
        """How many texts are written for one prompt."""
        return self.best_of or self.n

    def _normalise(self) -> None:
        """Lists become tuples, so that parameters cannot change under a running request."""
        put = object.__setattr__
        put(self, "stop", _strings("stop", self.stop))
        put(self, "bad_words", _strings("bad_words", self.bad_words))
        put(self, "stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            put(self, "allowed_token_ids", _ids("allowed_token_ids", self.allowed_token_ids))
        put(self, "logit_bias", _bias(self.logit_bias))
        if self.prediction is not None and not isinstance(self.prediction, str):
            put(self, "prediction", _tokens("prediction", self.prediction))
        if not isinstance(self.logits_processors, list | tuple) or not all(map(callable, self.logits_processors)):
            raise ConfigError(f"logits_processors must be a list of functions, got {self.logits_processors!r}.")
        put(self, "logits_processors", tuple(self.logits_processors))

    def _check_numbers(self) -> None:
        _integer("max_tokens", self.max_tokens, 1, None, optional=True)
        _integer("min_tokens", self.min_tokens, 0, None)
        _integer("top_k", self.top_k, -1, None)
        _integer("seed", self.seed, 0, MAX_SEED, optional=True)
        _integer("n", self.n, 1, MAX_N)
        _integer("best_of", self.best_of, 1, MAX_N, optional=True)
        _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS, optional=True)
        _integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS, optional=True)
        _number("temperature", self.temperature, 0.0, math.inf)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("top_p", self.top_p, 0.0, 1.0, open_below=True)
        _number("typical_p", self.typical_p, 0.0, 1.0, open_below=True)
        _number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, open_below=True)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)

    def _check_lists(self) -> None:
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, got {getattr(self, name)!r}.")
        for name, most in (("stop", MAX_STOPS), ("bad_words", MAX_BAD_WORDS)):
            value = getattr(self, name)
            if len(value) > most or not all(value):
                raise ConfigError(f"{name} takes up to {most} non-empty strings, got {value!r}.")
        if self.structured_outputs is not None and not isinstance(self.structured_outputs, StructuredOutputs):
            raise ConfigError(f"structured_outputs must be a StructuredOutputs, got {self.structured_outputs!r}.")
        if self.rule not in RULES:
            raise ConfigError(unknown("rule", str(self.rule), RULES))
        self._check_service()
        if self.logprobs_mode not in MODES:
            raise ConfigError(unknown("logprobs_mode", str(self.logprobs_mode), MODES))

    def _check_service(self) -> None:
        if not isinstance(self.speculation, str) or self.speculation not in ("auto", "off"):
            if isinstance(self.speculation, str):
                raise ConfigError(unknown("speculation", self.speculation, ("auto", "off", "1 to 64")))
            _integer("speculation", self.speculation, 1, MAX_SPECULATION)
        _integer("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
        if self.deadline_s is not None:
            _number("deadline_s", self.deadline_s, 0.0, math.inf, open_below=True)
        salt = self.cache_salt
        if salt is not None and (not isinstance(salt, str) or not 0 < len(salt) <= MAX_SALT):
            raise ConfigError(f"cache_salt must be a string of 1 to {MAX_SALT} characters or None, got {salt!r}.")

    def _check_pairs(self) -> None:
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ConfigError("allowed_token_ids must hold at least one id; leave it out to allow all.")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ConfigError(f"min_tokens ({self.min_tokens}) is more than max_tokens ({self.max_tokens}).")
        if self.best_of is not None and self.best_of < self.n:
            raise ConfigError(f"best_of ({self.best_of}) must be at least n ({self.n}).")


def _integer(name: str, value: object, low: int, high: int | None, *, optional: bool = False) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be a whole number{' or None' if optional else ''}, got {value!r}.")
    if value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ConfigError(f"{name} must be {bound}, got {value}.")


def _number(name: str, value: object, low: float, high: float, *, open_below: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} must be a number, got {value!r}.")
    if not _finite(value) or not low <= value <= high or (open_below and value == low):
        least = f"above {low:g}" if open_below else f"{low:g} or more"
        bound = least if high == math.inf else f"{least} and at most {high:g}"
        raise ConfigError(f"{name} must be a finite number, {bound}; got {value!r}.")


def _finite(value: int | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number too large for a float
        return False


def _strings(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise ConfigError(f"{name} must be a string or a list of strings, got {value!r}.")
    return tuple(value)


def _ids(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple | set | frozenset):
        raise ConfigError(f"{name} must be a list of token ids, got {value!r}.")
    if len(value) > MAX_IDS:
        raise ConfigError(f"{name} takes up to {MAX_IDS} ids, got {len(value)}.")
    for item in value:
        _integer(f"every id in {name}", item, 0, None)
    return tuple(value)


def _tokens(name: str, value: object) -> tuple[int, ...]:
    """A text as token ids: as long as it likes."""
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{name} must be a string or a list of token ids, got {value!r}.")
    for item in value:
        _integer(f"every id in {name}", item, 0, None)
    return tuple(value)


def _bias(value: object) -> Mapping[int, float]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"logit_bias must map token ids to numbers, got {value!r}.")
    if len(value) > MAX_IDS:
        raise ConfigError(f"logit_bias takes up to {MAX_IDS} ids, got {len(value)}.")
    for token, added in value.items():
        _integer("every id in logit_bias", token, 0, None)
        _number(f"logit_bias[{token}]", added, -100.0, 100.0)
    return dict(value)
