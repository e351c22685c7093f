"""Bug reports on n-gram drafting (G of the collection, and its derived cases)."""

from __future__ import annotations

from pathlib import Path

import pytest

import sooner
from sooner.config import Budget
from sooner.core.law import LawParams
from sooner.draft.lookup import LookupDrafter
from sooner.draft.protocol import Context
from sooner.errors import RequestError
from sooner.params import SamplingParams
from sooner.testing import ToyModel
from tests.bugs.harness import KINDS, PROMPT, VOCAB, drafters, engine, generate, greedy, run, text

CIRCLES = 10**6  # an order so high that the next token depends on the last alone: texts go in circles
FORTY = SamplingParams(max_tokens=40)


def guess(tokens: list[int], k: int, longest: int, shortest: int) -> list[int]:
    context = Context("r", tokens, LawParams(), 0, "match")
    [draft] = LookupDrafter(longest, shortest).propose([context], [Budget.chain(k)])
    return list(draft.tokens)


def test_43_the_n_gram_store_of_an_earlier_request_feeds_a_later_one() -> None:
    """A, then B, then A again: texts and counts are those of a fresh drafter each time."""
    a, b = [1, *greedy(ToyModel(40, order=CIRCLES), [1], 60)], [2, *greedy(ToyModel(40, order=CIRCLES), [2], 60)]
    one = engine(LookupDrafter(), ToyModel(40, order=CIRCLES))
    for prompt in (a, b, a):
        request = one.add(prompt, FORTY)
        run(one)
        fresh = generate(LookupDrafter(), prompt, FORTY, ToyModel(40, order=CIRCLES))
        assert text(request) == text(fresh)
        mine, theirs = request.tally.close(), fresh.tally.close()
        assert (mine.drafted, mine.accepted, mine.steps) == (theirs.drafted, theirs.accepted, theirs.steps)
        assert mine.accepted > 0
    assert one.guard.drafter._known == {}  # type: ignore[attr-defined]  # nothing of A or B is left


# The 1-gram, the 2-gram and the 3-gram at the end of this text go on differently where they came before.
HISTORY = [1, 2, 3, 30, 31, 32, 33, 9, 2, 3, 20, 21, 22, 23, 8, 3, 10, 11, 12, 13, 1, 2, 3]


@pytest.mark.parametrize(
    ("shortest", "longest", "expected"),
    [(1, 1, [10, 11, 12]), (2, 2, [20, 21, 22, 23]), (2, 3, [30, 31, 32, 33]), (3, 3, [30, 31, 32, 33])],
)
@pytest.mark.parametrize("cap", [1, 4])
def test_44_settings_ignored_or_wrong_continuation_copied(
    shortest: int, longest: int, expected: list[int], cap: int
) -> None:
    assert guess(HISTORY, cap, longest, shortest) == expected[:cap]


def test_44_of_two_equal_matches_the_later_one_is_copied_and_the_copy_starts_behind_it() -> None:
    assert guess([5, 6, 40, 41, 5, 6, 50, 51, 5, 6], 2, 3, 1) == [50, 51]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 2, 3])
def test_a1_a_prompt_shorter_than_the_n_gram(kind: str, length: int) -> None:
    prompt = PROMPT[:length]
    plain = greedy(ToyModel(VOCAB), prompt, 20)
    assert text(generate(drafters([*prompt, *plain])[kind](), prompt, SamplingParams(max_tokens=20), k=4)) == plain
    assert guess(prompt, 4, 3, 3) == []


def test_a2_the_only_match_is_the_pattern_itself_or_ends_one_token_before_the_end() -> None:
    assert guess([1, 2, 3], 4, 3, 1) == []
    assert guess([4, 7, 7], 1, 1, 1) == [7]
    prompt = [4, 7, 7]
    request = generate(LookupDrafter(), prompt, FORTY, ToyModel(40, order=CIRCLES))
    assert text(request) == greedy(ToyModel(40, order=CIRCLES), prompt, 40)


def test_a3_a_match_goes_on_with_the_end_of_an_earlier_turn() -> None:
    """The prompt holds earlier answers and their ends; what followed those is proposed and never emitted."""
    circle = greedy(ToyModel(40, order=CIRCLES), [1], 80)[40:]
    eos = circle[5]
    prompt = [*circle, *circle[: circle.index(eos) - 2]]
    expected = greedy(ToyModel(40, order=CIRCLES), prompt, 40)
    expected = expected[: expected.index(eos) + 1]
    request = generate(LookupDrafter(), prompt, FORTY, ToyModel(40, order=CIRCLES), k=8, eos_ids=(eos,))
    assert (text(request), request.finish) == (expected, "stop")
    assert request.tally.close().drafted > len(expected), "tokens beyond the end were proposed"


@pytest.mark.parametrize("kind", KINDS)
def test_a4_an_empty_prompt(kind: str) -> None:
    one = engine(drafters(PROMPT)[kind]())
    with pytest.raises(RequestError, match="the prompt is empty"):
        one.add([], FORTY)
    assert not one.busy


@pytest.mark.parametrize("draft", ["none", "lookup", "model"])
@pytest.mark.parametrize("prompt", ["", []])
def test_a4_an_empty_prompt_for_a_model_with_a_tokenizer(tiny: Path, draft: str, prompt: str | list[int]) -> None:
    llm = sooner.LLM(str(tiny), draft=f"model:{tiny}" if draft == "model" else draft, dtype="float32")
    with pytest.raises(RequestError, match="the prompt is empty"):
        list(llm.stream(prompt))
    with pytest.raises(RequestError, match="the prompt is empty"):
        llm.generate([prompt, "the"])  # type: ignore[list-item]  # ids and text
    assert not llm.engine.busy
