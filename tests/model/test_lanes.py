"""LaneCache against lists: whatever is staged, settled, forked or forgotten, keys stay with their tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sooner.core.tree import ROOT, Draft, follow
from sooner.model.lanes import LaneCache, staged_parents
from sooner.native.pages import Pages

LAYERS, HEADS, WIDTH = 2, 3, 2
VOCAB = 3  # few ids, so that staged and settled tokens coincide by chance
# Every number of one column is different, so a mixed-up layer, head or width shows.
PATTERN = torch.arange(LAYERS * 2 * HEADS * WIDTH, dtype=torch.float64).view(LAYERS, 2, HEADS, WIDTH) / 1000


@dataclass
class Column:
    token: int
    mark: int


@dataclass
class Model:
    """What a lane ought to hold."""

    settled: list[Column] = field(default_factory=list)
    staged: list[Column] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)


class Lanes(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cache = LaneCache(LAYERS, HEADS, WIDTH, torch.float64)
        self.lanes: dict[int, Model] = {}
        self.remembered: dict[int, list[Column]] = {}
        self.marks = 0

    @initialize(seed=st.integers(0, 2**32))
    def start(self, seed: int) -> None:
        self.random = Random(seed)

    @precondition(lambda self: len(self.lanes) < 6)
    @rule()
    def open(self) -> None:
        blank = self.cache.store.shape[2] - len(self.lanes) - len(self.remembered)
        lane = self.cache.open()
        assert lane not in self.lanes
        assert not (lane in self.remembered and blank), "a blank lane was there"
        self.remembered.pop(lane, None)
        self.lanes[lane] = Model()

    @precondition(lambda self: self.lanes)
    @rule()
    def close(self) -> None:
        lane = self._some()
        self.cache.close(lane)
        del self.lanes[lane]

    @precondition(lambda self: self.lanes)
    @rule()
    def close_and_remember(self) -> None:
        lane = self._some()
        self.cache.close(lane, "scope")
        settled = self.lanes.pop(lane).settled
        if settled:
            self.remembered[lane] = settled

    @precondition(lambda self: self.remembered)
    @rule()
    def reopen(self) -> None:
        lane = self.random.choice(sorted(self.remembered))
        known = self.remembered.pop(lane)
        assert self.cache.remembered_length(lane) == len(known)
        assert self.cache.shared(lane, [c.token for c in known] + [0]) == len(known)
        length = self.random.randint(0, len(known))
        assert self.cache.reopen(lane, length) == lane
        self.lanes[lane] = Model(known[:length])

    @precondition(lambda self: self.remembered and len(self.lanes) < 6)
    @rule()
    def fork_what_is_remembered(self) -> None:
        lane = self.random.choice(sorted(self.remembered))
        known = self.remembered[lane]
        length = self.random.randint(0, len(known))
        new = self.cache.fork(lane, length)
        assert new not in self.lanes
        self.remembered.pop(new, None)
        self.lanes[new] = Model(list(known[:length]))

    @rule()
    def trim(self) -> None:
        self.cache.trim()
        self.remembered.clear()
        for model in self.lanes.values():
            assert len(model.settled) <= self.cache.capacity
        assert self.cache.store.shape[2] == self.cache.span

    @rule()
    def gather(self) -> None:
        moved = self.cache.gather()
        self.lanes = {moved.get(lane, lane): model for lane, model in self.lanes.items()}
        self.remembered = {
            lane: c for lane, c in self.remembered.items() if lane in self.cache.remembered("scope")
        }
        assert self.cache.span == len(self.lanes)

    @precondition(lambda self: self.lanes and len(self.lanes) < 6)
    @rule()
    def fork(self) -> None:
        lane = self._some()
        known = self.lanes[lane].settled
        length = self.random.randint(0, len(known))
        new = self.cache.fork(lane, length)
        assert new not in self.lanes
        self.remembered.pop(new, None)
        self.lanes[new] = Model(list(known[:length]))

    @precondition(lambda self: self.lanes)
    @rule()
    def fork_too_much(self) -> None:
        lane = self._some()
        with pytest.raises(ValueError, match="cannot fork"):
            self.cache.fork(lane, len(self.lanes[lane].settled) + 1)

    @precondition(lambda self: self.lanes)
    @rule(rows=st.integers(1, 90), fails=st.booleans())
    def run(self, rows: int, fails: bool) -> None:
        """A pass over a lane, from its end or from further back; a failing one stages nothing."""
        lane = self._some()
        model = self.lanes[lane]
        start = self.random.choice([len(model.settled), self.random.randint(0, len(model.settled))])
        certain = self.random.randint(1, rows)
        tokens, parents = self._tree(certain, rows)
        self.cache.reserve(lane, start, rows)
        columns = [self._write(lane, start + i, token) for i, token in enumerate(tokens)]
        model.settled = model.settled[:start]
        model.staged, model.parents = ([], []) if fails else (columns, parents)
        if not fails:
            self.cache.stage(lane, tokens, parents)

    @precondition(lambda self: self.lanes)
    @rule()
    def run_beyond_what_is_held(self) -> None:
        lane = self._some()
        with pytest.raises(ValueError, match="cannot go on"):
            self.cache.reserve(lane, len(self.lanes[lane].settled) + 1, 1)

    @precondition(lambda self: self.lanes)
    @rule(extra=st.integers(0, 3), cut=st.integers(0, 10))
    def settle(self, extra: int, cut: int) -> None:
        """Settle on a text that begins like what is held, follows a staged path, and then goes its own way."""
        lane = self._some()
        model = self.lanes[lane]
        text = [c.token for c in model.settled]
        if cut < 5:
            text = text[: max(len(text) - cut, 0)]
        elif model.staged:
            text += self._path(model, self.random.randrange(len(model.staged)))
        text += [self.random.randrange(VOCAB) for _ in range(extra)]
        expected = self._expected(model, text)
        assert self.cache.settle(lane, text) == len(expected)
        self.lanes[lane] = Model(expected)

    @invariant()
    def keys_are_with_their_tokens(self) -> None:
        self.cache.check()
        assert self.cache.in_use == len(self.lanes)
        assert sorted(self.cache.remembered("scope")) == sorted(self.remembered)
        assert self.cache.remembered("other") == []
        kept = {**{lane: model.settled for lane, model in self.lanes.items()}, **self.remembered}
        for lane, columns in kept.items():
            if lane in self.lanes:
                assert self.cache.held(lane) == tuple(c.token for c in columns)
            marks = torch.tensor([c.mark for c in columns], dtype=torch.float64)
            wanted = marks[None, None, None, :, None] + PATTERN[:, :, :, None, :]
            assert torch.equal(self.cache.store[:, :, lane, :, : len(marks)], wanted)

    def _some(self) -> int:
        return self.random.choice(sorted(self.lanes))

    def _write(self, lane: int, column: int, token: int) -> Column:
        self.marks += 1
        self.cache.store[:, :, lane, :, column] = self.marks + PATTERN
        return Column(token, self.marks)

    def _tree(self, certain: int, rows: int) -> tuple[list[int], list[int]]:
        tokens = [self.random.randrange(VOCAB) for _ in range(certain)]
        parents: list[int] = []
        taken: set[tuple[int, int]] = set()
        drafted: list[int] = []
        while certain + len(parents) < rows:
            parent = self.random.randint(max(len(parents) - 4, ROOT), len(parents) - 1)
            free = [t for t in range(VOCAB) if (parent, t) not in taken]
            if not free:
                continue
            drafted.append(self.random.choice(free))
            taken.add((parent, drafted[-1]))
            parents.append(parent)
        return tokens + drafted, staged_parents(certain, parents)

    def _path(self, model: Model, node: int) -> list[int]:
        above = [] if model.parents[node] == ROOT else self._path(model, model.parents[node])
        return [*above, model.staged[node].token]

    def _expected(self, model: Model, text: list[int]) -> list[Column]:
        for i, column in enumerate(model.settled):
            if i == len(text) or text[i] != column.token:
                return model.settled[:i]
        found, node = list(model.settled), ROOT
        for token in text[len(found) :]:
            below = [n for n, p in enumerate(model.parents) if p == node and model.staged[n].token == token]
            if not below:
                break
            node = below[0]
            found.append(model.staged[node])
        return found


BOUNDS = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
TestLanes = Lanes.TestCase
TestLanes.settings = BOUNDS


def test_the_comparison_sees_columns_that_were_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LaneCache, "_compact", lambda self, lane, start, path: None)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Lanes, settings=settings(BOUNDS, max_examples=400, phases=[Phase.generate]))


def filled(tokens: list[int], parents: list[int]) -> tuple[LaneCache, int]:
    """A lane with these rows staged; column i holds 100 + i everywhere."""
    cache = LaneCache(1, 1, 1, torch.float64)
    lane = cache.open()
    cache.reserve(lane, 0, len(tokens))
    cache.store[0, :, lane, 0, : len(tokens), 0] = 100 + torch.arange(len(tokens), dtype=torch.float64)
    cache.stage(lane, tokens, parents)
    return cache, lane


def test_nothing_counts_before_it_is_settled() -> None:
    cache, lane = filled([1, 2, 3], [-1, 0, 1])
    assert cache.held(lane) == ()


def test_settle_moves_the_columns_of_a_branch_together() -> None:
    cache, lane = filled([7, 1, 2, 3, 4], [-1, 0, 0, 2, 3])  # 7 then (1 | 2 3 4)
    assert cache.settle(lane, [7, 2, 3, 9]) == 3
    assert cache.store[0, 0, lane, 0, :3, 0].tolist() == [100, 102, 103]
    assert cache.settle(lane, [7, 2, 3, 4]) == 3, "what was not settled at once is forgotten"


def test_settling_overlapping_columns_copies_before_it_writes() -> None:
    cache, lane = filled([0, 1, 2, 3, 4, 5], [-1, -1, 1, 2, 3, 4])  # 0 | 1 2 3 4 5: every column moves by one
    assert cache.settle(lane, [1, 2, 3, 4, 5]) == 5
    assert cache.store[0, 1, lane, 0, :5, 0].tolist() == [101, 102, 103, 104, 105]


def test_a_lane_opened_again_holds_nothing() -> None:
    cache, lane = filled([1, 2], [-1, 0])
    cache.settle(lane, [1, 2])
    cache.close(lane)
    assert cache.open() == lane
    assert cache.held(lane) == ()


def test_the_lowest_free_lane_is_opened_first() -> None:
    cache = LaneCache(1, 1, 1, torch.float64)
    assert [cache.open() for _ in range(6)] == [0, 1, 2, 3, 4, 5]
    for lane in (4, 1, 3):
        cache.close(lane)
    assert [cache.open() for _ in range(3)] == [1, 3, 4]


def test_growing_keeps_every_lane() -> None:
    cache, lane = filled([5] * 10, list(range(-1, 9)))
    cache.settle(lane, [5] * 10)
    before = cache.store[:, :, lane, :, :10].clone()
    for _ in range(9):
        cache.reserve(cache.open(), 0, 1000)
    assert cache.capacity >= 1000
    assert torch.equal(cache.store[:, :, lane, :, :10], before)


def anonymous() -> float:
    """The process's own resident memory, in MB."""
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("RssAnon:")).split()[1]) / 1024


