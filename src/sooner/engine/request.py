"""One request on its way through the engine. Knows its text and its end, nothing of passes or drafts."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from sooner.core import noise
from sooner.core.edit import LawParams
from sooner.core.verify import Rule
from sooner.engine.constraint import Constraint
from sooner.engine.history import History
from sooner.engine.logprobs import TokenLogprob
from sooner.engine.stats import Tally
from sooner.engine.stop import FinishReason, Writer
from sooner.engine.watch import Watch
from sooner.params import MAX_SEED, SamplingParams


@dataclass(slots=True, eq=False)  # two requests are never the same one
class Request:
    """State of one request.

    tokens: prompt and text so far. lane: its row of the target's cache, None while it waits.
    held: how many of `tokens` the lane holds; the next segment starts there.
    history: what penalties count; None where nothing acts on the logits. constraint: its grammar.
    watch: who looks on, and may end the text.
    prediction: the text the caller expects, for drafters.
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    law: LawParams
    seed: int
    rule: Rule
    writer: Writer
    tokens: list[int]
    history: History | None = None
    constraint: Constraint | None = None
    lane: int | None = None
    held: int = 0
    tally: Tally = field(default_factory=Tally)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    error: str | None = None
    watch: Watch | None = None
    prediction: tuple[int, ...] = ()
    expires: float | None = None  # on the engine's clock

    @property
    def finish(self) -> FinishReason | None:
        return self.writer.finish

    @property
    def missing(self) -> int:
        """Certain tokens the lane has not seen; at least 1, since the last token always has to be run."""
        return len(self.tokens) - self.held

    @property
    def written(self) -> int:
        return len(self.tokens) - len(self.prompt)

    def write(self, tokens: Sequence[int], guesses: int) -> int:
        """Append tokens, the first `guesses` of them accepted drafts, up to the end of the text.

        Returns how many were taken.
        """
        for count, token in enumerate(tokens):
            if self.finish is not None:
                return count
            self.tokens.append(token)
            if self.constraint is not None:
                self.constraint.advance((token,))
            complete = self.constraint is not None and self.constraint.ended
            self.writer.push(token, count < guesses, complete)
            if self.watch is not None and self.watch.token(self.tokens):
                self.writer.end("stop")
        return len(tokens)


def new_request(
    request_id: str,
    prompt: Sequence[int],
    params: SamplingParams,
    writer: Writer,
    law: LawParams,
    constraint: Constraint | None = None,
    copy: int = 0,
) -> Request:
    """A waiting request. Without a seed it gets a fresh one, so its randomness is still keyed.

    copy: which of the n texts of one prompt this is; each draws from a stream of its own.
    """
    rule: Rule = "match" if params.greedy or params.seed is not None else "traversal"
    if params.rule != "auto":
        rule = params.rule
    seed = secrets.randbelow(MAX_SEED) if params.seed is None else params.seed
    seed = noise.key(seed, copy, noise.COPY) % MAX_SEED if copy else seed
    tokens = list(prompt)
    history = History(tokens, len(prompt)) if law.edits or constraint is not None else None
    return Request(request_id, tuple(prompt), params, law, seed, rule, writer, tokens, history, constraint)


def law_params(params: SamplingParams, ends: frozenset[int], bad_words: Sequence[tuple[int, ...]]) -> LawParams:
    """What shapes the law of a request. ends: ids that end its text; bad_words: as token ids."""
    return LawParams(
        temperature=params.temperature,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        min_p=params.min_p,
        typical_p=params.typical_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        bias=tuple((token, added) for token, added in params.logit_bias.items() if added),
        allowed=params.allowed_token_ids,
        bad_words=tuple(bad_words),
        until=params.min_tokens,
        forbidden=tuple(sorted(ends)) if params.min_tokens else (),
        processors=params.logits_processors,
    )
