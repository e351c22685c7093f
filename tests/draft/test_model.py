"""The model drafter: what it draws, when it stops, and that it keeps up with any text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from sooner.config import Budget, EngineConfig
from sooner.control.fixed import FixedController
from sooner.core import noise
from sooner.core.law import LawParams
from sooner.core.tree import Draft
from sooner.draft.model import ModelDrafter
from sooner.draft.protocol import Context
from sooner.engine.engine import Engine
from sooner.engine.guard import problem
from sooner.errors import ConfigError
from sooner.params import SamplingParams
from sooner.testing import ToyModel
from tests.draft.tables import Table, logits
from tests.engine.plain import choose, law_of, plain_text

GREEDY, WARM = LawParams(), LawParams(temperature=0.8, top_k=9)
VOCAB = 17
TEXT = [3, 1, 4, 1, 5, 9, 2, 6]


def context(tokens: Sequence[int], law: LawParams = GREEDY, rule: str = "match", name: str = "r") -> Context:
    return Context(name, list(tokens), law, 42, rule)  # type: ignore[arg-type]  # a literal


def sure(model: object, vocab: int = VOCAB) -> ModelDrafter:
    """A drafter that never stops for want of confidence."""
    return ModelDrafter(model, vocab, confidence=0.0)  # type: ignore[arg-type]  # any model


def one(drafter: ModelDrafter, wanted: Context, k: int = 4) -> Draft:
    [made] = drafter.propose([wanted], [Budget.chain(k)])
    return made


def params(law: LawParams, seed: int = 42) -> SamplingParams:
    return SamplingParams(temperature=law.temperature, top_k=law.top_k, seed=seed)


def own_text(model: ToyModel, tokens: Sequence[int], k: int, law: LawParams = GREEDY) -> list[int]:
    return plain_text(model.next_logits, tokens, replace(params(law), max_tokens=k))[0]


@pytest.mark.parametrize("law", [GREEDY, WARM], ids=["greedy", "seed"])
def test_under_match_it_draws_what_the_target_would_if_it_were_this_model(law: LawParams) -> None:
    model = ToyModel(VOCAB)
    made = one(sure(model), context(TEXT, law))
    assert list(made.tokens) == own_text(ToyModel(VOCAB), TEXT, 4, law)
    assert made.parents == (-1, 0, 1, 2)
    assert made.probs is None


@pytest.mark.parametrize("rule", ["reject", "block", "traversal"])
def test_under_the_other_rules_it_hands_over_the_law_each_token_was_drawn_from(rule: str) -> None:
    model = ToyModel(VOCAB)
    made = one(sure(model), context(TEXT, WARM, rule))
    assert made.probs is not None
    assert made.probs.shape == (4, VOCAB)
    for i in range(4):
        wanted = law_of(model.next_logits([*TEXT, *made.tokens[:i]]).tolist(), params(WARM))
        assert made.probs[i].tolist() == pytest.approx(wanted, abs=1e-12)
        assert wanted[made.tokens[i]] > 0


def test_under_the_other_rules_its_noise_is_not_the_targets() -> None:
    """With the target's own noise the drafts would agree with the correction to come, and bias the text."""
    table = Table(torch.zeros((VOCAB, VOCAB)))
    flat = LawParams(temperature=1.0)
    same = 0
    for position in range(200):
        made = one(sure(table), context([0] * (position + 1), flat, "reject", f"r{position}"), 1)
        same += made.tokens[0] == choose([0.0] * VOCAB, params(flat), position + 1)
    assert same < 30  # 200 / 17 = 12 by chance; P(30 or more) < 1e-5


def test_a_position_is_drawn_anew_from_another_root() -> None:
    """Or a rejected draw would come back in the next round, and be rejected with knowledge of the first."""
    keys = {noise.key(42, 9, noise.DRAFT, root) for root in range(9)}
    assert len(keys) == 9
    flat = LawParams(temperature=1.0)
    drafter = sure(Table(torch.zeros((VOCAB, VOCAB))))
    again = 0
    for position in range(200):
        first = one(drafter, context([0] * (position + 1), flat, "reject", f"r{position}"), 2)
        second = one(drafter, context([0] * (position + 2), flat, "reject", f"r{position}"), 1)
        again += first.tokens[1] == second.tokens[0]
    assert again < 30


