"""The equality tests bite: each mistake made on purpose here changes a text, and they see it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import sooner.core.step
from sooner.core.noise import TARGET, key
from sooner.core.step import Segment, Step, pack
from sooner.core.tree import Draft, depths, follow
from sooner.core.verify import Verdict
from sooner.engine.engine import Engine, Event
from sooner.engine.logprobs import TokenLogprob, report
from sooner.engine.request import Request
from sooner.engine.scheduler import Share
from sooner.model.attention import Visible, visible
from sooner.model.lanes import LaneCache, _Lane
from tests.engine.automaton import Automaton
from tests.engine.traffic import Setting, Traffic

SETTINGS = [Setting(seed=seed, requests=6, eos=(1,)) for seed in range(12)]
Patch = pytest.MonkeyPatch


def all_runs() -> None:
    for setting in SETTINGS:
        Traffic(setting).run()


def siblings_see_each_other(patch: Patch) -> None:
    def mask(segments: list[Segment], height: int, columns: int) -> Visible:
        flat = [replace(s, certain=s.certain + s.draft.tokens, draft=Draft()) for s in segments]
        return visible(flat, height, columns)

    patch.setattr("sooner.testing.visible", mask)


def the_root_is_not_seen(patch: Patch) -> None:
    def mask(segments: list[Segment], height: int, columns: int) -> Visible:
        seen = visible(segments, height, columns)
        for s, segment in enumerate(segments):
            seen.mask[s, len(segment.certain) :, segment.root] = False
        return seen

    patch.setattr("sooner.testing.visible", mask)


def a_row_sees_one_column_too_many(patch: Patch) -> None:
    def mask(segments: list[Segment], height: int, columns: int) -> Visible:
        seen = visible(segments, height, columns)
        seen.mask[:, :, 1:] |= seen.mask[:, :, :-1].clone()
        return seen

    patch.setattr("sooner.testing.visible", mask)


def positions_are_off_by_one(patch: Patch) -> None:
    patch.setattr(sooner.core.step, "depths", lambda parents: [d + 1 for d in depths(parents)])


def positions_are_columns(patch: Patch) -> None:
    patch.setattr(sooner.core.step, "depths", lambda parents: list(range(1, len(parents) + 1)))


def accepted_columns_stay_where_they_were(patch: Patch) -> None:
    patch.setattr(LaneCache, "_compact", lambda self, lane, start, path: None)


def settling_trusts_the_count_and_not_the_content(patch: Patch) -> None:
    def first_nodes(draft: Draft, tokens: Sequence[int]) -> list[int]:
        return list(range(len(follow(draft, tokens))))

    patch.setattr("sooner.model.lanes.follow", first_nodes)


def a_lane_is_reused_with_what_it_held(patch: Patch) -> None:
    old: dict[int, _Lane] = {}
    closing, opening = LaneCache.close, LaneCache.open

    def close(self: LaneCache, lane: int, scope: str | None = None) -> None:
        old[lane] = self._lanes[lane]
        closing(self, lane)

    def reopen(self: LaneCache) -> int:
        lane = opening(self)
        self._lanes[lane] = old.pop(lane, _Lane())
        return lane

    def segment(self: Engine, share: Share, draft: Draft) -> Segment:
        request = share.request
        if request.lane is None:
            request.lane = self.model.lanes.open()
            request.held = min(len(self.model.lanes.held(request.lane)), len(request.tokens) - 1)
        end = min(request.held + share.certain, len(request.tokens))
        certain = tuple(request.tokens[request.held : end])
        return Segment(request.lane, request.held, certain, draft, law=end == len(request.tokens))

    patch.setattr(LaneCache, "close", close)
    patch.setattr(LaneCache, "open", reopen)
    patch.setattr(Engine, "_segment", segment)


def every_first_child_is_accepted(patch: Patch) -> None:
    def match(picks: Sequence[int], draft: Draft) -> Verdict:
        return Verdict((0,), picks[1]) if len(draft) else Verdict((), picks[0])

    patch.setattr("sooner.core.verify.match", match)


def the_correction_comes_from_the_root(patch: Patch) -> None:
    from sooner.core.verify import match

    def stale(picks: Sequence[int], draft: Draft) -> Verdict:
        return Verdict(match(picks, draft).path, picks[0])

    patch.setattr("sooner.core.verify.match", stale)


def noise_belongs_to_the_row_and_not_to_the_position(patch: Patch) -> None:
    def by_step(seed: int, position: int, stream: int, *extra: int) -> int:
        return key(seed, 1 if stream == TARGET else position, stream, *extra)

    patch.setattr("sooner.core.noise.key", by_step)


def logits_of_the_row_before(patch: Patch) -> None:
    def shifted(segments: Sequence[Segment]) -> Step:
        step = pack(segments)
        return replace(step, law_rows=(step.law_rows - 1).clamp(min=0))

    patch.setattr("sooner.engine.engine.pack", shifted)


def the_end_is_looked_for_only_at_the_end_of_a_block(patch: Patch) -> None:
    def write(self: Request, tokens: Sequence[int], guesses: int) -> int:
        for count, token in enumerate(tokens):
            self.tokens.append(token)
            self.writer.push(token, drafted=count < guesses)
            if count < len(tokens) - 1 and self.writer.finish == "stop":
                self.writer.finish = None
        return len(tokens)

    patch.setattr(Request, "write", write)


def the_bonus_is_lost(patch: Patch) -> None:
    def write(self: Request, tokens: Sequence[int], guesses: int) -> int:
        return writing(self, tokens[:guesses] if guesses else tokens, guesses)

    writing = Request.write
    patch.setattr(Request, "write", write)


def the_limit_does_not_count_drafts(patch: Patch) -> None:
    def push(self: object, token: int, drafted: bool, complete: bool = False) -> None:
        pushing(self, token, drafted, complete)
        self._count -= drafted  # type: ignore[attr-defined]  # a Writer

    from sooner.engine.stop import Writer

    pushing: Callable[..., None] = Writer.push
    patch.setattr(Writer, "push", push)


def events_come_twice(patch: Patch) -> None:
    stepping = Engine.step

    def twice(self: Engine) -> list[Event]:
        events = stepping(self)
        return [*events, *(event for event in events if event.finish is None)]

    patch.setattr(Engine, "step", twice)


def log_probabilities_of_the_wrong_row(patch: Patch) -> None:
    def rolled(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
        return report(torch.roll(logits, 1, 0), tokens, top)

    patch.setattr("sooner.engine.judge.report", rolled)


def penalties_do_not_count_the_branch(patch: Patch) -> None:
    patch.setattr("sooner.engine.judge.paths", lambda draft: [()] * (1 + len(draft)))


def a_grammar_stands_still_along_the_branch(patch: Patch) -> None:
    masks = Automaton.masks
    patch.setattr(Automaton, "masks", lambda self, draft: masks(self, Draft()).repeat(1 + len(draft), 1))


def lanes_are_kept_after_the_end(patch: Patch) -> None:
    patch.setattr(LaneCache, "close", lambda self, lane, scope=None: None)


def a_draft_ignores_the_room_of_the_pass(patch: Patch) -> None:
    from sooner.engine.scheduler import Scheduler

    patch.setattr(Scheduler, "trim", lambda self, shares, budgets, limit: list(budgets))


MISTAKES = [
    siblings_see_each_other,
    the_root_is_not_seen,
    a_row_sees_one_column_too_many,
    positions_are_off_by_one,
    positions_are_columns,
    accepted_columns_stay_where_they_were,
    settling_trusts_the_count_and_not_the_content,
    a_lane_is_reused_with_what_it_held,
    every_first_child_is_accepted,
    the_correction_comes_from_the_root,
    noise_belongs_to_the_row_and_not_to_the_position,
    logits_of_the_row_before,
    the_end_is_looked_for_only_at_the_end_of_a_block,
    the_bonus_is_lost,
    the_limit_does_not_count_drafts,
    events_come_twice,
    log_probabilities_of_the_wrong_row,
    penalties_do_not_count_the_branch,
    a_grammar_stands_still_along_the_branch,
    lanes_are_kept_after_the_end,
]


def test_without_a_mistake_these_runs_are_right() -> None:
    all_runs()


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m.__name__)
def test_the_mistake_is_seen(mistake: Callable[[Patch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mistake(monkeypatch)
    with pytest.raises(AssertionError):
        all_runs()


def test_a_draft_that_ignores_the_room_of_the_pass_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    a_draft_ignores_the_room_of_the_pass(monkeypatch)
    with pytest.raises((AssertionError, ValueError)):  # a draft on a prompt chunk is refused by the segment
        all_runs()
