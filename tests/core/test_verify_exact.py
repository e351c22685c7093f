"""Both rules by exact enumeration in float64: every draft, every choice, every text, no sampling."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sooner.core.tree import ROOT, Draft, depths
from sooner.core.verify import Chance, Verdict, reject
from tests.core import biased
from tests.core.enumeration import (
    EXACT,
    JUDGES,
    KINDS,
    Drawn,
    Guessed,
    Judge,
    Make,
    NotALaw,
    Stopping,
    World,
    accepted,
    deviation,
    explore,
    judge_match,
    node_texts,
    written,
)

CHAINS = {1: (ROOT,), 2: (ROOT, 0), 3: (ROOT, 0, 1)}
TREE_2X2 = (ROOT, ROOT, 0, 0, 1, 1)
# Deep on one side, wide on the other; nodes of one parent that do not lie together.
RAGGED = ((ROOT, 0, ROOT, 0), (ROOT, ROOT, 1, 2), (ROOT, ROOT, ROOT), (ROOT, ROOT, ROOT, 0))
SMALL = [*CHAINS.values(), *RAGGED]

WORLDS = st.builds(World, st.integers(0, 10_000), st.sampled_from(KINDS))


@pytest.mark.parametrize("judge", JUDGES.values(), ids=JUDGES)
@pytest.mark.parametrize("make", [Drawn, Guessed])
@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(world=WORLDS, parents=st.sampled_from(SMALL))
def test_a_round_writes_the_targets_joint_law(
    judge: Judge, make: type[Drawn] | type[Guessed], world: World, parents: tuple[int, ...]
) -> None:
    assert deviation(world, make(parents), judge, max(depths(parents)) + 1) < EXACT


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("judge", JUDGES.values(), ids=JUDGES)
def test_a_tree_of_two_by_two_writes_the_targets_joint_law(judge: Judge, kind: str) -> None:
    for seed in range(2):
        for make in (Drawn(TREE_2X2), Guessed(TREE_2X2)):
            assert deviation(World(seed, kind), make, judge, 3) < EXACT


@pytest.mark.parametrize("judge", JUDGES.values(), ids=JUDGES)
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(world=WORLDS)
def test_stopping_after_an_unlikely_token_does_not_bias(judge: Judge, world: World) -> None:
    assert deviation(world, Stopping(3), judge, 4) < EXACT


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(world=WORLDS, parents=st.sampled_from(SMALL))
def test_drawn_tokens_may_be_judged_as_copies(world: World, parents: tuple[int, ...]) -> None:
    """Whatever chose a node, taking it as a point mass is exact; it may cost acceptance."""

    def judge(laws: Tensor, draft: Draft, chance: Chance) -> Verdict:
        return reject(laws, Draft(draft.tokens, draft.parents), chance)

    assert deviation(world, Drawn(parents), judge, max(depths(parents)) + 1) < EXACT


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(world=WORLDS)
def test_reject_accepts_one_drawn_token_with_one_minus_total_variation(world: World) -> None:
    overlap = float(torch.minimum(world.p(()), world.q(())).sum())
    assert accepted(world, Drawn((ROOT,)), reject) == pytest.approx(overlap, abs=EXACT)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(world=WORLDS)
def test_both_rules_accept_guesses_with_their_own_probability(world: World) -> None:
    """A point-mass guess survives with p(guess), siblings with the sum of theirs."""
    likeliest = world.q(()).topk(2).indices
    mass = float(world.p(())[likeliest[: int((world.q(()) > 0).sum())]].sum())
    for judge in (judge_match, reject):
        assert accepted(world, Guessed((ROOT, ROOT)), judge) == pytest.approx(mass, abs=EXACT)


@pytest.mark.parametrize("judge", JUDGES.values(), ids=JUDGES)
@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 10_000), kind=st.sampled_from(["sparse", "one-hot p", "one-hot q", "disjoint"]))
def test_a_token_without_probability_is_never_written(judge: Judge, seed: int, kind: str) -> None:
    world = World(seed, kind)
    for make in (Drawn((ROOT, ROOT, 0)), Guessed((ROOT, ROOT, 0))):
        for text, mass in written(world, make, judge).items():
            assert mass > 0
            assert all(world.p(text[:i])[token] > 0 for i, token in enumerate(text)), text


def test_equal_laws_accept_everything_and_leave_no_way_to_reject() -> None:
    """Where q is p the residual has no mass: no branch may lead there."""
    world = World(3, "equal")
    lengths = {len(text) for text in written(world, Drawn((ROOT, 0, 1)), reject)}
    assert lengths == {4}


def _worst(make: Make, judge: Judge, worlds: int = 6) -> float:
    """The largest deviation over a few random worlds; infinite if a draw was no draw at all."""
    worst = 0.0
    for seed in range(worlds):
        try:
            worst = max(worst, deviation(World(seed), make, judge, 3))
        except NotALaw:
            return float("inf")
    return worst


@pytest.mark.parametrize("rule", biased.DRAWN_RULES.values(), ids=biased.DRAWN_RULES)
def test_the_checker_catches_a_biased_rule_on_drawn_chains(rule: Judge) -> None:
    assert _worst(Drawn((ROOT, 0)), reject) < EXACT
    assert _worst(Drawn((ROOT, 0)), rule) > 0.01


@pytest.mark.parametrize("rule", biased.SIBLING_RULES.values(), ids=biased.SIBLING_RULES)
def test_the_checker_catches_a_biased_rule_on_drawn_siblings(rule: Judge) -> None:
    assert _worst(Drawn((ROOT, ROOT)), reject) < EXACT
    assert _worst(Drawn((ROOT, ROOT)), rule) > 0.01


@pytest.mark.parametrize("rule", biased.GUESS_RULES.values(), ids=biased.GUESS_RULES)
def test_the_checker_catches_a_biased_rule_on_guesses(rule: Judge) -> None:
    assert _worst(Guessed((ROOT, ROOT, 0)), reject) < EXACT
    assert _worst(Guessed((ROOT, ROOT, 0)), rule) > 0.01


@pytest.mark.parametrize("make", biased.DRAFTERS.values(), ids=biased.DRAFTERS)
def test_the_checker_catches_a_drafter_that_lies_about_its_draws(make: Make) -> None:
    assert _worst(make, reject) > 0.01


def test_the_checker_refuses_a_residual_with_negative_weights() -> None:
    with pytest.raises(NotALaw, match="a draw from weights"):
        deviation(World(0), Drawn((ROOT,)), biased.no_clamp, 2)


@pytest.mark.parametrize("make", biased.DRAFTERS.values(), ids=biased.DRAFTERS)
def test_match_does_not_care_how_a_draft_was_drawn(make: Make) -> None:
    """What *match* writes are the target's own choices, so a lie about q cannot bias it."""
    for seed in range(6):
        assert deviation(World(seed), make, judge_match, 3) < EXACT


def test_explore_counts_every_branch_once() -> None:
    law = torch.tensor([0.2, 0.0, 0.8], dtype=torch.float64)
    found = list(explore(lambda fork: (fork.coin(0.25, 1), fork.pick(law, 1))))
    assert [result for _, result in found] == [(True, 0), (True, 2), (False, 0), (False, 2)]
    assert [p for p, _ in found] == pytest.approx([0.05, 0.2, 0.15, 0.6])


def test_node_texts_follow_the_branches() -> None:
    assert node_texts(Draft((2, 1, 0), (ROOT, 0, ROOT))) == [(), (2,), (2, 1), (0,)]
