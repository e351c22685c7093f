"""Prompt lookup: guesses copied from the request's own tokens. Knows no model.

The last n tokens are searched for earlier in the text, longest n first; what followed there is the
guess (Saxena 2023, "prompt lookup decoding"). Among matches of one length the most recent comes first;
further matches become further branches when the budget is wider than a chain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from sooner.config import Budget
from sooner.core.tree import EMPTY, Draft, Trie
from sooner.draft.protocol import Context, Outcome
from sooner.errors import ConfigError


@dataclass(slots=True)
class _Index:
    """Where each n-gram of one request was seen: `ends[n][gram]` lists the positions after it, oldest first."""

    length: int = 0
    ends: dict[int, dict[tuple[int, ...], list[int]]] = field(default_factory=dict)


class LookupDrafter:
    """n-grams of `shortest` to `longest` tokens.

    weak: most tokens copied where a single token is all that matched. Such matches mostly fail at once, and
    a pass of up to four rows costs what one row does. Raises ConfigError unless 1 <= shortest <= longest
    and weak >= 1.
    """

    name = "lookup"
    taps: tuple[int, ...] = ()

    def __init__(self, longest: int = 3, shortest: int = 1, weak: int = 3) -> None:
        if weak < 1:
            raise ConfigError(f"lookup needs weak >= 1, got {weak}.")
        if not 1 <= shortest <= longest:
            raise ConfigError(
                f"lookup needs 1 <= shortest <= longest, got shortest {shortest}, longest {longest}."
            )
        self._sizes, self._weak = range(longest, shortest - 1, -1), weak
        self._known: dict[str, _Index] = {}

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        return [self._one(context, budget) for context, budget in zip(contexts, budgets, strict=True)]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """The text itself is all it needs."""

    def forget(self, request_id: str) -> None:
        self._known.pop(request_id, None)

    def _one(self, context: Context, budget: Budget) -> Draft:
        if budget.empty:
            return EMPTY
        index = self._known.setdefault(context.request_id, _Index())
        if index.length > len(context.tokens):  # the id is new life, not the request we knew
            index = self._known[context.request_id] = _Index()
        self._extend(index, context.tokens)
        trie = Trie(budget.nodes, budget.width)
        for end, size in self._matches(index, context.tokens):
            count = min(budget.depth, self._weak) if size == 1 else budget.depth
            trie.add(_copy(context.tokens, end, count))
            if budget.width == 1 or trie.full:
                break
        return trie.draft()

    def _extend(self, index: _Index, tokens: Sequence[int]) -> None:
        """Index every n-gram that has a token after it."""
        for size in self._sizes:
            ends = index.ends.setdefault(size, {})
            for end in range(max(index.length, size), len(tokens)):
                ends.setdefault(tuple(tokens[end - size : end]), []).append(end)
        index.length = len(tokens)

    def _matches(self, index: _Index, tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Where earlier text matches the end of this one: position after the match, and its length."""
        seen = set()
        for size in self._sizes:
            if size < len(tokens):
                for end in reversed(index.ends[size].get(tuple(tokens[-size:]), ())):
                    if end not in seen:
                        seen.add(end)
                        yield end, size


def _copy(tokens: Sequence[int], end: int, count: int) -> list[int]:
    """`count` tokens from `end` on; past the end of the text the copy goes on copying itself."""
    copied = list(tokens[end : end + count])
    period = len(tokens) - end
    while len(copied) < count:
        copied.append(copied[-period])
    return copied
