"""What the engine asks of a controller. Knows no policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from sooner.config import Budget
from sooner.params import Speculation


class View(NamedTuple):  # made for every request in every pass, which a dataclass takes four times as long for
    """What a controller may know of a request that takes part in this pass.

    prompt, written: tokens of prompt and of text. rows: certain tokens it puts into the pass; held: tokens its
    lane holds already. whole: the pass reaches its last token, so it emits one at least and may draft.
    speculation: what the caller asked for.
    """

    request_id: str
    prompt: int
    written: int
    rows: int = 1
    held: int = 0
    whole: bool = True
    speculation: Speculation = "auto"


@dataclass(frozen=True, slots=True)
class Guess:
    """A draft as a controller sees it: a tree of tokens (parents[i] < i, -1 = the root).

    scores: the drafter's estimates that the path to a node survives, or None. drawn: the tokens were drawn at
    random and are judged by the law they were drawn from, so none may be left out because of its value.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    scores: tuple[float, ...] | None = None
    drawn: bool = False

    def __len__(self) -> int:
        return len(self.tokens)


NO_GUESS = Guess()


class Tried(NamedTuple):
    """What one pass brought for one request. tokens: the new ones. guess: the draft as it was offered, of
    which the nodes `kept` were verified; path: those that were accepted, from the root down."""

    request_id: str
    tokens: tuple[int, ...]
    guess: Guess = NO_GUESS
    kept: tuple[int, ...] = ()
    path: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one pass cost and brought, over all its requests.

    rows: rows of the pass. draft_s, pass_s: seconds spent drafting and in the target. judge_s: in laws and
    verification. write_s: in appending tokens, stop rules and text. settle_s: in the cache. control_s: in the
    controller, for whoever watches also what it did with this record. step_s: in all.
    drafted, accepted, emitted: tokens; emitted counts corrections and bonus tokens too.
    context: tokens in all lanes after the pass. tried: request by request.
    """

    rows: int
    requests: int
    draft_s: float
    pass_s: float
    judge_s: float
    write_s: float
    settle_s: float
    step_s: float
    drafted: int
    accepted: int
    emitted: int
    context: int = 0
    tried: tuple[Tried, ...] = ()
    control_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Note:
    """What a controller says of a request that has ended.

    used: "auto", "off", "k=4", ... why_off: why nothing was guessed, "" where something was.
    speedup: estimated seconds of plain decoding in the same company / seconds taken; None = no estimate.
    """

    used: str
    why_off: str = ""
    speedup: float | None = None


class Controller(Protocol):
    """Chooses the budgets. It must never make the text depend on load: it decides speed alone."""

    def budgets(self, views: Sequence[View]) -> list[Budget]:
        """How much each request may guess, at most."""

    def keep(self, views: Sequence[View], guesses: Sequence[Guess]) -> list[tuple[int, ...] | None]:
        """Which nodes of each draft are worth their rows, in rising order, each with its parent; None = all.

        Of a drawn guess, what is left out must not depend on the tokens drawn.
        """

    def observe(self, record: StepRecord) -> None:
        """Called after every pass."""

    def leave(self, request_id: str) -> Note:
        """The request has ended; drop what is kept for it."""
