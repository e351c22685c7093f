"""The suffix drafter: what it copies, what requests may learn from each other, and that texts stay the same."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sooner.config import Budget, EngineConfig
from sooner.control.fixed import FixedController
from sooner.core.law import LawParams
from sooner.core.tree import Draft
from sooner.draft.protocol import Context, Outcome
from sooner.draft.suffix import SuffixDrafter
from sooner.engine.engine import Engine
from sooner.engine.guard import problem
from sooner.errors import ConfigError
from sooner.params import SamplingParams
from sooner.testing import ToyModel, check_drafter
from tests.engine.plain import plain_text

many = settings(max_examples=200, deadline=None, derandomize=True)
CHAIN = Budget.chain(4)


def context(tokens: Sequence[int], name: str = "r", prompt: int = 0, scope: str | None = None) -> Context:
    return Context(name, list(tokens), LawParams(), 0, "match", None, prompt, scope)


def one(drafter: SuffixDrafter, wanted: Context, budget: Budget = CHAIN) -> Draft:
    [made] = drafter.propose([wanted], [budget])
    return made


def write(drafter: SuffixDrafter, output: Sequence[int], name: str, scope: str | None) -> None:
    """A request that comes, writes `output` and goes."""
    one(drafter, context([0], name, 1, scope))
    drafter.observe([Outcome(name, tuple(output), 0, 0)])
    drafter.forget(name)


@pytest.mark.parametrize("shared", [0, 200])
def test_it_keeps_the_protocol(shared: int) -> None:
    check_drafter(lambda: SuffixDrafter(shared), 12, steps=40)


@many
@given(
    text=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    budget=st.builds(Budget, st.integers(0, 6), st.integers(0, 3), st.integers(0, 12)),
    cut=st.integers(0, 40),
)
def test_drafts_are_within_the_budget_and_do_not_depend_on_how_the_text_came(
    text: list[int], budget: Budget, cut: int
) -> None:
    grown = SuffixDrafter()
    if text[:cut]:
        one(grown, context(text[:cut]))
    made = one(grown, context(text), budget)
    assert problem(made, budget, 4, with_probs=False) is None
    assert made == one(SuffixDrafter(), context(text), budget)
    assert made.scores is not None or not len(made)


def test_the_longest_match_wins() -> None:
    assert one(SuffixDrafter(), context([1, 2, 3, 50, 9, 2, 3, 60, 8, 3, 70, 1, 2, 3])).tokens[0] == 50


def test_of_equal_matches_the_most_frequent_continuation_wins() -> None:
    text = [5, 10, 0, 5, 20, 1, 5, 10, 2, 5]
    assert one(SuffixDrafter(), context(text), Budget.chain(1)).tokens == (10,)
    assert one(SuffixDrafter(), context(text), Budget(1, 2, 2)).tokens == (10, 20)


def test_a_long_match_is_followed_further_than_a_short_one() -> None:
    long = one(SuffixDrafter(least=0.3), context([*range(20), 99, *range(10)]), Budget.chain(8))
    short = one(SuffixDrafter(least=0.3), context([*range(20), 99, 9]), Budget.chain(8))
    assert len(long) > len(short) > 0


def test_requests_of_no_scope_learn_nothing_from_each_other() -> None:
    drafter = SuffixDrafter(shared=1000)
    write(drafter, [1, 2, 3, 4], "a", None)
    one(drafter, context([1, 2, 3, 4], "b"))
    assert one(drafter, context([9, 1, 2], "c")) == Draft()
    assert drafter.shared_tokens == 0


def test_a_scope_learns_from_its_own_outputs_only() -> None:
    drafter = SuffixDrafter(shared=1000)
    write(drafter, [1, 2, 3, 4], "a", "us")
    assert one(drafter, context([9, 1, 2], "b", 3, "us")).tokens == (3, 4)
    assert one(drafter, context([9, 1, 2], "c", 3, "them")) == Draft()
    assert one(drafter, context([9, 0], "d", 2, "us")) == Draft(), "prompts are not shared"


def test_without_shared_tokens_a_scope_changes_nothing() -> None:
    drafter = SuffixDrafter()
    write(drafter, [1, 2, 3, 4], "a", "us")
    assert one(drafter, context([9, 1, 2], "b", 3, "us")) == Draft()


def test_shared_tokens_are_bounded_and_the_oldest_go_first() -> None:
    drafter = SuffixDrafter(shared=40)
    for i in range(12):
        write(drafter, [10 * i + j for j in range(8)], f"r{i}", "us")
        assert drafter.shared_tokens <= 40
    known = [i for i in range(12) if len(one(drafter, context([10 * i, 10 * i + 1], f"q{i}", 2, "us")))]
    assert known == list(range(known[0], 12)), "what is kept is the newest"
    assert 2 <= len(known) <= 5


def test_scopes_share_the_bound_and_the_one_longest_unused_goes_first() -> None:
    drafter = SuffixDrafter(shared=40)
    for scope in ("a", "b", "c", "a", "d", "e"):
        write(drafter, range(10), f"r{scope}", scope)
        assert drafter.shared_tokens <= 40
    known = [s for s in "abcde" if len(one(drafter, context([1, 2], f"q{s}", 2, s)))]
    assert known == ["a", "d", "e"]


def test_an_output_longer_than_the_bound_leaves_its_end() -> None:
    drafter = SuffixDrafter(shared=10)
    write(drafter, range(100), "a", "us")
    assert drafter.shared_tokens <= 10
    assert one(drafter, context([96, 97], "b", 2, "us")).tokens[:1] == (98,)
    assert one(drafter, context([1, 2], "c", 2, "us")) == Draft()


def test_a_forgotten_request_leaves_nothing_behind() -> None:
    drafter = SuffixDrafter()
    empty = drafter.bytes
    one(drafter, context([1, 2, 3, 1, 2]))
    assert drafter.bytes > empty
    drafter.forget("r")
    drafter.forget("r")
    assert drafter.bytes == empty
    assert one(drafter, context([3, 4, 5, 6])) == Draft()


def test_another_text_under_a_known_name_is_a_new_text() -> None:
    drafter = SuffixDrafter()
    one(drafter, context([1, 2, 3, 1, 2]))
    assert one(drafter, context([4, 5, 6, 7, 8, 1])) == Draft()
    assert one(drafter, context([4, 1])) == Draft()


@pytest.mark.parametrize("asked", [{"shared": -1}, {"least": 0.0}, {"least": 1.5}])
def test_settings_that_make_no_sense_are_refused(asked: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="suffix"):
        SuffixDrafter(**asked)  # type: ignore[arg-type]  # some are whole numbers


@pytest.mark.parametrize("budget", [Budget.chain(5), Budget(6, 3, 14)], ids=["chain", "tree"])
@pytest.mark.parametrize(
    "asked",
    [
        SamplingParams(max_tokens=80),
        SamplingParams(max_tokens=80, temperature=0.9, seed=3),
        SamplingParams(max_tokens=80, repetition_penalty=1.2, temperature=0.5, seed=4, top_k=5),
    ],
    ids=["greedy", "seed", "penalty"],
)
def test_texts_are_those_of_plain_decoding(asked: SamplingParams, budget: Budget) -> None:
    engine = Engine(
        ToyModel(order=5), SuffixDrafter(500), FixedController(budget), config=EngineConfig(4, 128, 16)
    )
    prompts = [[3, 1, 4, 1, 5], [2, 7, 1], [3, 1, 4], [1]]
    requests = [engine.add(prompt, asked) for prompt in prompts]
    while engine.busy:
        engine.step()
        engine.check()
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.tokens[len(prompt) :] == plain_text(ToyModel(order=5).next_logits, prompt, asked)[0]
    assert sum(request.tally.close().accepted for request in requests) > 20
    assert engine.guard.failures == {}
