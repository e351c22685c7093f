"""A draft model that has another tokenizer than the target. Knows no tokenizer library; texts and bytes only.

Two ways, both exact because the target judges its own ids (reference F). *Re-encoding*: the text is spelled in the
draft's ids, the draft goes on greedily, and what it wrote is spelled in the target's. *Shared ids*: where tokens
are sampled, the draft's law over the ids that spell the same bytes in both, as one over the target's ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from sooner.config import Budget
from sooner.core.edit import LawParams
from sooner.core.tree import EMPTY, Draft, chain
from sooner.draft.model import ModelDrafter
from sooner.draft.protocol import Context, Outcome
from sooner.model.protocol import Model

_BROKEN = "\ufffd"  # how bytes that are no whole character are decoded
_SETTLED = 384  # letters at the end of a text that are spelled anew with every token
_TAIL = 8  # ids before the draft that are spelled together with it
_LEAST_SHARED = 0.02  # of the target's ids: with fewer, sampled requests are re-encoded too


class Encode(Protocol):
    """Ids of a text; `special`: with what the tokenizer puts around a prompt."""

    def __call__(self, text: str, *, special: bool) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class Words:
    """A tokenizer. spelled: the bytes of each id, b"" for those that spell nothing (special, padding).

    decode: text of ids, without special ones. ends: ids that end a text.
    """

    spelled: Sequence[bytes]
    encode: Encode
    decode: Callable[[Sequence[int]], str]
    ends: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Foreign:
    """A draft model with a tokenizer of its own, and the target's."""

    model: Model
    own: Words
    target: Words


def shared_ids(target: Words, own: Words, vocab: int, own_vocab: int) -> tuple[list[int], list[int]]:
    """Ids that spell the same: the target's and the draft's, pair by pair, no id twice, none beyond the logits.

    Of several ids with one spelling the lowest counts. The first ends of text are a pair too.
    """
    left, right = _by_spelling(target), _by_spelling(own)
    pairs = [(i, right[word]) for word, i in left.items() if word in right]
    if target.ends and own.ends:
        pairs.append((target.ends[0], own.ends[0]))
    pairs = sorted((i, j) for i, j in pairs if i < vocab and j < own_vocab)
    return [i for i, _ in pairs], [i for _, i in pairs]


def _by_spelling(words: Words) -> dict[bytes, int]:
    found: dict[bytes, int] = {}
    for i, word in enumerate(words.spelled):
        if word and i not in words.ends:
            found.setdefault(word, i)
    return found


class SharedIds:
    """The draft's law over the ids both have, as one over the target's ids: q renormalised on the intersection.

    theirs, mine: the pairs. text: from a context to the draft's ids.
    """

    def __init__(
        self,
        theirs: Sequence[int],
        mine: Sequence[int],
        vocab: int,
        text: Callable[[Context], Sequence[int] | None],
    ) -> None:
        self.width, self.text = vocab, text
        self._theirs, self._mine = torch.tensor(theirs, dtype=torch.int64), torch.tensor(mine, dtype=torch.int64)
        self._own = dict(zip(theirs, mine, strict=True))

    def theirs(self, logits: Tensor) -> Tensor:
        found = logits.new_full((len(logits), self.width), -torch.inf)
        found[:, self._theirs.to(logits.device)] = logits[:, self._mine.to(logits.device)]
        return found

    def own(self, token: int) -> int:
        return self._own[token]


@dataclass(slots=True)
class Spelling:
    """A growing text in the draft's ids. Its beginning stays as it was spelled, if the tokenizer allows that.

    head, ids: the part that stays and its ids. splits: whether a text cut between two words is spelled as the two
    parts are; found out at the first cut.
    """

    words: Words
    head: str = ""
    ids: list[int] = field(default_factory=list)
    splits: bool = True

    def of(self, text: str) -> list[int]:
        """The ids of `text`."""
        if not text.startswith(self.head):
            self.head, self.ids = "", []
        rest = self._encode(text[len(self.head) :])
        cut = _between_words(text, len(self.head), len(text) - _SETTLED)
        if cut and self.splits:
            first = self._encode(text[len(self.head) : cut])
            second = list(self.words.encode(text[cut:], special=False))
            self.splits = first + second == rest
            if self.splits:
                whole = self.ids + rest
                self.head, self.ids = text[:cut], self.ids + first
                return whole
        return self.ids + rest

    def _encode(self, text: str) -> list[int]:
        return list(self.words.encode(text, special=not self.head))