def test_it_stops_after_an_unsure_token_and_still_proposes_it() -> None:
    # After 0 comes 1 for sure, after 1 comes 2 with 0.4: unsure, but drawn.
    table = logits([0.05, 0.9, 0.05], [0.3, 0.3, 0.4], [0.05, 0.9, 0.05])
    made = one(ModelDrafter(Table(table), 3, confidence=0.5), context([0]), 6)
    assert made.tokens == (1, 2)


def test_a_drawn_token_is_never_taken_back() -> None:
    """Token 0 has 0.2, under the confidence of 0.5, and is proposed as often as it is drawn."""
    drafter = ModelDrafter(Table(logits([0.2, 0.8], [0.2, 0.8])), 2, confidence=0.5)
    made = [
        one(drafter, context([0] * n, LawParams(temperature=1.0), "reject", f"r{n}"), 2) for n in range(1, 801)
    ]
    share = sum(draft.tokens[0] == 0 for draft in made) / len(made)
    assert abs(share - 0.2) < 0.06  # more than 4 standard errors
    assert all(len(draft) == (1 if draft.tokens[0] == 0 else 2) for draft in made)


def test_a_long_prompt_is_caught_up_with_in_chunks() -> None:
    model = Table(torch.zeros((VOCAB, VOCAB)))
    one(sure(model), context([1] * 1200), 3)
    assert model.rows == [512, 512, 176, 1, 1]


def test_catching_up_in_chunks_draws_what_a_fresh_model_would() -> None:
    long = [(i * i) % VOCAB for i in range(1100)]
    model = ToyModel(VOCAB)
    assert list(one(sure(model), context(long)).tokens) == own_text(ToyModel(VOCAB), long, 4)


def test_it_follows_the_text_whatever_became_of_its_drafts() -> None:
    """All accepted, none accepted, some rounds left out: each draft is that of a fresh drafter."""
    drafter, text = sure(ToyModel(VOCAB)), list(TEXT)
    for turn in range(12):
        made = one(drafter, context(text))
        assert made == one(sure(ToyModel(VOCAB)), context(text))
        text += [*made.tokens[: turn % 5], turn % VOCAB]
        if turn % 4 == 3:
            text += [1, 2, 3]


@pytest.mark.parametrize("length", range(28, 36))
def test_its_context_may_be_shorter_than_the_targets(length: int) -> None:
    model = ToyModel(VOCAB, context_limit=32)
    tokens = [i % VOCAB for i in range(length)]
    made = one(sure(model), context(tokens), 8)
    # 32 positions hold the text and all drawn tokens but the last.
    assert list(made.tokens) == own_text(ToyModel(VOCAB), tokens, 8)[: max(33 - length, 0)]
    assert all(len(model.lanes.held(lane)) <= 32 for lane in model.lanes._lanes)


@pytest.mark.parametrize("width", [VOCAB - 2, VOCAB + 3], ids=["narrower", "wider"])
@pytest.mark.parametrize("rule", ["match", "reject"])
def test_padding_of_the_vocabulary_is_cut_off_or_filled_up(width: int, rule: str) -> None:
    drafter = sure(ToyModel(width))
    for i in range(30):
        made = one(drafter, context([i % 10, 2, 3], LawParams(temperature=1.5), rule, f"r{i}"))
        assert len(made) == 4
        assert problem(made, Budget.chain(4), VOCAB, with_probs=True) is None
        assert all(token < min(width, VOCAB) for token in made.tokens)


