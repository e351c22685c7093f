"""Sources: the longest match in the request's own text; the drafts of another drafter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sooner.config import Budget
from sooner.core.edit import LawParams
from sooner.core.tree import Draft
from sooner.draft.protocol import Context, Outcome
from sooner.draft.source import REACH
from sooner.draft.sources import DraftSource, LookupSource
from sooner.testing import ScriptedDrafter

texts = st.lists(st.integers(0, 2), min_size=1, max_size=25)


def context(tokens: Sequence[int], name: str = "r") -> Context:
    return Context(name, list(tokens), LawParams(), 0, "match")


def by_brute_force(tokens: list[int], tail: tuple[int, ...]) -> list[tuple[int, int]]:
    """The token after the last earlier place of the longest end of `tail`, with the length of that end."""
    for size in range(len(tail), 0, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tuple(tokens[end - size : end]) == tail[-size:]:
                return [(tokens[end], size)]
    return []


@settings(max_examples=300, deadline=None, derandomize=True)
@given(tokens=texts, steps=st.lists(st.integers(1, 4), max_size=6), path=st.lists(st.integers(0, 2), max_size=5))
def test_lookup_finds_what_brute_force_finds(tokens: list[int], steps: list[int], path: list[int]) -> None:
    source, length = LookupSource(), 1
    for step in [0, *steps]:
        length = min(length + step, len(tokens))
        known = tokens[:length]
        source.begin([context(known)], [Budget.chain(1)])
        tail = tuple([*known, *path][-REACH:])
        assert list(source.after("r", tuple(path), tail)) == by_brute_force(known, tail)


def test_lookup_forgets_and_takes_a_shorter_text_for_a_new_one() -> None:
    source = LookupSource()
    for again in ("forget", "shorter"):
        source.begin([context([1, 2, 3, 1], again)], [Budget.chain(1)])
        assert source.after(again, (), (1,)) == ((2, 1),)
        if again == "forget":
            source.forget(again)
            source.forget(again)
        source.begin([context([7, 1], again)], [Budget.chain(1)])
        assert source.after(again, (), (7, 1)) == ()


def test_a_drafters_nodes_are_offered_where_they_hang() -> None:
    draft = Draft((5, 6, 7, 8), (-1, 0, -1, 0), None, (0.9, 0.5, 0.1, 0.3))
    source = DraftSource(ScriptedDrafter(lambda context, budget: draft))
    source.begin([context([1, 2])], [Budget(2, 2, 4)])
    assert [token for token, _ in source.after("r", (), (1, 2))] == [5, 7]
    assert [token for token, _ in source.after("r", (5,), (1, 2, 5))] == [6, 8]
    assert source.after("r", (7,), (1, 2, 7)) == ()
    codes = [code for path in ((), (5,)) for _, code in source.after("r", path, ())]
    assert len(set(codes)) == 4
    worth = [source.priors[code] for code in codes]
    assert worth[0] > worth[1]
    assert worth[2] > worth[3]
    assert all(0 <= code < len(source.priors) for code in codes)


def test_nodes_without_scores_are_told_apart_by_rank() -> None:
    source = DraftSource(ScriptedDrafter(lambda context, budget: Draft((5, 6, 7), (-1, -1, 0))))
    source.begin([context([1])], [Budget(2, 2, 4)])
    (_, first), (_, second) = source.after("r", (), (1,))
    [(_, deeper)] = source.after("r", (5,), (1, 5))
    assert first == deeper != second


def test_a_drafter_sees_its_own_taps_only() -> None:
    drafter = ScriptedDrafter(lambda context, budget: Draft())
    drafter.taps = (3,)
    source = DraftSource(drafter)
    source.places = (1,)
    features = torch.arange(6.0).view(1, 2, 3)
    source.observe([Outcome("r", (1,), 0, 0, features)])
    [seen] = drafter.outcomes
    assert seen.features is not None
    assert torch.equal(seen.features, features[:, 1:])
