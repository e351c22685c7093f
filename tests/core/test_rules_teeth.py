"""The enumeration has teeth: every biased rule and every lying drafter is caught by it."""

from __future__ import annotations

import pytest

from sooner.core import rules
from sooner.core.tree import ROOT
from tests.core import biased
from tests.core.enumeration import EXACT, Drawn, Guessed, Judge, Make, NotALaw, World, deviation, judge_match

SEEN = 0.01  # total variation that a mistake has to reach in one of the worlds
CHAIN, SIBLINGS, TREE = (ROOT, 0), (ROOT, ROOT), (ROOT, ROOT, 0)


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
def test_a_biased_rule_on_drawn_chains_is_caught(rule: Judge) -> None:
    assert _worst(Drawn(CHAIN), rule) > SEEN


@pytest.mark.parametrize("rule", biased.SIBLING_RULES.values(), ids=biased.SIBLING_RULES)
def test_a_biased_rule_on_drawn_siblings_is_caught(rule: Judge) -> None:
    assert _worst(Drawn(SIBLINGS), rule) > SEEN


@pytest.mark.parametrize("rule", biased.GUESS_RULES.values(), ids=biased.GUESS_RULES)
def test_a_biased_rule_on_guesses_is_caught(rule: Judge) -> None:
    assert _worst(Guessed(TREE), rule) > SEEN


def test_a_traversal_that_shares_out_what_q_has_left_is_caught() -> None:
    """A public variant; on chains and single siblings it is exact, so it takes a tree to see it."""
    assert _worst(Drawn((ROOT, 0, 0)), rules.traversal) < EXACT
    assert _worst(Drawn((ROOT, 0, 0)), biased.traversal_by_q_left) > SEEN


@pytest.mark.parametrize("rule", [rules.reject, rules.traversal])
@pytest.mark.parametrize("make", biased.DRAFTERS.values(), ids=biased.DRAFTERS)
def test_a_drafter_that_lies_about_its_draws_is_caught(make: Make, rule: Judge) -> None:
    assert _worst(make, rule) > SEEN


@pytest.mark.parametrize("make", [biased.drops_unlikely, biased.copies_with_weight])
def test_a_drafter_that_lies_about_its_chains_is_caught_by_block(make: Make) -> None:
    assert _worst(make, rules.block) > SEEN


@pytest.mark.parametrize("make", biased.DRAFTERS.values(), ids=biased.DRAFTERS)
def test_match_does_not_care_how_a_draft_was_drawn(make: Make) -> None:
    """What *match* writes are the target's own choices, so a lie about q cannot bias it."""
    assert _worst(make, judge_match) < EXACT


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("_share", lambda mass, alive: mass),
        ("_share", lambda mass, alive: alive),
        ("_residual", lambda p, draft, child, alive=1.0: p),
    ],
)
@pytest.mark.parametrize("rule", ["block", "traversal"])
def test_a_mistake_in_the_parts_of_block_and_traversal_is_caught(
    monkeypatch: pytest.MonkeyPatch, rule: str, name: str, broken: object
) -> None:
    monkeypatch.setattr(rules, name, broken)
    assert _worst(Drawn(CHAIN), getattr(rules, rule)) > SEEN


def test_a_residual_that_forgets_how_much_is_alive_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """reject always has all of p alive, and does not notice."""
    whole = rules._residual
    monkeypatch.setattr(rules, "_residual", lambda p, draft, child, alive=1.0: whole(p, draft, child))
    assert _worst(Drawn(CHAIN), rules.reject) < EXACT
    assert _worst(Drawn(CHAIN), rules.block) > SEEN
    assert _worst(Drawn(CHAIN), rules.traversal) > SEEN


def test_a_residual_with_negative_weights_is_refused() -> None:
    with pytest.raises(NotALaw, match="a draw from weights"):
        deviation(World(0), Drawn((ROOT,)), biased.no_clamp, 2)
