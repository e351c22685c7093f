"""Windows of text: which slots have a label, and which."""

from __future__ import annotations

from sooner.train import windows
from tests.train.test_unroll import tiny_batch


def test_labels_are_the_targets_laws_one_token_further_at_each_step() -> None:
    batch = tiny_batch(2, 9)
    for step in range(3):
        found = windows.labels(batch, step)
        assert found.rows.tolist() == [w * 9 + i for w in range(2) for i in range(9 - 1 - step)]
        for row, ids in zip(found.rows.tolist(), found.ids, strict=True):
            assert ids.tolist() == batch.ids[row // 9, row % 9 + 1 + step].tolist()


def test_no_label_reaches_into_the_next_document() -> None:
    batch = tiny_batch(1, 9)
    batch.first[0, 4] = True
    assert windows.labels(batch, 0).rows.tolist() == [0, 1, 2, 4, 5, 6, 7]
    assert windows.labels(batch, 1).rows.tolist() == [0, 1, 4, 5, 6]
    assert windows.labels(batch, 2).rows.tolist() == [0, 4, 5]
