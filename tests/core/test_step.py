"""Packing: every row of a step is the token, the position and the column that its segment says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sooner.core.step import Segment, pack
from sooner.core.tree import EMPTY, ROOT, Draft, depths
from tests.core.test_tree import drafts


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    draft = draw(drafts(most=5))
    return Segment(
        lane=0,
        start=draw(st.integers(0, 20)),
        certain=tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))),
        draft=draft,
        law=bool(len(draft)) or draw(st.booleans()),
    )


def _batch(parts: list[Segment]) -> list[Segment]:
    """The same segments, each in a lane of its own, lanes in no order."""
    return [Segment(7 * s % 11, p.start, p.certain, p.draft, p.law) for s, p in enumerate(parts)]


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(parts=st.lists(segments(), max_size=6))
def test_rows_hold_what_their_segments_say(parts: list[Segment]) -> None:
    batch = _batch(parts)
    step = pack(batch)
    assert step.segments == tuple(batch)
    assert step.offsets[0] == 0
    assert step.offsets[-1] == len(step.tokens)
    for s, segment in enumerate(batch):
        rows = slice(step.offsets[s], step.offsets[s + 1])
        certain = len(segment.certain)
        root = segment.start + certain - 1
        assert step.tokens[rows].tolist() == [*segment.certain, *segment.draft.tokens]
        assert set(step.lanes[rows].tolist()) == {segment.lane}
        assert step.columns[rows].tolist() == list(range(segment.start, segment.start + segment.rows))
        positions = step.positions[rows].tolist()
        assert positions[:certain] == list(range(segment.start, root + 1))
        assert positions[certain:] == [root + depth for depth in depths(segment.draft.parents)]
        assert segment.root == root


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(parts=st.lists(segments(), max_size=6))
def test_law_rows_are_root_then_nodes_of_the_segments_that_want_them(parts: list[Segment]) -> None:
    batch = _batch(parts)
    step = pack(batch)
    rows = step.law_rows.tolist()
    expected: list[int] = []
    for s, segment in enumerate(batch):
        first = step.law_starts[s]
        assert (first is not None) == segment.law
        if first is not None:
            assert first == len(expected)
            expected += range(step.offsets[s] + len(segment.certain) - 1, step.offsets[s + 1])
    assert rows == expected


def test_no_segments_make_an_empty_step() -> None:
    step = pack([])
    assert step.offsets == (0,)
    assert step.law_rows.dtype == step.tokens.dtype == torch.int64
    assert len(step.tokens) == len(step.law_rows) == 0


def test_two_segments_in_one_lane_are_refused() -> None:
    with pytest.raises(ValueError, match="share a lane"):
        pack([Segment(1, 0, (1,)), Segment(1, 4, (2,))])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"certain": ()}, "at least one certain token"),
        ({"start": -1}, "must not be negative"),
        ({"lane": -1}, "must not be negative"),
        ({"draft": Draft((1,), (ROOT,)), "law": False}, "cannot be verified"),
    ],
)
def test_a_segment_that_makes_no_sense_is_refused(change: dict[str, object], message: str) -> None:
    plain: dict[str, object] = {"lane": 0, "start": 0, "certain": (1,), "draft": EMPTY, "law": True}
    with pytest.raises(ValueError, match=message):
        Segment(**{**plain, **change})  # type: ignore[arg-type]
