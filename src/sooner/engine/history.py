"""What a text holds, token by token, for the penalties. Knows no logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sooner.core.edit import Past


class History:
    """Counts the tokens of one request as it grows.

    tokens: the request's own list; `written` says how many of them, from `prompt` on, are text.
    Memory is bounded by the vocabulary, whatever the length of the text.
    """

    def __init__(self, tokens: Sequence[int], prompt: int) -> None:
        self._tokens, self._prompt = tokens, prompt
        self._counts: dict[int, int] = {}
        self._seen = 0

    def past(self) -> Past:
        """The state after the last token of the text."""
        for i in range(self._seen, len(self._tokens)):
            token = self._tokens[i]
            self._counts[token] = self._counts.get(token, 0) + (i >= self._prompt)
        self._seen = len(self._tokens)
        ids = torch.tensor(list(self._counts), dtype=torch.int64)
        counts = torch.tensor(list(self._counts.values()), dtype=torch.float32)
        return Past(self._tokens, len(self._tokens) - self._prompt, ids, counts)