def _between_words(text: str, start: int, end: int) -> int:
    """The last place in text[start:end] where a word has ended and a space begins; 0 if there is none."""
    for at in range(end - 1, start, -1):
        if text[at].isspace() and not text[at - 1].isspace():
            return at
    return 0


class TranslatingDrafter:
    """Chains from a draft model with another tokenizer.

    vocab: width of the target's logits. confidence: as in ModelDrafter.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, foreign: Foreign, vocab: int, confidence: float = 0.4, *, name: str = "model") -> None:
        self.name = name
        self.model = foreign.model
        self._own, self._target = foreign.own, foreign.target
        self._spellings: dict[str, Spelling] = {}
        theirs, mine = shared_ids(foreign.target, foreign.own, vocab, foreign.model.vocab_size)
        self._shares = len(theirs) >= _LEAST_SHARED * vocab
        self._greedy = ModelDrafter(foreign.model, foreign.model.vocab_size, confidence, name=name)
        ids = SharedIds(theirs, mine, vocab, self._spelled)
        self._drawn = ModelDrafter(foreign.model, vocab, confidence, name=name, ids=ids)

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        drafts = [EMPTY] * len(contexts)
        asked = [i for i, budget in enumerate(budgets) if not budget.empty]
        drawn = [i for i in asked if not contexts[i].law.greedy and self._shares]
        for i, draft in zip(drawn, self._drawn.propose(*_picked(contexts, budgets, drawn)), strict=True):
            drafts[i] = draft
        plain = [i for i in asked if i not in drawn]
        read = {i: self._read(contexts[i]) for i in plain}
        ready = [i for i in plain if read[i] is not None]
        inner = [read[i] for i in ready]
        wished = [
            _in_own_ids(budgets[i], contexts[i], c) for i, c in zip(ready, inner, strict=True) if c is not None
        ]
        made = self._greedy.propose([c for c in inner if c is not None], wished)
        for i, context, draft in zip(ready, inner, made, strict=True):
            assert context is not None
            drafts[i] = self._translated(contexts[i], context.tokens, draft.tokens, budgets[i])
        return drafts

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """The text of the next context says it all."""

    def forget(self, request_id: str) -> None:
        self._spellings.pop(request_id, None)
        self._greedy.forget(request_id)
        self._drawn.forget(request_id)

    def _spelled(self, context: Context) -> list[int] | None:
        """The context in the draft's ids; None where its last character is not whole, or there is no text."""
        text = self._target.decode(context.tokens)
        if text.endswith(_BROKEN):
            return None
        spelling = self._spellings.setdefault(context.request_id, Spelling(self._own))
        return spelling.of(text) or None

    def _read(self, context: Context) -> Context | None:
        """A greedy context in the draft's ids."""
        ids = self._spelled(context)
        return None if ids is None else Context(context.request_id, ids, LawParams(), context.seed, "match")

    def _translated(self, context: Context, own: Sequence[int], drafted: Sequence[int], budget: Budget) -> Draft:
        """A chain of the draft's ids as one of the target's."""
        ended = next((i for i, token in enumerate(drafted) if token in self._own.ends), len(drafted))
        before = list(own[-_TAIL:])
        start, whole = self._own.decode(before), self._own.decode([*before, *drafted[:ended]])
        new = whole[len(start) :].rstrip(_BROKEN)
        if not new or not whole.startswith(start):
            return EMPTY
        ids = self._continued(context.tokens[-_TAIL:], new)
        return chain(ids[: min(budget.depth, budget.nodes)])

    def _continued(self, tail: Sequence[int], new: str) -> list[int]:
        """Target ids that spell `new` after the ids `tail`.

        The target would have spelled the two together; where that does not begin with the tail, apart.
        """
        special = [i for i, token in enumerate(tail) if self._target.spelled and not self._target.spelled[token]]
        tail = tail[special[-1] + 1 :] if special else tail
        before = self._target.decode(tail)
        together = list(self._target.encode(before + new, special=False))
        if together[: len(tail)] == list(tail):
            return together[len(tail) :]
        apart = list(self._target.encode(new, special=False))
        return apart if self._target.decode([*tail, *apart]) == before + new else []


def _in_own_ids(budget: Budget, theirs: Context, own: Context) -> Budget:
    """A chain about as long as the budget's, in the draft's ids; at most twice as many of them."""
    depth = min(budget.depth, budget.nodes)
    return Budget.chain(min(2 * depth, -(-depth * len(own.tokens) // len(theirs.tokens))))


def _picked(
    contexts: Sequence[Context], budgets: Sequence[Budget], which: Sequence[int]
) -> tuple[list[Context], list[Budget]]:
    return [contexts[i] for i in which], [budgets[i] for i in which]
