"""What the engine asks of a grammar that constrains one text. Knows no grammar library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from sooner.core.tree import Draft, chain
from sooner.structured import StructuredOutputs


class Constraint(Protocol):
    """Follows one text. Its state is a function of the tokens it was advanced by, nothing else."""

    @property
    def ended(self) -> bool:
        """Whether the text is complete and nothing may follow, not even an end-of-text id."""

    def masks(self, draft: Draft) -> Tensor:
        """bool [1 + n, V]: which ids may follow the root, and each node. Rows of nodes that the grammar does
        not allow are all true (they cannot be reached). Leaves the state as it was."""

    def advance(self, tokens: Sequence[int]) -> None:
        """The text has grown by these tokens, each of which the masks allowed."""

    def forced(self, limit: int) -> tuple[int, ...]:
        """Tokens, `limit` at most, that spell what the grammar leaves no choice about; free guesses."""


Compile = Callable[[StructuredOutputs], Constraint]
"""A fresh constraint for one text. Raises ConfigError if the schema, expression or grammar is unsound, or
takes longer to compile than the bound."""

FORCED = 16  # forced tokens guessed at most in one pass


def with_forced(draft: Draft, constraint: Constraint, room: int) -> Draft:
    """The forced tokens as a chain where there are any, else the drafter's draft."""
    forced = constraint.forced(min(room, FORCED)) if room > 0 else ()
    return chain(forced) if forced else draft
