"""A drafter may do anything: what it returns is checked, what it raises is counted, and nobody suffers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from sooner.config import Budget
from sooner.core.law import LawParams
from sooner.core.tree import Draft, chain
from sooner.draft.protocol import Context, Outcome
from sooner.engine.guard import Guard, problem
from sooner.testing import ScriptedDrafter

VOCAB = 4
BUDGET = Budget(depth=2, width=2, nodes=4)


def rows(*values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


EVEN = rows([0.25] * VOCAB)
GOOD: list[tuple[str, Draft]] = [
    ("nothing", Draft()),
    ("a chain", chain([0, 3])),
    ("a tree as large as allowed", Draft((0, 1, 0, 1), (-1, -1, 0, 0))),
    ("lists", Draft([0, 1], [-1, 0])),  # type: ignore[arg-type]  # drafters hand over lists
    ("laws", Draft((0,), (-1,), EVEN)),
    ("laws in half precision", Draft((0,), (-1,), EVEN.bfloat16())),
    ("laws that sum to nearly 1", Draft((0,), (-1,), EVEN * 1.0005)),
]
BAD: list[tuple[str, object, str]] = [
    ("no draft", None, "expected a Draft, got NoneType"),
    ("a list of tokens", [1, 2], "expected a Draft, got list"),
    ("an id beyond the vocabulary", chain([VOCAB]), "token ids must be ints from 0 to 3"),
    ("a negative id", chain([-1]), "token ids must be ints"),
    ("a number with a point", chain([1.0]), "token ids must be ints"),  # type: ignore[list-item]  # on purpose
    ("a truth value", chain([True]), "token ids must be ints"),
    ("a tensor", chain([torch.tensor(1)]), "token ids must be ints"),  # type: ignore[list-item]  # on purpose
    ("too deep", chain([0, 1, 2]), "depth 3"),
    ("too wide", Draft((0, 1, 2), (-1, -1, -1)), "width 3"),
    ("too many", Draft((0, 1, 0, 1, 0), (-1, -1, 0, 0, 1)), "5 nodes"),
    ("laws of another vocabulary", Draft((0,), (-1,), rows([0.5, 0.5])), "probs must be floats"),
    ("laws of whole numbers", Draft((0,), (-1,), torch.tensor([[1, 0, 0, 0]])), "probs must be floats"),
    ("NaN in a law", Draft((0,), (-1,), rows([0.5, float("nan"), 0.5, 0])), "probability distribution"),
    ("infinity in a law", Draft((0,), (-1,), rows([0.5, float("inf"), 0.5, 0])), "probability distribution"),
    ("a negative probability", Draft((0,), (-1,), rows([1.5, -0.5, 0, 0])), "probability distribution"),
    ("logits for a law", Draft((0,), (-1,), rows([2.0, 1, 0, 1])), "probability distribution"),
    ("a law without mass", Draft((0,), (-1,), rows([0.0] * VOCAB)), "probability distribution"),
    ("a token its law gives no mass", Draft((0,), (-1,), rows([0.0, 1, 0, 0])), "no mass"),
]


@pytest.mark.parametrize("draft", [draft for _, draft in GOOD], ids=[name for name, _ in GOOD])
def test_a_good_draft_has_no_problem(draft: Draft) -> None:
    assert problem(draft, BUDGET, VOCAB, with_probs=True) is None


@pytest.mark.parametrize(("draft", "named"), [(d, n) for _, d, n in BAD], ids=[name for name, _, _ in BAD])
def test_a_bad_draft_is_refused_by_name(draft: object, named: str) -> None:
    found = problem(draft, BUDGET, VOCAB, with_probs=True)
    assert found is not None
    assert named in found


def test_laws_are_not_looked_at_where_nobody_uses_them() -> None:
    assert problem(Draft((0,), (-1,), rows([9.0, 0, 0, 0])), BUDGET, VOCAB, with_probs=False) is None


@pytest.mark.parametrize("budget", [Budget(0, 1, 1), Budget(1, 0, 1), Budget(1, 1, 0)])
def test_a_draft_where_none_was_asked_for_is_refused(budget: Budget) -> None:
    assert problem(chain([1]), budget, VOCAB, with_probs=False) is not None


def contexts(count: int) -> list[Context]:
    return [Context(f"r{i}", [1, 2], LawParams(), 0, "match") for i in range(count)]


class Failing:
    """A drafter that fails in one of its methods."""

    name = "failing"
    taps: tuple[int, ...] = ()

    def __init__(self, where: str) -> None:
        self._where = where

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        self._perhaps("propose")
        return [chain([1]) for _ in contexts]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        self._perhaps("observe")

    def forget(self, request_id: str) -> None:
        self._perhaps("forget")

    def _perhaps(self, method: str) -> None:
        if method == self._where:
            raise RuntimeError(f"{method} is broken")


def test_a_drafter_that_raises_gives_empty_drafts_and_is_counted() -> None:
    guard = Guard(Failing("propose"), VOCAB)
    drafts, problems = guard.propose(contexts(2), [BUDGET] * 2)
    assert drafts == [Draft(), Draft()]
    assert problems == ["raised: propose is broken"] * 2
    assert guard.failures == {"raised": 1}


@pytest.mark.parametrize("method", ["observe", "forget"])
def test_what_observe_and_forget_raise_goes_no_further(method: str) -> None:
    guard = Guard(Failing(method), VOCAB)
    guard.observe([])
    guard.forget("r0")
    guard.forget("r0")
    assert guard.failures == {f"{method} raised": 1 if method == "observe" else 2}


@pytest.mark.parametrize("returned", [[], [chain([1])] * 3, None, 7], ids=["none", "too many", "None", "a number"])
def test_a_wrong_count_of_drafts_costs_all_of_them(returned: Any) -> None:
    drafter = ScriptedDrafter(lambda context, budget: Draft())
    drafter.propose = lambda contexts, budgets: returned  # type: ignore[method-assign]  # nonsense on purpose
    guard = Guard(drafter, VOCAB)
    drafts, problems = guard.propose(contexts(2), [BUDGET] * 2)
    assert drafts == [Draft(), Draft()]
    assert all(problems)


def test_one_bad_draft_leaves_its_neighbours_alone() -> None:
    script: Callable[[Context, Budget], Draft] = lambda c, b: chain([1 if c.request_id != "r1" else VOCAB])  # noqa: E731
    guard = Guard(ScriptedDrafter(script), VOCAB)
    drafts, problems = guard.propose(contexts(3), [BUDGET] * 3)
    assert [len(draft) for draft in drafts] == [1, 0, 1]
    assert [found is None for found in problems] == [True, False, True]
    assert guard.failures == {"malformed": 1}


def test_laws_are_checked_only_for_rows_that_are_drawn() -> None:
    draft = Draft((0,), (-1,), rows([9.0, 0, 0, 0]))
    guard = Guard(ScriptedDrafter(lambda context, budget: draft), VOCAB)
    sampled, greedy = LawParams(temperature=1.0), LawParams()
    mixed = [
        Context("drawn", [1], sampled, 0, "reject"),
        Context("matched", [1], sampled, 0, "match"),
        Context("greedy", [1], greedy, 0, "reject"),
    ]
    assert [len(d) for d in guard.propose(mixed, [BUDGET] * 3)[0]] == [0, 1, 1]


def test_a_failure_is_logged_once_and_not_at_every_step(caplog: pytest.LogCaptureFixture) -> None:
    guard = Guard(Failing("propose"), VOCAB)
    with caplog.at_level(logging.WARNING, logger="sooner"):
        for _ in range(5):
            guard.propose(contexts(1), [BUDGET])
    assert len(caplog.records) == 1
    assert "failing" in caplog.text
    assert "the text is not affected" in caplog.text
