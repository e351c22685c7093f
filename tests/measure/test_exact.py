"""Verifying: equal texts pass, near-ties are told from mistakes, and an injected fault is called a bug."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sooner.core import noise
from sooner.core.step import Step
from sooner.errors import ConfigError
from sooner.llm import LLM
from sooner.measure import exact
from sooner.measure.exact import Divergence, Setup, Verdict, margin_between, verify
from sooner.measure.prompts import PROMPTS
from sooner.measure.workload import Question
from sooner.model.load import load
from sooner.model.protocol import Output
from sooner.params import SamplingParams
from sooner.testing import ShiftedModel

TEXTS = ("the library, the library", "several tokens, several", "the end of the text ends", "once upon a time")
QUESTIONS = [Question(i, "qa", (text,)) for i, text in enumerate(TEXTS)]


def setup(tiny: Path, **changes: Any) -> Setup:
    given = {"model": str(tiny), "drafts": ("lookup",), "max_tokens": 30, "dtype": "float32", **changes}
    return Setup(**given)


def test_texts_of_every_drafter_pass_greedy_and_sampled_alone_and_in_a_batch(tiny: Path) -> None:
    for batch, width in ((1, 1), (3, 3)):
        told: list[int] = []
        asked = setup(tiny, drafts=("lookup", f"model:{tiny}"), batch=batch, width=width)
        found = verify(asked, QUESTIONS, told.append)
        assert found.word == "PASS"
        runs = [(one.draft, one.mode, one.texts, one.identical, one.word) for one in found.outcomes]
        assert runs == [
            (draft, mode, 4, 4, "PASS") for draft in ("lookup", f"model:{tiny}") for mode in ("greedy", "sampled")
        ]
        assert all(one.tokens == 120 and one.steps < 120 for one in found.outcomes)
        assert sum(told) == exact.texts(asked, 4) == 24
        assert (found.noise.tree is None) == (width == 1)


def test_a_shifted_position_is_reported_as_a_bug_in_rows_and_in_texts(tiny: Path) -> None:
    found = verify(setup(tiny, drafts=(f"model:{tiny}",), inject_fault=True), QUESTIONS)
    assert found.word == "BUG"
    assert found.noise.broken
    parted = [divergence for outcome in found.outcomes for divergence in outcome.divergences]
    assert any(one.word == "BUG" and one.margin is not None and one.margin > one.bound for one in parted)
    # Even where every text came out the same, rows like these are a bug.
    assert Verdict((), found.noise, "cpu").word == "BUG"


def test_a_divergence_has_the_place_the_tokens_and_the_plain_margin(tiny: Path) -> None:
    found = verify(setup(tiny, drafts=(f"model:{tiny}",), inject_fault=True), QUESTIONS)
    llm = LLM(str(tiny), "none", dtype="float32")
    checked = 0
    for outcome in found.outcomes:
        for one in outcome.divergences:
            prompt = llm.encode_chat(QUESTIONS[int(one.question_id)].turns[0])
            sampling = {"temperature": 1.0, "seed": 0} if one.mode == "sampled" else {}
            plain = llm.generate(prompt, SamplingParams(max_tokens=30, **sampling))  # type: ignore[arg-type]
            assert plain.token_ids[one.position] == one.expected != one.got
            assert one.margin is not None
            assert one.margin > 0  # the plain path prefers its own token, by logits or with the noise
            checked += 1
    assert checked >= 3


def test_noise_below_the_bound_is_a_near_tie_not_a_bug(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Trembling(ShiftedModel):
        """Rows of drafts in bfloat16 with their last bits shaken."""

        def forward(self, step: Step, *, rows: Tensor, taps: Sequence[int] = ()) -> Output:
            out = self._model.forward(step, rows=rows, taps=taps)
            if not any(len(segment.draft) for segment in step.segments):
                return out
            generator = torch.Generator().manual_seed(int(step.positions[0]))
            shaken = torch.rand(out.logits.shape, generator=generator) * 2 - 1
            return replace(out, logits=out.logits.float() + 0.05 * shaken)

    monkeypatch.setattr(exact, "ShiftedModel", Trembling)
    asked = setup(tiny, drafts=(f"model:{tiny}",), dtype="bfloat16", inject_fault=True, max_tokens=60)
    found = verify(asked, [*QUESTIONS, *(replace(q, turns=(q.turns[0] + "!",)) for q in QUESTIONS)])
    parted = [divergence for outcome in found.outcomes for divergence in outcome.divergences]
    assert parted
    assert {one.word for one in parted} == {"NUMERIC"}
    assert found.word == "NUMERIC"
    assert 0 < found.noise.measured <= found.noise.bound / 2


@pytest.mark.parametrize(
    ("margin", "bound", "word"),
    [(0.05, 0.1, "NUMERIC"), (0.1, 0.1, "NUMERIC"), (0.11, 0.1, "BUG"), (-0.2, 0.1, "BUG"), (None, 0.1, "BUG")],
)
def test_a_margin_above_the_bound_or_none_at_all_is_a_bug(margin: float | None, bound: float, word: str) -> None:
    assert Divergence(1, "lookup", "greedy", 3, 5, 6, ("a", "b"), margin, bound).word == word


def test_a_sampled_margin_is_what_the_draw_itself_is_decided_by() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(1)).float()
    for position in range(20):
        probs = (logits / 0.7).softmax(-1)
        won = int(noise.race(probs[None], [noise.key(9, position, noise.TARGET)])[0])
        margins = [margin_between(logits, won, other, position, 0.7, 9) for other in range(50) if other != won]
        assert min(margins) > 0
        # Lifting the closest rival by a little more than its margin swaps the two.
        rival = margins.index(min(margins))
        rival += rival >= won
        lifted = logits.clone()
        lifted[rival] += 0.7 * (min(margins) + 1e-4)
        assert (
            int(noise.race((lifted / 0.7).softmax(-1)[None], [noise.key(9, position, noise.TARGET)])[0]) == rival
        )


def test_a_greedy_margin_is_the_difference_of_the_logits() -> None:
    assert margin_between(torch.tensor([1.0, 3.5, 3.0]), 1, 2, 7, None, 0) == 0.5


def test_the_prompts_of_our_own_are_distinct_and_fit_a_small_context(tiny: Path) -> None:
    assert len({question.turns for question in PROMPTS}) == len({q.question_id for q in PROMPTS}) == len(PROMPTS)
    tokenizer = load(str(tiny)).tokenizer
    assert all(len(tokenizer(question.turns[0])["input_ids"]) < 1024 for question in PROMPTS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"temperature": -1.0}, "temperature must be a finite number"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"seed": -1}, "seed must be"),
        ({"drafts": ("lookup", "lookup")}, "draft 'lookup' is named 2 times"),
        ({"drafts": ("none",)}, "draft 'none' is plain decoding itself"),
    ],
)
def test_a_setup_that_makes_no_sense_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Setup(**{"model": "m", "drafts": ("lookup",), **changes})