def large() -> tuple[LaneCache, int]:
    """A cache of 40 MB, all columns of one of its four lanes written."""
    cache = LaneCache(10, 4, 64, torch.float32)
    lane = cache.open()
    cache.reserve(lane, 0, 512)
    cache.store[:, :, : lane + 1] = 1
    cache.stage(lane, [1] * 512, staged_parents(512, []))
    cache.settle(lane, [1] * 512)
    return cache, lane


def test_columns_that_were_not_written_take_no_memory() -> None:
    before = anonymous()
    cache, _ = large()
    assert cache.bytes == 40 * 2**20
    assert anonymous() - before < 10 + 8


def test_old_and_new_store_are_never_there_together(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, lane = large()
    cache.store.fill_(1)  # all four lanes
    before, seen, give_back = anonymous(), [], Pages.give_back

    def watched(pages: Pages, layer: int) -> None:
        seen.append(anonymous())
        give_back(pages, layer)

    monkeypatch.setattr(Pages, "give_back", watched)
    old = cache.bytes / 2**20
    cache.reserve(lane, 512, 64)
    assert len(seen) == 10
    assert max(seen) - before < old / 10 + 4
    assert cache.settle(lane, [1] * 512) == 512
    assert bool((cache.store[:, :, :, :, :512] == 1).all())


def test_growing_that_is_interrupted_leaves_lanes_empty_and_not_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    # Layers of the old store go while the new one is filled: an interrupted lane must not claim to hold them.
    cache, lane = large()
    give_back = Pages.give_back

    def interrupted(pages: Pages, layer: int) -> None:
        give_back(pages, layer)
        if layer == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Pages, "give_back", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cache.reserve(lane, 512, 64)
    assert cache.settle(lane, [1] * 512) == 0
    cache.reserve(lane, 0, 64)
    cache.check()


def test_closing_a_lane_twice_is_an_error() -> None:
    cache, lane = filled([1], [-1])
    cache.close(lane)
    with pytest.raises(KeyError):
        cache.close(lane)


def test_check_sees_a_lane_that_is_both_free_and_open() -> None:
    cache, lane = filled([1], [-1])
    cache._free.append(lane)
    with pytest.raises(AssertionError, match="lanes in use"):
        cache.check()


def test_check_sees_a_lane_that_claims_more_than_it_has_room_for() -> None:
    cache, lane = filled([1], [-1])
    cache.stage(lane, [0] * (cache.capacity + 1), list(range(-1, cache.capacity)))
    with pytest.raises(AssertionError, match="claims more"):
        cache.check()


def test_staged_parents_hang_the_draft_below_the_last_certain_token() -> None:
    parents = staged_parents(3, [-1, 0, -1])
    assert parents == [-1, 0, 1, 2, 3, 2]
    draft = Draft((10, 11, 12, 1, 2, 3), tuple(parents))
    assert follow(draft, [10, 11, 12, 3]) == [0, 1, 2, 5]


def test_a_limited_store_does_not_grow_beyond_what_is_needed() -> None:
    """Room to spare is for those who have it: 5 lanes of 64 columns fit, 8 do not, nor 5 of 192."""
    cache = LaneCache(LAYERS, HEADS, WIDTH, torch.float64)
    cache.most_bytes = cache.bytes_for(5, 64)
    lanes = [cache.open() for _ in range(5)]
    for lane in lanes:
        cache.reserve(lane, 0, 64)
        assert cache.bytes <= cache.most_bytes
    for lane in lanes[1:]:
        cache.close(lane, "scope")
    cache.reserve(lanes[0], 0, 190)
    assert cache.bytes <= cache.most_bytes
    assert cache.remembered("scope") == [], "what is remembered goes first"
