"""Prompt lookup: which continuation is copied, held to a search by brute force."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sooner.config import Budget
from sooner.core.law import LawParams
from sooner.core.tree import Draft
from sooner.draft.lookup import LookupDrafter
from sooner.draft.protocol import Context
from sooner.errors import ConfigError

many = settings(max_examples=300, deadline=None, derandomize=True)
texts = st.lists(st.integers(0, 2), min_size=1, max_size=25)
budgets = st.builds(Budget, st.integers(0, 5), st.integers(0, 3), st.integers(0, 9))
sizes = st.tuples(st.integers(1, 4), st.integers(0, 3)).map(lambda pair: (pair[0] + pair[1], pair[0]))


def context(tokens: Sequence[int], name: str = "r") -> Context:
    return Context(name, list(tokens), LawParams(), 0, "match")


def draft(tokens: Sequence[int], budget: Budget, longest: int = 3, shortest: int = 1) -> Draft:
    [made] = LookupDrafter(longest, shortest).propose([context(tokens)], [budget])
    return made


def chain(tokens: Sequence[int], k: int = 4, longest: int = 3, shortest: int = 1) -> list[int]:
    return list(draft(tokens, Budget.chain(k), longest, shortest).tokens)


def by_brute_force(tokens: Sequence[int], budget: Budget, longest: int, shortest: int) -> Draft:
    """Longest n first, the most recent first, every place once; branches until nodes or width run out.

    Where one token is all that matched, three tokens at most are copied.
    """
    places: list[int] = []
    reach: dict[int, int] = {}
    for n in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if list(tokens[end - n : end]) == list(tokens[len(tokens) - n :]) and end not in places:
                places.append(end)
                reach[end] = min(budget.depth, 3) if n == 1 else budget.depth
    nodes: dict[tuple[int, ...], int] = {}
    parents: list[int] = []
    for end in places[: 1 if budget.width == 1 else None] if not budget.empty else []:
        copied = list(tokens[end:])
        while len(copied) < budget.depth:
            copied += copied[: budget.depth]
        for depth in range(1, reach[end] + 1):
            path = tuple(copied[:depth])
            if path in nodes:
                continue
            siblings = sum(known[:-1] == path[:-1] for known in nodes)
            if len(nodes) == budget.nodes or siblings == budget.width:
                break
            parents.append(nodes.get(path[:-1], -1))
            nodes[path] = len(nodes)
    return Draft(tuple(path[-1] for path in nodes), tuple(parents))


@many
@given(tokens=texts, budget=budgets, size=sizes)
def test_the_draft_is_that_of_brute_force(tokens: list[int], budget: Budget, size: tuple[int, int]) -> None:
    assert draft(tokens, budget, *size) == by_brute_force(tokens, budget, *size)


@many
@given(tokens=texts, steps=st.lists(st.integers(1, 4), max_size=8), budget=budgets)
def test_a_growing_text_is_searched_as_if_it_were_new(tokens: list[int], steps: list[int], budget: Budget) -> None:
    drafter = LookupDrafter()
    length = 1
    for step in [0, *steps]:
        length = min(length + step, len(tokens))
        [made] = drafter.propose([context(tokens[:length])], [budget])
        assert made == by_brute_force(tokens[:length], budget, 3, 1)


def test_the_longest_pattern_wins() -> None:
    text = [1, 2, 3, 50, 9, 2, 3, 60, 8, 3, 70, 1, 2, 3]
    assert chain(text, 1, longest=3) == [50]
    assert chain(text, 1, longest=2) == [60]
    assert chain(text, 1, longest=1) == [70]


def test_of_equal_patterns_the_most_recent_wins() -> None:
    assert chain([5, 10, 5, 20, 5, 30, 5], 1) == [30]


def test_further_matches_become_branches() -> None:
    assert draft([5, 10, 5, 20, 5, 30, 5], Budget(1, 3, 3)) == Draft((30, 20, 10), (-1, -1, -1))
    assert draft([5, 10, 5, 20, 5, 30, 5], Budget(1, 2, 3)) == Draft((30, 20), (-1, -1))


def test_branches_share_their_beginning() -> None:
    text = [5, 1, 7, 5, 1, 8, 5]
    assert draft(text, Budget(2, 2, 4)) == Draft((1, 8, 7), (-1, 0, 0))


def test_a_copy_that_reaches_the_end_goes_on_copying_itself() -> None:
    assert chain([1, 2, 1, 2], 6) == [1, 2, 1, 2, 1, 2]
    assert chain([7, 7, 7], 4) == [7, 7, 7, 7]


@pytest.mark.parametrize("k", [1, 2, 5])
def test_no_more_than_the_cap_is_copied(k: int) -> None:
    assert chain([9, 1, 2, 3, 4, 5, 6, 7, 9, 1], k) == [2, 3, 4, 5, 6][:k]


def test_a_match_of_one_token_is_weak_and_copies_little() -> None:
    """Most such guesses fail at once; up to three of them ride along at no cost."""
    text = [1, 2, 3, 4, 5, 6, 7, 1]
    assert chain(text, 8) == [2, 3, 4]
    [longer] = LookupDrafter(weak=5).propose([context(text)], [Budget.chain(8)])
    assert longer.tokens == (2, 3, 4, 5, 6)
    with pytest.raises(ConfigError, match="weak"):
        LookupDrafter(weak=0)


@pytest.mark.parametrize("text", [[1], [1, 2], [1, 2, 3], [3, 1, 2]])
def test_the_pattern_at_the_end_is_no_match_for_itself(text: list[int]) -> None:
    assert chain(text) == []


def test_patterns_shorter_than_the_shortest_are_not_looked_for() -> None:
    assert chain([1, 9, 1], shortest=2) == []
    assert chain([1, 2, 9, 1, 2], shortest=2) == [9, 1, 2, 9]


def test_a_forgotten_request_leaves_nothing_behind() -> None:
    drafter = LookupDrafter()
    drafter.propose([context([1, 2, 1])], [Budget.chain(2)])
    drafter.forget("r")
    drafter.forget("r")
    assert drafter.propose([context([3, 4, 5, 6])], [Budget.chain(2)]) == [Draft()]
    assert not LookupDrafter().propose([], [])


def test_a_shorter_text_under_a_known_name_is_a_new_text() -> None:
    drafter = LookupDrafter()
    drafter.propose([context([1, 2, 3, 1])], [Budget.chain(2)])
    assert drafter.propose([context([4, 1])], [Budget.chain(2)]) == [Draft()]


def test_requests_do_not_copy_from_each_other() -> None:
    drafter = LookupDrafter()
    pair = [context([1, 2, 3, 4], "a"), context([9, 1, 2], "b")]
    assert drafter.propose(pair, [Budget.chain(2)] * 2) == [Draft(), Draft()]


@pytest.mark.parametrize(("longest", "shortest"), [(0, 0), (1, 0), (2, 3), (-1, -1)])
def test_sizes_that_make_no_sense_are_refused(longest: int, shortest: int) -> None:
    with pytest.raises(ConfigError, match="1 <= shortest <= longest"):
        LookupDrafter(longest, shortest)
