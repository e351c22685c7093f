"""One request on its way through the engine. Knows its text and its end, nothing of passes or drafts."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from sooner.core.law import LawParams
from sooner.engine.logprobs import TokenLogprob
from sooner.engine.stats import Tally
from sooner.engine.stop import FinishReason, Writer
from sooner.params import MAX_SEED, SamplingParams


@dataclass(slots=True)
class Request:
    """State of one request.

    tokens: prompt and text so far. lane: its row of the target's cache, None while it waits.
    held: how many of `tokens` the lane holds; the next segment starts there.
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    law: LawParams
    seed: int
    rule: Literal["match", "reject"]
    writer: Writer
    tokens: list[int]
    lane: int | None = None
    held: int = 0
    tally: Tally = field(default_factory=Tally)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    error: str | None = None

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
            self.writer.push(token, drafted=count < guesses)
        return len(tokens)


def new_request(request_id: str, prompt: Sequence[int], params: SamplingParams, writer: Writer) -> Request:
    """A waiting request. Without a seed it gets a fresh one, so its randomness is still keyed."""
    rule = params.rule
    if rule == "auto":
        rule = "match" if params.greedy or params.seed is not None else "reject"
    law = LawParams(params.temperature, max(params.top_k, 0), params.top_p, params.min_p)
    seed = secrets.randbelow(MAX_SEED) if params.seed is None else params.seed
    return Request(request_id, tuple(prompt), params, law, seed, rule, writer, list(prompt))
