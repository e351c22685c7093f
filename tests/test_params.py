"""What a caller may ask: every bad value is refused with the name of the parameter, and good ones are kept."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from sooner.errors import ConfigError, SoonerError
from sooner.params import MAX_BAD_WORDS, MAX_IDS, MAX_LOGPROBS, MAX_N, MAX_SEED, MAX_STOPS, RULES, SamplingParams

NAN, INF = math.nan, math.inf
NO_NUMBERS = ["1", None, [1], True]
NO_INTEGERS = ["1", 1.0, 1.5, [1], True]
NO_FLAGS = [0, 1, None, "yes"]

BAD: dict[str, list[Any]] = {
    "max_tokens": [0, -1, *NO_INTEGERS],
    "min_tokens": [-1, None, *NO_INTEGERS],
    "temperature": [-0.1, NAN, INF, -INF, 10**400, *NO_NUMBERS],
    "top_k": [-2, None, *NO_INTEGERS],
    "top_p": [0, 0.0, -0.5, 1.1, NAN, INF, *NO_NUMBERS],
    "min_p": [-0.1, 1.1, NAN, *NO_NUMBERS],
    "typical_p": [0, -0.1, 1.1, NAN, *NO_NUMBERS],
    "repetition_penalty": [0, -1.0, NAN, INF, *NO_NUMBERS],
    "presence_penalty": [-2.1, 2.1, NAN, *NO_NUMBERS],
    "frequency_penalty": [-2.1, 2.1, NAN, *NO_NUMBERS],
    "seed": [-1, MAX_SEED + 1, *NO_INTEGERS],
    "n": [0, -1, MAX_N + 1, None, *NO_INTEGERS],
    "best_of": [0, MAX_N + 1, *NO_INTEGERS],
    "logprobs": [-1, MAX_LOGPROBS + 1, *NO_INTEGERS],
    "prompt_logprobs": [-1, MAX_LOGPROBS + 1, *NO_INTEGERS],
    "stop": ["", ("a", ""), (1,), 5, None, {"a": 1}, ["x"] * (MAX_STOPS + 1)],
    "bad_words": ["", ("a", ""), (1,), 5, None, ["x"] * (MAX_BAD_WORDS + 1)],
    "stop_token_ids": [5, "5", (-1,), (1.0,), (True,), ("1",), None, list(range(MAX_IDS + 1))],
    "allowed_token_ids": [5, "5", (-1,), (1.0,), (), [], list(range(MAX_IDS + 1))],
    "logit_bias": [5, [(1, 2.0)], None, {-1: 1.0}, {"1": 1.0}, {1: 101}, {1: NAN}, {1: "2"}, {1: True}, {1.0: 1}],
    "speculation": ["on", "", 0, -1, 65, 2.0, True, None, [2]],
    "priority": [2**31, -(2**31), None, *NO_INTEGERS],
    "deadline_s": [0, -1.0, NAN, INF, "1", [1], True],
    "cache_salt": ["", 5, "x" * 257, ["a"]],
    "ignore_eos": NO_FLAGS,
    "include_stop_str_in_output": NO_FLAGS,
    "skip_special_tokens": NO_FLAGS,
    "logits_processors": [5, [5], "max", None],
    "logprobs_mode": ["", "Raw", None, 3],
    "prediction": [5, (-1,), (1.0,), ["x"], {1}, True],
    "rule": ["", "metch", None, 3],
}
CASES = [(name, value) for name, values in BAD.items() for value in values]

GOOD: list[dict[str, Any]] = [
    dict(max_tokens=None),
    dict(max_tokens=1, min_tokens=1),
    dict(temperature=0),
    dict(temperature=1e-6),
    dict(temperature=1e6),
    dict(top_k=-1),
    dict(top_k=10**9),
    dict(top_p=1),
    dict(top_p=1e-9),
    dict(min_p=1),
    dict(repetition_penalty=1e-3),
    dict(presence_penalty=-2, frequency_penalty=2),
    dict(seed=0),
    dict(seed=MAX_SEED),
    dict(n=2, best_of=2),
    dict(logprobs=0, prompt_logprobs=MAX_LOGPROBS),
    dict(stop=[]),
    dict(logit_bias={0: -100, 5: 100.0}),
    dict(stop_token_ids={1, 2}),
    dict(logits_processors=[max]),
    dict(prediction="any text"),
    dict(prediction=(1, 2)),
    dict(prediction=()),
]


@pytest.mark.parametrize(("name", "value"), CASES, ids=lambda x: x if isinstance(x, str) else repr(x)[:20])
def test_a_bad_value_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]  # bad on purpose
    assert name in str(caught.value)
    assert isinstance(caught.value, SoonerError)


def test_every_parameter_has_bad_values_here() -> None:
    assert {field.name for field in fields(SamplingParams)} - {"structured_outputs"} == set(BAD)


@pytest.mark.parametrize("values", GOOD, ids=str)
def test_a_value_at_the_edge_is_kept(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    for name, value in values.items():
        kept = getattr(params, name)
        assert (set(kept) if isinstance(value, list | set) else kept) == (
            set(value) if isinstance(value, list | set) else value
        )


def test_the_defaults_are_greedy_and_change_nothing() -> None:
    params = SamplingParams()
    assert params.greedy
    assert params.texts == 1
    assert (params.top_k, params.top_p, params.min_p, params.typical_p) == (0, 1.0, 0.0, 1.0)


def test_a_single_stop_string_is_a_list_of_one() -> None:
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(bad_words="x").bad_words == ("x",)


def test_parameters_that_contradict_each_other_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"min_tokens \(5\) is more than max_tokens \(4\)"):
        SamplingParams(max_tokens=4, min_tokens=5)
    with pytest.raises(ConfigError, match=r"best_of \(2\) must be at least n \(3\)"):
        SamplingParams(n=3, best_of=2)


def test_a_mistyped_rule_is_told_the_right_one() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'match'") as caught:
        SamplingParams(rule="metch")  # type: ignore[arg-type]  # bad on purpose
    assert all(rule in str(caught.value) for rule in RULES)


def test_an_unknown_parameter_is_refused() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]  # bad on purpose


def test_parameters_cannot_change_under_a_running_request() -> None:
    stops, bias, ids = ["a"], {1: 2.0}, [3]
    params = SamplingParams(stop=stops, logit_bias=bias, stop_token_ids=ids)  # type: ignore[arg-type]  # lists
    stops.append("b")
    bias[9] = 1.0
    ids.append(4)
    assert (params.stop, dict(params.logit_bias), params.stop_token_ids) == (("a",), {1: 2.0}, (3,))
    with pytest.raises(FrozenInstanceError):
        params.seed = 1  # type: ignore[misc]  # on purpose
