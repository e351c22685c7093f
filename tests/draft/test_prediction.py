"""Expected texts: what is copied, how the place is found again after an edit, and that texts stay the same."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sooner
from sooner.config import Budget, EngineConfig
from sooner.control.fixed import FixedController
from sooner.core.law import LawParams
from sooner.core.tree import Draft, follow
from sooner.draft.prediction import Alignment, PredictionDrafter
from sooner.draft.protocol import Context
from sooner.engine.engine import Engine
from sooner.errors import ConfigError
from sooner.params import SamplingParams
from sooner.testing import ToyModel, check_drafter
from tests.engine.plain import plain_text

CHAIN = Budget.chain(4)
PROMPT = [100, 101]


def context(text: Sequence[int], expected: Sequence[int], name: str = "r") -> Context:
    tokens = [*PROMPT, *text]
    return Context(name, tokens, LawParams(), 0, "match", prompt=len(PROMPT), prediction=tuple(expected))


def draft(text: Sequence[int], expected: Sequence[int], budget: Budget = CHAIN) -> Draft:
    [made] = PredictionDrafter().propose([context(text, expected)], [budget])
    return made


def passes(expected: Sequence[int], text: Sequence[int], budget: Budget) -> int:
    """How many passes a text takes."""
    drafter, done, count = PredictionDrafter(), 0, 0
    while done < len(text):
        [made] = drafter.propose([context(text[:done], expected)], [budget])
        done += len(follow(made, text[done:])) + 1
        count += 1
    return count


def test_it_begins_at_the_beginning_and_goes_on_where_the_text_is() -> None:
    assert draft([], [1, 2, 3, 4, 5, 6]).tokens == (1, 2, 3, 4)
    assert draft([1, 2, 3, 4], [1, 2, 3, 4, 5, 6]).tokens == (5, 6)
    assert draft([1, 2], [1, 2]) == Draft()
    assert draft([1], []) == Draft()


@pytest.mark.parametrize(
    ("text", "follows"),
    [
        ([1, 2, 9], [4, 5]),  # 9 for 3
        ([1, 2, 9, 4], [5, 6]),
        ([1, 2, 9, 3], [4, 5]),  # 9 put in before 3
        ([1, 2, 5], [6, 7]),  # 3 and 4 left out
        ([1, 2, 9, 8, 5], [6, 7]),  # two for two
        ([9, 8, 7, 1, 2], [3, 4]),  # a new beginning
        ([6, 7, 1, 2, 3], [4, 5]),  # a part that was moved
    ],
)
def test_after_an_edit_the_place_is_found_again(text: list[int], follows: list[int]) -> None:
    assert list(draft(text, [1, 2, 3, 4, 5, 6, 7, 8], Budget.chain(2)).tokens) == follows


def test_a_wide_budget_bets_on_a_replaced_and_on_an_inserted_token() -> None:
    assert draft([1, 2, 9], [1, 2, 3, 4, 5], Budget(2, 2, 4)) == Draft((4, 5, 3, 4), (-1, 0, -1, 2))


def test_of_places_that_fit_equally_the_nearest_is_taken() -> None:
    expected = [7, 8, 20, 1, 2, 3, 7, 8, 21, 4, 7, 8, 22]
    assert draft([7, 8, 20, 1, 2, 9, 9, 7, 8], expected, Budget.chain(1)).tokens == (21,)


def test_a_longer_match_far_away_is_better_than_one_token_near_by() -> None:
    expected = [1, 2, 3, 4, 5, 30, 31, 32, 33, 34]
    assert draft([1, 2, 30, 31, 32], expected, Budget.chain(2)).tokens == (33, 34)


@pytest.mark.parametrize("seed", range(20))
def test_every_edit_costs_a_few_passes_only(seed: int) -> None:
    """200 tokens with six edits of up to three tokens, in an alphabet as wide as that of a language's words."""
    draw = random.Random(seed)
    expected = [draw.randrange(60) for _ in range(200)]
    text = list(expected)
    for _ in range(6):
        at, size = draw.randrange(190), draw.randint(1, 3)
        kind = draw.choice(["replace", "insert", "delete"])
        new = [draw.randrange(60, 90) for _ in range(size)]
        text[at : at + (0 if kind == "insert" else size)] = [] if kind == "delete" else new
    plain = -(-len(text) // 9)
    assert passes(expected, text, Budget.chain(8)) <= plain + 6 * 5
    assert passes(expected, expected, Budget.chain(8)) == -(-200 // 9)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    expected=st.lists(st.integers(0, 3), max_size=20),
    text=st.lists(st.integers(0, 3), max_size=20),
    cuts=st.lists(st.integers(0, 20), max_size=4),
)
def test_the_place_depends_on_the_text_alone(expected: list[int], text: list[int], cuts: list[int]) -> None:
    """However many tokens a pass brought; and no place is beyond the end or named twice."""
    alignment = Alignment(expected)
    done = 0
    for cut in [*sorted(cuts), len(text)]:
        alignment.learn(text[done:cut])
        done = max(done, min(cut, len(text)))
    whole = Alignment(expected)
    whole.learn(text)
    assert alignment.places() == whole.places()
    assert len(set(whole.places())) == len(whole.places())
    assert all(0 <= place < len(expected) for place in whole.places())


def test_requests_have_places_of_their_own_and_leave_nothing_behind() -> None:
    drafter = PredictionDrafter()
    both = [context([1, 2], [1, 2, 3, 4], "a"), context([], [5, 6], "b"), context([1], [], "c")]
    assert [d.tokens for d in drafter.propose(both, [CHAIN] * 3)] == [(3, 4), (5, 6), ()]
    drafter.forget("a")
    drafter.forget("a")
    [again] = drafter.propose([context([], [8, 9], "a")], [CHAIN])
    assert again.tokens == (8, 9)
    [shorter] = drafter.propose([context([], [5, 6], "b")], [CHAIN])
    assert shorter.tokens == (5, 6)


def test_it_keeps_the_protocol() -> None:
    class Expecting(PredictionDrafter):
        """Every request expects the same text."""

        def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
            hoped = tuple(range(12)) * 4
            made = [Context(c.request_id, c.tokens, c.law, c.seed, c.rule, prediction=hoped) for c in contexts]
            return super().propose(made, budgets)

    check_drafter(PredictionDrafter, 12)
    check_drafter(Expecting, 12, steps=40)


ASKED = [
    SamplingParams(max_tokens=60),
    SamplingParams(max_tokens=60, temperature=0.9, seed=3),
    SamplingParams(max_tokens=60, temperature=0.7, repetition_penalty=1.2, seed=4),
]


@pytest.mark.parametrize("asked", ASKED, ids=["greedy", "seed", "penalty"])
@pytest.mark.parametrize("budget", [Budget.chain(6), Budget(6, 3, 12)], ids=["chain", "tree"])
@pytest.mark.parametrize("wrong", [0, 3, 10])
def test_texts_are_those_of_plain_decoding_however_wrong_the_prediction(
    asked: SamplingParams, budget: Budget, wrong: int
) -> None:
    prompts = [[3, 1, 4, 1, 5], [2, 7], [1]]
    plain = [plain_text(ToyModel().next_logits, prompt, asked)[0] for prompt in prompts]
    engine = Engine(ToyModel(), PredictionDrafter(), FixedController(budget), config=EngineConfig(3, 96, 16))
    requests = []
    for prompt, text in zip(prompts, plain, strict=True):
        hoped = [(token + 1) % 17 if wrong and i % 20 < wrong else token for i, token in enumerate(text)]
        requests.append(engine.add(prompt, SamplingParams(**{**_kept(asked), "prediction": hoped})))
    while engine.busy:
        engine.step()
        engine.check()
    for request, text in zip(requests, plain, strict=True):
        assert request.tokens[len(request.prompt) :] == text
        if not wrong:
            assert request.tally.close().steps == -(-60 // 7)
    assert engine.guard.failures == {}


def _kept(params: SamplingParams) -> dict[str, object]:
    return {name: getattr(params, name) for name in ("max_tokens", "temperature", "seed", "repetition_penalty")}


def test_a_prediction_as_text_is_encoded_by_the_targets_tokenizer(tiny: Path) -> None:
    llm = sooner.LLM(str(tiny), draft="prediction", dtype="float32", k=8)
    plain = llm.generate("once upon a time", SamplingParams(max_tokens=40))
    assert plain.stats.drafted == 0
    ids = SamplingParams(max_tokens=40, prediction=plain.token_ids)
    assert llm.generate("once upon a time", ids).stats.steps == -(-40 // 9)
    text = SamplingParams(max_tokens=40, prediction=plain.text)
    made = llm.generate("once upon a time", text)
    assert made.token_ids == plain.token_ids
    assert made.stats.drafted > 0


def test_predictions_that_cannot_be_used_are_refused_by_name() -> None:
    engine = Engine(ToyModel(), PredictionDrafter(), FixedController(CHAIN))
    with pytest.raises(ConfigError, match=r"prediction \[17\] are not ids from 0 to 16"):
        engine.add([1], SamplingParams(prediction=[3, 17]))  # type: ignore[arg-type]  # a list becomes a tuple
    with pytest.raises(ConfigError, match="a prediction as text needs a tokenizer"):
        engine.add([1], SamplingParams(prediction="text"))
    assert not engine.busy
