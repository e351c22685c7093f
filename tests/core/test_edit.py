"""What acts on logits (core/edit.py) against transformers' own processors, and along every branch of a tree."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from sooner.core.edit import Edit, LawParams, Past, edit
from sooner.core.tree import Draft
from sooner.engine.history import History
from sooner.engine.judge import paths

V = 61
PROMPT = [3, 17, 3, 40, 5]
TEXT = [17, 8, 8, 40, 22]


def logits(rows: int, seed: int = 0) -> Tensor:
    return torch.randn((rows, V), generator=torch.Generator().manual_seed(seed)) * 3


def past(text: Sequence[int] = TEXT) -> Past:
    return History([*PROMPT, *text], len(PROMPT)).past()


def edited(params: LawParams, rows: Tensor, taken: Sequence[tuple[int, ...]] = ((),)) -> Tensor:
    return edit(rows, [Edit(0, params, past(), taken)])


def ids(path: Sequence[int] = ()) -> Tensor:
    return torch.tensor([[*PROMPT, *TEXT, *path]])


@pytest.mark.parametrize("strength", [0.5, 1.3, 2.0])
@pytest.mark.parametrize("path", [(), (9,), (8, 9, 9)])
def test_repetition_penalty_is_that_of_transformers(strength: float, path: tuple[int, ...]) -> None:
    row = logits(1)
    want = RepetitionPenaltyLogitsProcessor(strength)(ids(path), row.clone())
    torch.testing.assert_close(edited(LawParams(repetition_penalty=strength), row, [path]), want)


def test_logit_bias_is_that_of_transformers() -> None:
    row = logits(1)
    want = SequenceBiasLogitsProcessor({(4,): 2.5, (9,): -7.0})(ids(), row.clone())
    torch.testing.assert_close(edited(LawParams(bias=((4, 2.5), (9, -7.0))), row), want)


@pytest.mark.parametrize("path", [(), (9,), (40, 22), (22,)])
def test_bad_words_are_those_of_transformers(path: tuple[int, ...]) -> None:
    words = [[7], [22, 11], [40, 22, 12], [9, 13], [50, 22, 14]]
    row = logits(1)
    want = NoBadWordsLogitsProcessor(words, eos_token_id=2)(ids(path), row.clone())
    got = edited(LawParams(bad_words=tuple(map(tuple, words))), row, [path])
    assert torch.equal(got.isinf(), want.isinf())
    assert got.isinf().any()


@pytest.mark.parametrize("path", [(), (9,), (9, 9, 9)])
def test_min_tokens_are_those_of_transformers(path: tuple[int, ...]) -> None:
    row = logits(1)
    processor = MinNewTokensLengthLogitsProcessor(len(PROMPT), 7, [2, 6])
    want = processor(ids(path), row.clone())
    assert torch.equal(edited(LawParams(until=7, forbidden=(2, 6)), row, [path]), want)


def test_presence_and_frequency_count_the_text_and_the_branch_but_not_the_prompt() -> None:
    """OpenAI's formula, written out once more: logit - frequency * count - presence * (count > 0)."""
    row = logits(1)
    got = edited(LawParams(presence_penalty=0.7, frequency_penalty=0.25), row, [(8, 9)])
    want = row.clone()
    for token in range(V):
        count = [*TEXT, 8, 9].count(token)
        want[0, token] -= 0.25 * count + 0.7 * (count > 0)
    torch.testing.assert_close(got, want)
    assert got[0, 3] == row[0, 3]  # 3 stands in the prompt alone


def test_every_node_is_penalised_by_its_own_path_and_by_no_sibling() -> None:
    draft = Draft((9, 10, 9, 11, 9), (-1, -1, 1, 2, 3))
    params = LawParams(
        repetition_penalty=1.7, frequency_penalty=0.5, presence_penalty=0.3, bad_words=((9, 11, 4),)
    )
    rows = logits(6)
    together = edited(params, rows.clone(), paths(draft))
    assert paths(draft) == [(), (9,), (10,), (10, 9), (10, 9, 11), (10, 9, 11, 9)]
    for r, path in enumerate(paths(draft)):
        alone = edit(rows[r : r + 1].clone(), [Edit(0, params, past([*TEXT, *path]), ((),))])
        torch.testing.assert_close(together[r : r + 1], alone)


def test_rows_of_other_requests_are_left_alone() -> None:
    rows = logits(5)
    one = Edit(2, LawParams(allowed=(4, 5)), past(), ((), (1,)))
    got = edit(rows, [one])
    assert torch.equal(got[[0, 1, 4]], rows[[0, 1, 4]])
    assert torch.equal(got[2:4].isfinite().nonzero()[:, 1].unique(), torch.tensor([4, 5]))


def test_the_logits_given_are_not_changed() -> None:
    rows = logits(1)
    before = rows.clone()
    edited(LawParams(bias=((4, 2.5),), repetition_penalty=1.5), rows)
    assert torch.equal(rows, before)


def test_a_users_processor_sees_the_whole_path_of_its_row() -> None:
    """bugs.md 28: every prefix is prompt + text + the drafted tokens before the row, nothing stale."""
    seen: list[list[int]] = []

    def record(tokens: Sequence[int], row: Tensor) -> Tensor:
        seen.append(list(tokens))
        return row + 1

    rows = logits(3)
    got = edited(LawParams(processors=(record,)), rows, [(), (9,), (9, 4)])
    assert seen == [[*PROMPT, *TEXT, *path] for path in ((), (9,), (9, 4))]
    torch.testing.assert_close(got, rows + 1)


def test_history_grows_by_what_is_new_and_is_bounded_by_the_vocabulary() -> None:
    tokens = list(PROMPT)
    history = History(tokens, len(PROMPT))
    for i in range(500):
        tokens.append(i * 7 % 11)
        grown = history.past()
    fresh = History(tokens, len(PROMPT)).past()
    assert dict(zip(grown.ids, grown.counts, strict=True)) == dict(zip(fresh.ids, fresh.counts, strict=True))
    assert [grown.ids[at] for at in grown.place.values()] == list(grown.place)
    assert len(grown.ids) <= 11 + len(PROMPT)
    assert sum(grown.counts) == 500
