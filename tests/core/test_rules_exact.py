"""All rules by exact enumeration in float64: every draft, every choice, every text, no sampling."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sooner.core.rules import Chance, Verdict, block, reject, traversal
from sooner.core.tree import ROOT, Draft, depths
from tests.core.enumeration import (
    CHAIN_JUDGES,
    EXACT,
    JUDGES,
    KINDS,
    Drawn,
    Fork,
    Guessed,
    Judge,
    Make,
    Stopping,
    World,
    accepted,
    deviation,
    explore,
    judge_match,
    node_texts,
    written,
)

CHAINS = ((ROOT,), (ROOT, 0), (ROOT, 0, 1))
TREE_2X2 = (ROOT, ROOT, 0, 0, 1, 1)
# Deep on one side, wide on the other; siblings that do not lie together; more siblings than tokens.
TREES = (
    (ROOT, ROOT),
    (ROOT, ROOT, ROOT),
    (ROOT, ROOT, 0),
    (ROOT, ROOT, 1),
    (ROOT, 0, ROOT, 0),
    (ROOT, ROOT, 1, 2),
    (ROOT, 0, 1, ROOT),
    (ROOT, ROOT, ROOT, 0),
    (ROOT, 0, 0, ROOT, 1),
    (ROOT, ROOT, ROOT, ROOT),
)
MAKERS = (Drawn, Guessed)
WORLDS = st.builds(World, st.integers(0, 10_000), st.sampled_from(KINDS))
WITH_ZEROS = st.builds(
    World, st.integers(0, 10_000), st.sampled_from(["sparse", "one-hot p", "one-hot q", "disjoint"])
)
thorough = settings(max_examples=80, deadline=None, derandomize=True, database=None)
brief = settings(max_examples=30, deadline=None, derandomize=True, database=None)

every_rule = pytest.mark.parametrize("judge", JUDGES.values(), ids=JUDGES)
every_chain_rule = pytest.mark.parametrize("judge", CHAIN_JUDGES.values(), ids=CHAIN_JUDGES)


# --- the law of the text ---------------------------------------------------------------------------


@every_chain_rule
@pytest.mark.parametrize("make", MAKERS)
@thorough
@given(world=WORLDS, parents=st.sampled_from(CHAINS))
def test_a_round_over_a_chain_writes_the_targets_joint_law(
    judge: Judge, make: type[Drawn] | type[Guessed], world: World, parents: tuple[int, ...]
) -> None:
    assert deviation(world, make(parents), judge, len(parents) + 1) < EXACT


@every_rule
@pytest.mark.parametrize("make", MAKERS)
@thorough
@given(world=WORLDS, parents=st.sampled_from(TREES))
def test_a_round_over_a_tree_writes_the_targets_joint_law(
    judge: Judge, make: type[Drawn] | type[Guessed], world: World, parents: tuple[int, ...]
) -> None:
    assert deviation(world, make(parents), judge, max(depths(parents)) + 1) < EXACT


@every_rule
@pytest.mark.parametrize("kind", KINDS)
def test_a_round_over_two_by_two_writes_the_targets_joint_law(judge: Judge, kind: str) -> None:
    for seed in range(2):
        for make in MAKERS:
            assert deviation(World(seed, kind), make(TREE_2X2), judge, 3) < EXACT


@every_chain_rule
@brief
@given(world=WORLDS)
def test_stopping_after_an_unlikely_token_does_not_bias(judge: Judge, world: World) -> None:
    assert deviation(world, Stopping(3), judge, 4) < EXACT


@every_chain_rule
def test_an_empty_draft_is_a_draw_from_the_law(judge: Judge) -> None:
    for seed in range(5):
        assert deviation(World(seed, "sparse"), lambda world, chance: Draft(), judge, 1) < EXACT


@brief
@given(world=WORLDS, parents=st.sampled_from(CHAINS + TREES))
def test_drawn_tokens_may_be_judged_as_copies(world: World, parents: tuple[int, ...]) -> None:
    """Whatever chose a node, taking it as a point mass is exact; it may cost acceptance."""

    def judge(laws: Tensor, draft: Draft, chance: Chance) -> Verdict:
        return traversal(laws, Draft(draft.tokens, draft.parents), chance)

    assert deviation(world, Drawn(parents), judge, max(depths(parents)) + 1) < EXACT


@every_chain_rule
@brief
@given(world=WITH_ZEROS)
def test_a_token_without_probability_is_never_written(judge: Judge, world: World) -> None:
    shapes = CHAINS if judge is block else ((ROOT, ROOT, 0), *CHAINS)
    for make in MAKERS:
        for parents in shapes:
            for text in written(world, make(parents), judge):
                assert all(world.p(text[:i])[token] > 0 for i, token in enumerate(text)), text


# --- how much is accepted --------------------------------------------------------------------------


@pytest.mark.parametrize("judge", [reject, block, traversal])
@brief
@given(world=WORLDS)
def test_one_drawn_token_is_accepted_with_one_minus_total_variation(judge: Judge, world: World) -> None:
    overlap = float(torch.minimum(world.p(()), world.q(())).sum())
    assert accepted(world, Drawn((ROOT,)), judge) == pytest.approx(overlap, abs=EXACT)


@every_rule
@brief
@given(world=WORLDS)
def test_guesses_are_accepted_with_their_own_probability(judge: Judge, world: World) -> None:
    """A point-mass guess survives with p(guess), siblings with the sum of theirs."""
    possible = int((world.q(()) > 0).sum())
    likeliest = world.q(()).topk(min(2, possible)).indices
    assert accepted(world, Guessed((ROOT, ROOT)), judge) == pytest.approx(
        float(world.p(())[likeliest].sum()), abs=EXACT
    )


@pytest.mark.parametrize("make", MAKERS)
@thorough
@given(world=WORLDS, parents=st.sampled_from(CHAINS + TREES))
def test_traversal_never_accepts_less_than_reject(
    make: type[Drawn] | type[Guessed], world: World, parents: tuple[int, ...]
) -> None:
    assert accepted(world, make(parents), traversal) >= accepted(world, make(parents), reject) - EXACT


@pytest.mark.parametrize("make", MAKERS)
@brief
@given(world=WORLDS, parents=st.sampled_from(CHAINS))
def test_block_is_traversal_on_a_chain(
    make: type[Drawn] | type[Guessed], world: World, parents: tuple[int, ...]
) -> None:
    left, right = written(world, make(parents), block), written(world, make(parents), traversal)
    for text in left.keys() | right.keys():
        assert left.get(text, 0) == pytest.approx(right.get(text, 0), abs=EXACT)


def test_two_tokens_of_the_papers_example_are_accepted_as_it_says() -> None:
    """p = (1/3, 2/3), q = (2/3, 1/3), two guesses: 10/9 token by token, 11/9 as a block (2403.10444)."""

    class Example(World):
        def _pair(self, text: tuple[int, ...]) -> tuple[Tensor, Tensor]:
            p = torch.tensor([1, 2, 0], dtype=torch.float64) / 3
            return p, p[[1, 0, 2]]

    world, pair = Example(0), Drawn((ROOT, 0))
    assert accepted(world, pair, reject) == pytest.approx(10 / 9, abs=EXACT)
    assert accepted(world, pair, block) == pytest.approx(11 / 9, abs=EXACT)
    assert accepted(world, pair, traversal) == pytest.approx(11 / 9, abs=EXACT)


@pytest.mark.parametrize("judge", [reject, block, traversal])
def test_equal_laws_accept_everything_and_leave_no_way_to_reject(judge: Judge) -> None:
    """Where q is p the residual has no mass: no branch may lead there."""
    world = World(3, "equal")
    lengths = {len(text) for text, mass in written(world, Drawn((ROOT, 0, 1)), judge).items() if mass > EXACT}
    assert lengths == {4}


# --- the enumeration itself ------------------------------------------------------------------------


def test_explore_counts_every_branch_once() -> None:
    law = torch.tensor([0.2, 0.0, 0.8], dtype=torch.float64)
    found = list(explore(lambda fork: (fork.coin(0.25, 1), fork.pick(law, 1))))
    assert [result for _, result in found] == [(True, 0), (True, 2), (False, 0), (False, 2)]
    assert [p for p, _ in found] == pytest.approx([0.05, 0.2, 0.15, 0.6])


def test_node_texts_follow_the_branches() -> None:
    assert node_texts(Draft((2, 1, 0), (ROOT, 0, ROOT))) == [(), (2,), (2, 1), (0,)]


def test_drawn_siblings_carry_the_law_that_was_left() -> None:
    world = World(5)
    q = world.q(())
    for _, draft in explore(lambda fork: Drawn((ROOT, ROOT))(world, fork)):
        assert draft.probs is not None
        left = q.clone()
        left[draft.tokens[0]] = 0
        torch.testing.assert_close(draft.probs, torch.stack([q, left / left.sum()]))
        assert draft.tokens[0] != draft.tokens[1]


def _joint(make: Make) -> dict[tuple[int, ...], float]:
    world = World(5)
    found: dict[tuple[int, ...], float] = {}
    for p, draft in explore(lambda fork: make(world, fork)):
        found[draft.tokens] = found.get(draft.tokens, 0) + p
    return found


def test_all_drafts_together_have_probability_one() -> None:
    for make in (Drawn(TREE_2X2), Stopping(3), Guessed(TREE_2X2)):
        assert sum(_joint(make).values()) == pytest.approx(1, abs=EXACT)


def test_match_writes_its_own_choices_whatever_the_draft() -> None:
    """The draft may even know them: nothing but the picks decides the text."""
    picks = (1, 2, 0, 1)
    for draft in (Draft(), Draft((1, 0), (ROOT, 0)), Draft((0, 1), (ROOT, ROOT)), Draft((1, 2, 0), (ROOT, 0, 1))):
        rows = [picks[len(text)] for text in node_texts(draft)]
        verdict = judge_match(torch.nn.functional.one_hot(torch.tensor(rows), 3).double(), draft, Fork())
        text = (*(draft.tokens[node] for node in verdict.path), verdict.token)
        assert text == picks[: len(text)]
