"""Recycled candidates: what is kept of every row, by which key, for how long."""

from __future__ import annotations

import math

import pytest

from sooner.config import Budget
from sooner.core.edit import LawParams
from sooner.core.tree import Draft
from sooner.draft.protocol import Context, Outcome, Tops
from sooner.draft.recycle import Bounded, RecycleSource
from sooner.errors import ConfigError

LOGITS = (3.0, 2.0, -9.0)


def outcome(tail: tuple[int, ...], draft: Draft, ids: list[tuple[int, ...]], first: float = 3.0) -> Outcome:
    logits = tuple((first, *LOGITS[1:]) for _ in ids)
    return Outcome("r", (1,), 0, len(draft), None, draft, tail, Tops(tuple(ids), logits))


def after(source: RecycleSource, *tail: int) -> list[int]:
    return [token for token, _ in source.after("r", (), tail)]


def test_rejected_rows_teach_as_much_as_accepted_ones() -> None:
    source = RecycleSource()
    tree = Draft((5, 6, 7), (-1, 0, -1))
    source.observe([outcome((1, 2), tree, [(10, 11, 12), (20, 21, 22), (30, 31, 32), (40, 41, 42)])])
    assert after(source, 1, 2) == [10, 11, 12]
    assert after(source, 2, 5) == [20, 21, 22]
    assert after(source, 5, 6) == [30, 31, 32]
    assert after(source, 2, 7) == [40, 41, 42]


def test_a_pair_never_seen_falls_back_to_its_last_token() -> None:
    source = RecycleSource()
    source.observe([outcome((1, 2), Draft(), [(10, 11, 12)])])
    assert after(source, 9, 2) == after(source, 2) == [10, 11, 12]
    assert after(source, 2, 9) == []
    [(_, pair), *_], [(_, single), *_] = source.after("r", (), (1, 2)), source.after("r", (), (9, 2))
    assert source.priors[pair] > source.priors[single]


def test_a_row_of_another_request_is_told_apart() -> None:
    source = RecycleSource()
    source.observe([outcome((1, 2), Draft(), [(10, 11, 12)])])
    for tail in ((1, 2), (9, 2)):
        own, others = source.after("r", (), tail), source.after("s", (), tail)
        assert [token for token, _ in own] == [token for token, _ in others]
        assert not {code for _, code in own} & {code for _, code in others}
        assert all(source.priors[a[1]] > source.priors[b[1]] for a, b in zip(own, others, strict=True))


def test_the_latest_row_counts() -> None:
    source = RecycleSource()
    source.observe([outcome((1, 2), Draft(), [(10, 11, 12)]), outcome((1, 2), Draft(), [(13, 14, 15)])])
    assert after(source, 1, 2) == [13, 14, 15]


def test_shares_become_grades_and_all_codes_have_priors() -> None:
    source = RecycleSource()
    source.observe([outcome((1, 2), Draft(), [(10, 11, 12)])])
    chances = [source.priors[code] for _, code in source.after("r", (), (1, 2))]
    assert chances == sorted(chances, reverse=True)
    assert chances[0] > 0.3 > chances[2]


def test_what_followed_in_the_prompt_stands_in_until_the_target_has_spoken() -> None:
    source = RecycleSource()
    source.begin([Context("r", [1, 2, 3, 1, 2, 4], LawParams(), 0, "match")], [Budget.chain(1)])
    assert after(source, 1, 2) == [4]
    source.observe([outcome((1, 2), Draft(), [(10, 11, 12)])])
    source.begin([Context("other", [1, 2, 9], LawParams(), 0, "match")], [Budget.chain(1)])
    assert after(source, 1, 2) == [10, 11, 12]


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_rows_that_are_not_finite_are_not_kept(broken: float) -> None:
    source = RecycleSource()
    source.observe([outcome((1, 2), Draft(), [(10, 11, 12)], broken)])
    assert after(source, 1, 2) == []


def test_a_pass_without_laws_teaches_nothing() -> None:
    source = RecycleSource()
    source.observe([Outcome("r", (), 0, 0)])
    assert source.keys == 0


def test_the_store_is_bounded_and_the_oldest_go_first() -> None:
    source = RecycleSource(limit=100)
    for i in range(1000):
        source.observe([outcome((i, i + 1), Draft(), [(10, 11, 12)])])
        assert source.keys <= 200
    assert after(source, 998, 999) == [10, 11, 12]
    assert after(source, 1, 2) == []


def test_half_of_the_bound_is_always_the_newest() -> None:
    store: Bounded[int] = Bounded(10)
    for i in range(100):
        store.put(i, i)
        assert len(store) <= 10
        assert all(store.get(j) == j for j in range(max(0, i - 4), i + 1))


@pytest.mark.parametrize("limit", [0, 1, -5, 2.5])
def test_a_bound_that_makes_no_sense_is_refused(limit: float) -> None:
    with pytest.raises(ConfigError, match="at least 2 keys"):
        RecycleSource(limit)  # type: ignore[arg-type]  # on purpose
