"""The acceptance record of a request. Counts what was delivered, not what was verified and thrown away."""

from __future__ import annotations

from dataclasses import dataclass, field

from sooner.control.protocol import Note


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What speculation did for one request (or, summed, for many).

    steps: passes of the target that gave at least one token. emitted: tokens delivered.
    drafted: guesses verified. accepted: guesses delivered. accepted_by_depth[d]: how many at depth d + 1.
    drafted_by_depth: passes whose draft reached that depth, so their ratio is the acceptance at a depth.
    draft_failures: drafts that were refused because the drafter raised or broke the protocol.
    prompt_s: from being admitted to the first token; decode_s: from there to the end (seconds).
    first: tokens that came with the prompt's own pass (a draft may already have been accepted in it).
    reused: prompt tokens that another request had computed already. preempted: how often it lost its lane.
    speculation: what was used ("auto", "off", "k=4"; "mixed" in a sum); why_off: why nothing was guessed.
    speedup: estimated seconds of plain decoding in the same company / seconds taken; None = no estimate.
    """

    steps: int = 0
    emitted: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_by_depth: tuple[int, ...] = ()
    drafted_by_depth: tuple[int, ...] = ()
    draft_failures: int = 0
    prompt_s: float = 0.0
    decode_s: float = 0.0
    first: int = 0
    reused: int = 0
    preempted: int = 0
    speculation: str = ""
    why_off: str = ""
    speedup: float | None = None

    @property
    def tokens_per_step(self) -> float:
        """emitted / steps; 1.00 is plain decoding. Correction and bonus tokens count."""
        return self.emitted / self.steps if self.steps else 0.0

    @property
    def acceptance(self) -> float:
        """accepted / drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_second(self) -> float:
        """(emitted - first) / decode_s: the first tokens belong to the prompt's time."""
        return max(self.emitted - self.first, 0) / self.decode_s if self.decode_s > 0 else 0.0

    def __add__(self, other: Acceptance) -> Acceptance:
        return Acceptance(
            self.steps + other.steps,
            self.emitted + other.emitted,
            self.drafted + other.drafted,
            self.accepted + other.accepted,
            _add(self.accepted_by_depth, other.accepted_by_depth),
            _add(self.drafted_by_depth, other.drafted_by_depth),
            self.draft_failures + other.draft_failures,
            self.prompt_s + other.prompt_s,
            self.decode_s + other.decode_s,
            self.first + other.first,
            self.reused + other.reused,
            self.preempted + other.preempted,
            _merged(self.speculation, other.speculation),
            self.why_off if self.why_off == other.why_off else "",
            _mean(self, other),
        )

    def as_dict(self) -> dict[str, object]:
        """Plain values for JSON, derived figures included."""
        return {
            "steps": self.steps,
            "emitted": self.emitted,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "accepted_by_depth": list(self.accepted_by_depth),
            "drafted_by_depth": list(self.drafted_by_depth),
            "draft_failures": self.draft_failures,
            "tokens_per_step": round(self.tokens_per_step, 4),
            "acceptance": round(self.acceptance, 4),
            "prompt_s": round(self.prompt_s, 4),
            "decode_s": round(self.decode_s, 4),
            "tok_s": round(self.tokens_per_second, 2),
            "reused": self.reused,
            "preempted": self.preempted,
            "speculation": self.speculation,
            "why_off": self.why_off,
            "speedup": None if self.speedup is None else round(self.speedup, 3),
        }


def _merged(left: str, right: str) -> str:
    return left or right if left == right or not (left and right) else "mixed"


def _mean(left: Acceptance, right: Acceptance) -> float | None:
    """Speed-ups weighted by the steps they were estimated over."""
    known = [(part.speedup, part.steps) for part in (left, right) if part.speedup is not None and part.steps]
    return sum(value * steps for value, steps in known) / sum(steps for _, steps in known) if known else None


def _add(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    long, short = (left, right) if len(left) >= len(right) else (right, left)
    return tuple(a + b for a, b in zip(long, short + (0,) * (len(long) - len(short)), strict=True))


@dataclass(slots=True)
class Tally:
    """The record while it is being written."""

    steps: int = 0
    emitted: int = 0
    drafted: int = 0
    draft_failures: int = 0
    accepted_by_depth: list[int] = field(default_factory=list)
    drafted_by_depth: list[int] = field(default_factory=list)
    admitted: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    first: int = 0
    reused: int = 0
    preempted: int = 0
    note: Note = Note("")  # noqa: RUF009  # frozen

    def add_step(self, drafted: int, depth: int, accepted: int, emitted: int, now: float) -> None:
        """One pass: nodes verified, depth of their tree, guesses and tokens delivered."""
        if not self.steps:
            self.first_token = now
            self.first = emitted
        self.last_token = now
        self.steps += 1
        self.emitted += emitted
        self.drafted += drafted
        _count(self.drafted_by_depth, depth)
        _count(self.accepted_by_depth, accepted)

    def close(self) -> Acceptance:
        return Acceptance(
            self.steps,
            self.emitted,
            self.drafted,
            sum(self.accepted_by_depth),
            tuple(self.accepted_by_depth),
            tuple(self.drafted_by_depth),
            self.draft_failures,
            max(self.first_token - self.admitted, 0.0) if self.steps else 0.0,
            self.last_token - self.first_token,
            self.first,
            self.reused,
            self.preempted,
            self.note.used,
            self.note.why_off,
            self.note.speedup,
        )


def _count(by_depth: list[int], depth: int) -> None:
    by_depth += [0] * (depth - len(by_depth))
    for d in range(depth):
        by_depth[d] += 1
