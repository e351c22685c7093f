"""Seeds: the same one writes the same text in any company, different ones do not, none is like any other.

Case 55 of the reference list of bug reports, and what it takes to keep that promise.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from sooner.config import Budget
from sooner.control.fixed import FixedController
from sooner.core.edit import LawParams
from sooner.draft.model import ModelDrafter
from sooner.draft.none import NoDrafter
from sooner.draft.protocol import Drafter
from sooner.engine.engine import Engine
from sooner.params import SamplingParams
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
    seeds,
    serve,
    texts,
    twin,
    written,
)


@pytest.fixture
def target() -> Twin:
    return twin(1)


def _fresh_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests without a seed get 10**6, 10**6 + 1, ... in place of fresh randomness."""
    following = itertools.count(10**6)
    monkeypatch.setattr("sooner.engine.request.secrets.randbelow", lambda most: next(following))


@pytest.mark.parametrize("params", [PLAIN, SHARP, FLOOR], ids=["plain", "sharp", "floor"])
def test_case_55_a_seed_fixes_the_text_whatever_drafter_k_and_neighbours(
    target: Twin, params: SamplingParams
) -> None:
    wanted = [replace(params, seed=s, max_tokens=10) for s in (0, 1, 2**40, 2**63 - 1)]
    plain = texts(target.model, NoDrafter(), Budget.chain(1), wanted)
    assert len({tuple(text) for text in plain}) > 1
    assert texts(target.model, NoDrafter(), Budget.chain(1), wanted) == plain
    for k, make in itertools.product((1, 3, 7), (_self_draft, _other_draft, lambda: guessed_tree(1))):
        assert texts(target.model, make(), Budget.chain(k), wanted) == plain
    crowd = [own for pair in zip(wanted, seeds(PLAIN, 4, max_tokens=7), strict=True) for own in pair]
    assert texts(target.model, drawn_tree(2), Budget(2, 2, 6), crowd)[::2] == plain


def _self_draft() -> Drafter:
    return ModelDrafter(twin(1).model, VOCAB)


def _other_draft() -> Drafter:
    return ModelDrafter(twin(2).model, VOCAB, confidence=0.0)


def test_case_55_different_seeds_write_different_texts(target: Twin) -> None:
    found = texts(target.model, NoDrafter(), Budget.chain(1), seeds(PLAIN, 60, max_tokens=12))
    assert len({tuple(text) for text in found}) == 60


def test_case_55_an_unseeded_neighbour_neither_disturbs_nor_is_disturbed(
    monkeypatch: pytest.MonkeyPatch, target: Twin
) -> None:
    """In a batch of seed 1, no seed, seed 2 the unseeded row repeated one token again and again."""
    _fresh_seeds(monkeypatch)
    joint = target.joint(PROMPT, PLAIN, 2)
    wanted = [replace(PLAIN, seed=seed, max_tokens=3) for _ in range(1_200) for seed in (1, None, 2)]
    found = texts(target.model, drawn_tree(2), Budget(2, 2, 6), wanted)
    alone = texts(target.model, NoDrafter(), Budget.chain(1), wanted[:3])
    assert all(text == alone[0] for text in found[::3])
    assert all(text == alone[2] for text in found[2::3])
    assert chi_square(counts(found[1::3], 2), joint) > LIMIT


def test_case_55_requests_without_a_seed_differ_and_never_share_one(target: Twin) -> None:
    wanted = [replace(PLAIN, max_tokens=12)] * 20
    done = serve(target.model, NoDrafter(), Budget.chain(1), wanted)
    assert len({request.seed for request in done}) == 20
    assert len({tuple(written(request)) for request in done}) == 20


def test_laws_of_parameters_reach_the_engine_unchanged(target: Twin) -> None:
    """SamplingParams and LawParams agree on what every field means; -1 and 0 both mean all for top_k."""
    engine = Engine(target.model, NoDrafter(), FixedController(Budget.chain(1)))
    params = SamplingParams(temperature=0.6, top_k=-1, top_p=0.9, min_p=0.05, typical_p=0.8)
    assert engine.add(PROMPT, params).law == LawParams(0.6, 0, 0.9, 0.05, 0.8)
