"""Where the time of a text goes: the target's pass, and everything around it. Measures nothing itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

from sooner.control.protocol import StepRecord
from sooner.control.shapes import levels


@dataclass(frozen=True, slots=True)
class Split:
    """Seconds, summed over the steps of one text or of many.

    wall_s: from asking for a text to its last piece. pass_s: passes of the target. draft_s: drafting. judge_s:
    laws and verification. write_s: appending tokens, stop rules, detokenising. settle_s: the cache.
    control_s: the controller. step_s: whole steps. levels: of all drafts, one after another, verified or not.
    """

    steps: int = 0
    wall_s: float = 0.0
    step_s: float = 0.0
    pass_s: float = 0.0
    draft_s: float = 0.0
    judge_s: float = 0.0
    write_s: float = 0.0
    settle_s: float = 0.0
    control_s: float = 0.0
    levels: int = 0

    @property
    def schedule_s(self) -> float:
        """What a step does besides: planning, packing, counting."""
        named = self.pass_s + self.draft_s + self.judge_s + self.write_s + self.settle_s + self.control_s
        return self.step_s - named

    @property
    def stream_s(self) -> float:
        """What happens between steps: taking the request in, and handing the pieces out."""
        return self.wall_s - self.step_s

    @property
    def outside(self) -> float:
        """(wall_s - pass_s) / wall_s."""
        return 1 - self.pass_s / self.wall_s if self.wall_s else 0.0

    def cost(self, plain: Split) -> float | None:
        """c of the literature: seconds of one level of drafting over those of a pass of plain decoding."""
        if not self.levels or not plain.pass_s:
            return None
        return self.draft_s / self.levels / (plain.pass_s / plain.steps)

    def __add__(self, other: Split) -> Split:
        return Split(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def parts(self) -> dict[str, float]:
        """Every part of the wall time by what it is, in seconds; they sum to wall_s."""
        return {
            "target's pass": self.pass_s,
            "drafting": self.draft_s,
            "controller": self.control_s,
            "law and verify": self.judge_s,
            "scheduler": self.schedule_s,
            "cache": self.settle_s,
            "text": self.write_s,
            "streaming": self.stream_s,
        }

    def as_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        derived = {"schedule_s": self.schedule_s, "stream_s": self.stream_s, "outside": self.outside}
        return {name: round(value, 6) for name, value in (asdict(self) | derived).items()}


def split(records: Sequence[StepRecord], wall_s: float) -> Split:
    """The split of one text that took `wall_s` seconds and these steps."""
    return Split(
        len(records),
        wall_s,
        step_s=sum(record.step_s for record in records),
        pass_s=sum(record.pass_s for record in records),
        draft_s=sum(record.draft_s for record in records),
        judge_s=sum(record.judge_s for record in records),
        write_s=sum(record.write_s for record in records),
        settle_s=sum(record.settle_s for record in records),
        control_s=sum(record.control_s for record in records),
        levels=sum(max(levels(tried.guess), default=0) for record in records for tried in record.tried),
    )