def test_a_prompt_with_ids_it_does_not_know_gets_no_draft_and_disturbs_nobody() -> None:
    drafter = sure(ToyModel(VOCAB - 2))
    strange, known = context([1, VOCAB - 1, 2], name="strange"), context(TEXT, name="known")
    drafts = drafter.propose([strange, known], [Budget.chain(3)] * 2)
    assert [len(draft) for draft in drafts] == [0, 3]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("law", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rule", ["match", "reject"])
def test_broken_logits_end_the_draft_there(bad: float, law: LawParams, rule: str) -> None:
    table = torch.full((VOCAB, VOCAB), -30.0)
    table[torch.arange(VOCAB), (torch.arange(VOCAB) + 1) % VOCAB] = 10.0  # t is followed by t + 1
    table[5, 3] = bad
    made = one(sure(Table(table)), context([3], law, rule), 6)
    assert made.tokens == (4, 5)
    assert problem(made, Budget.chain(6), VOCAB, with_probs=law is WARM and rule == "reject") is None


def test_a_law_without_mass_ends_the_draft() -> None:
    table = torch.full((VOCAB, VOCAB), float("-inf"))
    assert len(one(sure(Table(table)), context([3], WARM, "reject"))) == 0


@pytest.mark.parametrize("budget", [Budget(0, 1, 4), Budget(4, 0, 4), Budget(4, 1, 0)])
def test_an_empty_budget_costs_no_pass(budget: Budget) -> None:
    model = Table(torch.zeros((VOCAB, VOCAB)))
    assert sure(model).propose([context(TEXT)], [budget]) == [Draft()]
    assert model.rows == []
    assert model.lanes.in_use == 0


def test_a_wide_budget_still_gives_a_chain_within_it() -> None:
    [made] = sure(ToyModel(VOCAB)).propose([context(TEXT)], [Budget(6, 3, 5)])
    assert made.parents == (-1, 0, 1, 2, 3)


def test_requests_drawn_together_are_drawn_as_if_alone() -> None:
    laws = [GREEDY, WARM, LawParams(temperature=0.5), LawParams(temperature=1.0, top_p=0.6)]
    wanted = [
        context(TEXT[: 3 + i], law, rule, f"{i}{rule}")
        for i, law in enumerate(laws)
        for rule in ("match", "reject")
    ]
    together = sure(ToyModel(VOCAB)).propose(wanted, [Budget.chain(1 + i % 4) for i in range(len(wanted))])
    for i, (draft, each) in enumerate(zip(together, wanted, strict=True)):
        alone = one(sure(ToyModel(VOCAB)), each, 1 + i % 4)
        assert (draft.tokens, draft.parents) == (alone.tokens, alone.parents)
        assert (draft.probs is None) == (alone.probs is None)
        assert draft.probs is None or torch.allclose(draft.probs, alone.probs, atol=1e-12)  # type: ignore[arg-type]


def test_a_forgotten_request_gives_its_lane_back() -> None:
    model = ToyModel(VOCAB)
    drafter = sure(model)
    first = one(drafter, context(TEXT))
    assert model.lanes.in_use == 1
    drafter.forget("r")
    drafter.forget("r")
    assert model.lanes.in_use == 0
    assert one(drafter, context(TEXT)) == first


@pytest.mark.parametrize("confidence", [-0.1, 1.1, float("nan")])
def test_a_confidence_that_is_no_probability_is_refused(confidence: float) -> None:
    with pytest.raises(ConfigError, match="confidence must be from 0 to 1"):
        ModelDrafter(ToyModel(VOCAB), VOCAB, confidence)


@pytest.mark.parametrize(
    "asked",
    [
        SamplingParams(max_tokens=200),
        SamplingParams(max_tokens=200, temperature=0.8, seed=5),
        SamplingParams(max_tokens=200, temperature=0.8, top_p=0.7, seed=5),
        SamplingParams(max_tokens=200, temperature=0.8, seed=5, rule="reject"),
        SamplingParams(max_tokens=200, temperature=0.8, seed=5, rule="block"),
        SamplingParams(max_tokens=200, temperature=0.8, seed=5, rule="traversal"),
    ],
    ids=["greedy", "seed", "seed and top-p", "reject", "block", "traversal"],
)
@pytest.mark.parametrize("k", [1, 2, 5])
def test_a_model_that_drafts_for_itself_is_always_right(asked: SamplingParams, k: int) -> None:
    engine = Engine(
        ToyModel(VOCAB),
        sure(ToyModel(VOCAB)),
        FixedController(Budget.chain(k)),
        config=EngineConfig(4, 64, 16),
    )
    request = engine.add(TEXT, asked)
    while engine.busy:
        engine.step()
    record = request.tally.close()
    assert record.accepted == record.drafted > 0
    assert record.steps == -(-200 // (k + 1))
    assert engine.guard.failures == {}
