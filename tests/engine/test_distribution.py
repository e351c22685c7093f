"""What the whole engine samples has the target's exact law, by every rule, with every kind of draft.

Every request has a seed of its own, 0 to n - 1, so a test passes for good or fails for good. The exact laws
are transformers' own (see sampling.py). Each case draws more than 20,000 tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sooner.config import Budget
from sooner.core import verify as verify_module
from sooner.core.rules import block, reject, traversal
from sooner.draft.lookup import LookupDrafter
from sooner.draft.model import ModelDrafter
from sooner.draft.none import NoDrafter
from sooner.draft.protocol import Drafter
from sooner.params import Rule, SamplingParams
from tests.core import biased
from tests.core.enumeration import Judge
from tests.core.goodness import LIMIT, chi_square
from tests.engine.sampling import (
    FLOOR,
    PLAIN,
    PROMPT,
    SHARP,
    VOCAB,
    Twin,
    counts,
    drawn_tree,
    guessed_tree,
    serve,
    twin,
    written,
)

SHAPES = (PLAIN, SHARP, FLOOR)
LENGTH = 3
REQUESTS = 6_900  # by LENGTH tokens, a third for each of SHAPES
CHAIN, TREE = Budget.chain(2), Budget(depth=2, width=2, nodes=6)


@pytest.fixture
def target() -> Twin:
    return twin(1)


@pytest.fixture(scope="module")
def joints() -> list[Tensor]:
    """Exact probabilities of all texts of LENGTH tokens, for each of SHAPES."""
    target = twin(1)
    return [target.joint(PROMPT, params, LENGTH) for params in SHAPES]


def _model() -> Drafter:
    return ModelDrafter(twin(2).model, VOCAB, confidence=0.25)


DRAFTERS: dict[str, tuple[Callable[[], Drafter], Budget]] = {
    "none": (NoDrafter, CHAIN),
    "lookup": (LookupDrafter, CHAIN),
    "model": (_model, CHAIN),
    "drawn tree": (lambda: drawn_tree(2), TREE),
    "guessed tree": (lambda: guessed_tree(2), TREE),
}
CASES: list[tuple[str, Rule]] = [
    ("none", "match"),
    ("none", "reject"),
    ("lookup", "reject"),
    ("model", "reject"),
    ("model", "block"),
    ("drawn tree", "reject"),
    ("drawn tree", "traversal"),
    ("guessed tree", "traversal"),
]


def _sample(target: Twin, name: str, rule: Rule, requests: int = REQUESTS) -> list[list[list[int]]]:
    """Texts for each of SHAPES, all written in the same batches."""
    make, budget = DRAFTERS[name]
    wanted = [replace(SHAPES[s % 3], seed=s, rule=rule, max_tokens=LENGTH) for s in range(requests)]
    done = serve(target.model, make(), budget, wanted)
    drafted = sum(request.tally.close().drafted for request in done)
    assert (drafted > requests) == (name != "none")
    texts = [written(request) for request in done]
    return [texts[s::3] for s in range(3)]


def _fits(texts: Sequence[Sequence[Sequence[int]]], joints: Sequence[Tensor]) -> list[float]:
    """p-values for each of SHAPES, of the first token, the first two, and all three."""
    return [
        chi_square(counts(own, length), joint.sum(list(range(length, LENGTH))) if length < LENGTH else joint)
        for own, joint in zip(texts, joints, strict=True)
        for length in range(1, LENGTH + 1)
    ]


@pytest.mark.parametrize(("name", "rule"), CASES)
def test_texts_have_the_exact_law(target: Twin, joints: list[Tensor], name: str, rule: Rule) -> None:
    """Joint law of three tokens; plain, truncated and min-p requests share every pass."""
    fits = _fits(_sample(target, name, rule), joints)
    assert min(fits) > LIMIT, fits


@pytest.mark.parametrize("name", ["lookup", "model", "drawn tree", "guessed tree"])
def test_match_writes_the_very_tokens_of_plain_sampling(target: Twin, name: str) -> None:
    """So one chi-square, that of no drafter, is enough for this rule."""
    texts = _sample(target, name, "match", 600)
    assert texts == _sample(target, "none", "match", 600)


def test_the_laws_that_are_tested_are_neither_flat_nor_one_hot(joints: list[Tensor]) -> None:
    """A test on a flat or a one-hot law would have nothing to see."""
    for joint in joints:
        first = joint.sum((1, 2))
        assert 0.2 < float(first.max()) < 0.8
        assert float((joint - joint[..., :1].mean()).abs().max()) > 0.01
        assert float((joint / joint.sum(-1, keepdim=True).clamp(min=1e-9)).std((0, 1)).max()) > 0.03
    assert all(bool((joint == 0).any()) for joint in joints[1:])


@pytest.mark.parametrize(
    ("name", "rule", "wrong"),
    [
        ("model", "reject", biased.hot_q),
        ("drawn tree", "reject", biased.plain_residual),
        ("guessed tree", "traversal", biased.accepts_all),
        ("model", "block", biased.bonus_from_root),
    ],
)
def test_a_biased_rule_in_the_engine_fails_the_same_chi_square(
    monkeypatch: pytest.MonkeyPatch, target: Twin, joints: list[Tensor], name: str, rule: Rule, wrong: Judge
) -> None:
    right = {"reject": reject, "block": block, "traversal": traversal}[rule]
    assert getattr(verify_module, rule) is right
    monkeypatch.setattr(verify_module, rule, wrong)
    monkeypatch.setattr(verify_module, "sparse", lambda *_: None)  # the wrong rules are written for tables
    texts = _sample(target, name, rule, REQUESTS // 3)
    fits = []
    for own, joint in zip(texts, joints, strict=True):
        try:
            fits.append(chi_square(counts(own, 2), joint.sum(2)))
        except AssertionError:  # a token without probability was written
            fits.append(0.0)
    assert min(fits) < LIMIT, fits


def test_a_drafter_that_lies_about_its_law_fails_the_same_chi_square(target: Twin, joints: list[Tensor]) -> None:
    """bugs.md case 17: tokens drawn by one law and judged by another."""
    drafter = drawn_tree(2)
    honest = drafter._script

    def script(context: object, budget: Budget) -> object:
        draft = honest(context, budget)  # type: ignore[arg-type]
        return replace(draft, probs=draft.probs.sqrt() / draft.probs.sqrt().sum(-1, keepdim=True))  # type: ignore[union-attr]

    drafter._script = script  # type: ignore[assignment]
    wanted = [replace(PLAIN, seed=s, rule="reject", max_tokens=2) for s in range(REQUESTS // 3)]
    texts = [written(request) for request in serve(target.model, drafter, TREE, wanted)]
    assert chi_square(counts(texts, 2), joints[0].sum(2)) < LIMIT


# --- the three roles a token can have (bugs.md case 18) --------------------------------------------

ROLE_SHAPES = (
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=1.7),
    SamplingParams(temperature=1.0, top_k=2),
    SamplingParams(temperature=1.0, top_p=0.5),
    SamplingParams(temperature=1.0, min_p=0.3),
    SamplingParams(temperature=0.8, top_k=6, top_p=0.9, min_p=0.1),
)


@pytest.mark.parametrize("rule", ["match", "reject"])
def test_accepted_tokens_corrections_and_bonuses_each_have_their_exact_law(target: Twin, rule: Rule) -> None:
    """One token is drawn from the uniform law and judged: sampling parameters must reach the accepted
    guesses, the corrections and the bonus tokens alike."""
    each = 1_200
    drafter = drawn_tree(1, uniform=True)
    wanted = [replace(ROLE_SHAPES[s % 6], seed=s, rule=rule, max_tokens=2) for s in range(6 * each)]
    done = serve(target.model, drafter, Budget.chain(1), wanted)
    first = {outcome.request_id: outcome for outcome in drafter.outcomes if outcome.drafted}
    assert len(first) == len(done)
    q = torch.full((VOCAB,), 1 / VOCAB, dtype=torch.float64)
    for s, params in enumerate(ROLE_SHAPES):
        rounds = [first[request.id].tokens for request in done[s::6]]
        after = [written(request) for request in done[s::6]]
        joint = target.joint(PROMPT, params, 2)
        p = joint.sum(1)
        taken = torch.minimum(p, q) if rule == "reject" else p * q
        left = p - taken
        share = float(taken.sum())
        whole = [text for text in rounds if len(text) == 2]  # accepted guess, bonus
        assert chi_square(torch.tensor([len(whole), each - len(whole)]), torch.tensor([share, 1 - share])) > LIMIT
        with_bonus = joint * (taken / p.clamp(min=1e-300))[:, None]
        assert chi_square(counts(whole, 2), with_bonus / share) > LIMIT, params
        corrected = [text for text, r in zip(after, rounds, strict=True) if len(r) == 1]
        with_next = joint * (left / p.clamp(min=1e-300))[:, None]
        assert chi_square(counts(corrected, 2), with_next / (1 - share)) > LIMIT, params
