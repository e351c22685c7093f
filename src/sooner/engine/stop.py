"""Where a text ends: end-of-text ids, stop ids, stop strings, token limits. Knows no model and no draft.

Tokens come one by one, however many a pass accepted, so an end in the middle of an accepted run is the
same as an end anywhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sooner.engine.detokenize import Detokenizer

FinishReason = Literal["stop", "length", "abort", "error", "deadline"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text, and whether the token that brought it was an accepted guess."""

    text: str
    drafted: bool


class Writer:
    """Turns the tokens of one request into text and decides when it ends.

    stop_ids: ids that end the text; their own text is left out unless `keep_stop`.
    stops: strings that end the text; it is cut before the first (after it, with `keep_stop`).
    room: tokens that may be written at most.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        stop_ids: frozenset[int],
        stops: Sequence[str],
        keep_stop: bool,
        room: int | None,
    ) -> None:
        self._detokenizer = detokenizer
        self._stop_ids, self._stops, self._keep_stop, self._room = stop_ids, tuple(stops), keep_stop, room
        self._held: list[Piece] = []  # text that may yet turn into a stop string
        self._ready: list[Piece] = []
        self._count = 0
        self.text = ""
        self.finish: FinishReason | None = None

    def push(self, token: int, drafted: bool, complete: bool = False) -> None:
        """Take the next token. `finish` says whether the text ends with it; call no more then.

        complete: a grammar allows nothing after it, so the text ends by itself even where there is no more room.
        """
        self._count += 1
        stopped = token in self._stop_ids
        if not stopped or self._keep_stop:
            self._append(Piece(self._detokenizer.push(token), drafted))
        if self.finish is None and (stopped or complete):
            self.end("stop")
        if self.finish is None and self._room is not None and self._count >= self._room:
            self.end("length")

    def end(self, reason: FinishReason) -> None:
        """End here, giving out what was held back."""
        if self.finish is None:
            self._append(Piece(self._detokenizer.finish(), False))
        if self.finish is None:
            self.finish = reason
            self._release(len(self._held_text()))

    def take(self) -> tuple[Piece, ...]:
        """The pieces that have become final since the last call."""
        taken = tuple(self._ready)
        self._ready.clear()
        return taken

    def _held_text(self) -> str:
        return "".join(piece.text for piece in self._held)

    def _append(self, piece: Piece) -> None:
        if not piece.text:
            return
        self._held.append(piece)
        text = self._held_text()
        found = [(text.index(stop), len(stop)) for stop in self._stops if stop in text]
        if found:
            start, length = min(found)
            self._release(start + (length if self._keep_stop else 0))
            self._held.clear()
            self.finish = "stop"
        else:
            self._release(len(text) - self._undecided(text))

    def _undecided(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string begins."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0

    def _release(self, count: int) -> None:
        """Give out the first `count` characters that are held."""
        while count > 0 and self._held:
            piece = self._held.pop(0)
            given = Piece(piece.text[:count], piece.drafted)
            if len(piece.text) > count:
                self._held.insert(0, Piece(piece.text[count:], piece.drafted))
            self._ready.append(given)
            self.text += given.text
            count -= len(given.text)
