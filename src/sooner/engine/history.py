"""What a text holds, token by token, for the penalties. Knows no logits."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from sooner.core.edit import Past


class History:
    """Counts the tokens of one request as it grows.

    tokens: the request's own list; `written` says how many of them, from `prompt` on, are text.
    Memory is bounded by the vocabulary, whatever the length of the text.
    """

    def __init__(self, tokens: Sequence[int], prompt: int) -> None:
        self._tokens, self._prompt = tokens, prompt
        self._ids, self._counts = array("q"), array("f")
        self._place: dict[int, int] = {}
        self._seen = 0

    def past(self) -> Past:
        """The state after the last token of the text."""
        for i in range(self._seen, len(self._tokens)):
            token = self._tokens[i]
            at = self._place.setdefault(token, len(self._ids))
            if at == len(self._ids):
                self._ids.append(token)
                self._counts.append(0)
            self._counts[at] += i >= self._prompt
        self._seen = len(self._tokens)
        written = len(self._tokens) - self._prompt
        return Past(self._tokens, written, self._ids, self._counts, self._place)
