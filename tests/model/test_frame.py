"""Masks of passes against counting by hand: trees, chains, windows, padding; and few layouts for many passes."""

from __future__ import annotations

from random import Random

import pytest
import torch

from sooner.core.step import Segment, Step, pack
from sooner.core.tree import EMPTY, ROOT, Draft, chain, depths
from sooner.model import attention
from sooner.model.frame import Frame, Tiles, frame
from sooner.model.lanes import LaneCache

EXACT, COARSE = Tiles(least=4), Tiles(least=8, coarse=True)


def some_tree(random: Random, nodes: int) -> Draft:
    parents = [random.randint(ROOT, i - 1) for i in range(nodes)]
    return Draft(tuple(range(nodes)), tuple(parents))


def by_hand(segment: Segment, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which columns each row of a segment sees, and how far away they are; column by column."""
    begin = segment.start + len(segment.certain)
    where = [*range(begin), *(segment.root + depth for depth in depths(segment.draft.parents))]
    mask = torch.zeros((segment.rows, columns), dtype=torch.bool)
    apart = torch.zeros((segment.rows, columns), dtype=torch.int64)
    for r in range(segment.rows):
        node = r - len(segment.certain)
        seen = set(range(segment.start + r + 1 if node < 0 else begin))
        while node >= 0:
            seen.add(begin + node)
            node = segment.draft.parents[node]
        for column in seen:
            mask[r, column] = True
            apart[r, column] = where[segment.start + r] - where[column]
    return mask, apart


@pytest.mark.parametrize("nodes", [0, 1, 7, 31, 32, 33, 70])
def test_a_row_sees_its_ancestors_and_what_is_before_the_draft(nodes: int) -> None:
    random = Random(nodes)
    for _ in range(20):
        certain = tuple(range(random.randint(1, 5)))
        segments = [
            Segment(0, random.randint(0, 9), certain, some_tree(random, nodes)),
            Segment(1, random.randint(0, 9), certain, chain(range(random.randint(0, 4)))),
        ]
        height, columns = max(s.rows for s in segments) + 3, 128
        seen = attention.visible(segments, height, columns)
        for s, segment in enumerate(segments):
            mask, apart = by_hand(segment, columns)
            assert torch.equal(seen.mask[s, : segment.rows], mask)
            assert torch.equal(torch.where(mask, seen.distance[s, : segment.rows], 0), apart)
            assert torch.equal(seen.mask[s, segment.rows :], mask[-1:].expand(height - segment.rows, -1))


def cache_with(lengths: dict[int, int], lanes: int) -> LaneCache:
    """Lanes that hold so many tokens; the others are closed."""
    cache = LaneCache(1, 1, 2, torch.float32)
    for lane in range(lanes):
        assert cache.open() == lane
    for lane in range(lanes):
        if lane in lengths:
            cache.reserve(lane, 0, lengths[lane] or 1)
            cache.stage(lane, [0] * lengths[lane], list(range(-1, lengths[lane] - 1)))
            cache.settle(lane, [0] * lengths[lane])
        else:
            cache.close(lane)
    return cache


def laid(segments: list[Segment], tiles: Tiles, lanes: int = 1) -> tuple[Step, Frame]:
    """A step and its frame, in a cache that has room for what is to come."""
    cache = cache_with({segment.lane: segment.start for segment in segments}, lanes)
    cache.reserve(segments[0].lane, segments[0].start, 2048)
    step = pack(segments)
    return step, frame(step, cache, step.law_rows.tolist(), tiles)


@pytest.mark.parametrize("tiles", [EXACT, COARSE])
@pytest.mark.parametrize("lanes", [(0,), (3,), (0, 1, 2), (1, 9, 20)])
def test_rows_find_their_places_and_padding_is_the_last_row_once_more(
    lanes: tuple[int, ...], tiles: Tiles
) -> None:
    segments = [Segment(lane, 5 + lane, (1, 2), chain(range(3 + i))) for i, lane in enumerate(lanes)]
    segments.append(Segment(21, 0, tuple(range(40)), law=False))  # a prompt: a group of its own
    step, made = laid(segments, tiles, lanes=22)
    cache = LaneCache(1, 1, 2, torch.float32)
    plan = attention.spread(made.layout, made.numbers, cache.store)
    count = len(step.tokens)
    for name in ("tokens", "positions", "lanes", "columns"):
        got, want = getattr(plan, name), getattr(step, name)
        assert torch.equal(got[:count], want)
        assert bool((got[count:] == want[-1]).all())
    assert torch.equal(plan.wanted[: len(step.law_rows)], step.law_rows)
    # What is in a place is the row that looks for its result there.
    inside = torch.cat([group.rows for group in plan.groups])
    assert torch.equal(inside[plan.place[:count]], torch.arange(count))
    lane_of = torch.cat(
        [
            (group.index if group.group.lanes is None else torch.arange(*group.group.lanes))
            .repeat_interleave(group.group.height)
            for group in plan.groups
        ]
    )  # fmt: skip
    assert torch.equal(lane_of[plan.place[:count]], step.lanes)


def test_passes_of_one_text_share_few_layouts() -> None:
    exact, coarse = set(), set()
    for start in range(1030, 1600, 7):
        for draft in (EMPTY, chain(range(3)), some_tree(Random(start), 12), chain(range(40))):
            for tiles, found in ((EXACT, exact), (COARSE, coarse)):
                found.add(laid([Segment(0, start, (1,), draft)], tiles)[1].layout)
    assert len(coarse) == 3 * 3  # heights 8, 16 and 64, columns 1280, 1536 and 1792
    assert len(exact) > 2 * len(coarse)


def test_layouts_do_not_depend_on_what_is_guessed_but_only_on_how_much() -> None:
    def layouts(start: int, nodes: int) -> set[object]:
        drafts = [chain(range(nodes)), some_tree(Random(1), nodes), some_tree(Random(2), nodes)]
        return {laid([Segment(0, start, (1,), draft)], COARSE)[1].layout for draft in drafts}

    assert layouts(100, 7) == layouts(150, 3)
    assert len(layouts(100, 7)) == 1
    assert layouts(100, 7) != layouts(100, 8)


def test_a_tile_wastes_an_eighth_of_the_columns_at_most() -> None:
    for count in range(2048, 40_000, 37):
        assert count <= COARSE.columns(count) < count * 9 / 8


def test_only_lanes_that_lie_together_are_read_without_copying() -> None:
    groups = laid([Segment(lane, 3, (1,)) for lane in (0, 1, 2)], COARSE, lanes=4)[1].layout.groups
    assert [group.lanes for group in groups] == [(0, 4)]
    groups = laid([Segment(lane, 3, (1,)) for lane in (0, 30)], COARSE, lanes=32)[1].layout.groups
    assert [(group.lanes, group.places) for group in groups] == [(None, 2)]
