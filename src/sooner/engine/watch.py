"""Someone who looks on while a text is written, and may end it. Knows no passes and no drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Watch(Protocol):
    """Looks on at one request. Must not raise: what it raises ends the step, for all requests."""

    wants_logits: bool

    def logits(self, rows: Tensor) -> None:
        """[n, V]: the model's own logits that the next n tokens come from, at most; called before them and
        only if `wants_logits`. A text that ends early takes fewer."""

    def token(self, tokens: Sequence[int]) -> bool:
        """The text (prompt first) has grown by its last token. True: it ends with it."""
