"""Prepared calls of transformers' generate, run together on one engine. Knows no keywords of transformers."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput

from sooner.config import EngineConfig
from sooner.control.protocol import Controller
from sooner.draft.protocol import Drafter
from sooner.engine.engine import Engine, Event
from sooner.engine.request import Request
from sooner.engine.stats import Acceptance
from sooner.errors import RequestError
from sooner.integrations import laws
from sooner.integrations.call import Row
from sooner.integrations.ends import Ends, RowWatch, Together
from sooner.integrations.output import CallStats, Columns, by_step, sequences
from sooner.model.protocol import Model
from sooner.params import MAX_SEED, Rule, SamplingParams

logger = logging.getLogger("sooner")


@dataclass(frozen=True, slots=True)
class Prepared:
    """One call: the batch as transformers prepared it, read.

    processors: transformers' list. copies: rows in a row that share a prompt. pad: fills rows that ended.
    """

    input_ids: Tensor
    rows: Sequence[Row]
    processors: Sequence[Any]
    ends: Ends
    sampled: bool
    copies: int
    pad: int | None
    rule: Any = "auto"
    seed: int | None = None
    streamer: Any = None
    wants_dict: bool = False
    wants_scores: bool = False
    wants_logits: bool = False


@dataclass(slots=True)
class _Text:
    """One row on its way through the engine. most: new tokens asked for."""

    request: Request
    watch: RowWatch
    processor: laws.RowProcessor | None
    most: int

    @property
    def written(self) -> list[int]:
        return self.request.tokens[len(self.request.prompt) :]

    def check(self) -> None:
        """Raise what the caller's own code raised, or RequestError if the row could not go on."""
        for theirs in (self.watch.error, self.processor.error if self.processor else None):
            if theirs is not None:
                raise theirs
        if self.request.finish == "error":
            raise RequestError(f"row {self.watch.place}: {self.request.error}")
        if self.request.finish == "length" and len(self.written) < self.most:
            raise RequestError(
                f"row {self.watch.place}: the text fills the model's context of {len(self.request.tokens)} tokens "
                f"and has not ended. Ask for at most {len(self.written)} new tokens here."
            )


@dataclass(frozen=True, slots=True)
class Written:
    """What came of one call. written: the new tokens, row by row."""

    call: Prepared
    texts: Sequence[_Text]
    written: Sequence[Sequence[int]]


def run(
    model: Model,
    drafter: Drafter,
    controller: Controller,
    calls: Sequence[Prepared],
    lanes: int,
    drawn_rule: Rule = "traversal",
) -> tuple[list[Written], CallStats]:
    """Write all rows of all calls, `lanes` of them at a time. Raises what the callers' own code raises.

    drawn_rule: how guesses of sampled rows are judged that have no seed.
    """
    engine = Engine(
        model,
        drafter,
        controller,
        config=EngineConfig(max_requests=lanes, step_rows=max(1024, 2 * lanes)),
    )
    texts: list[list[_Text]] = []
    passes, began = 0, time.perf_counter()
    try:
        for call in calls:
            texts.append(_add(engine, model, call, drawn_rule))
        streams = [_columns(call) for call in calls]
        where = {t.request.id: (c, r) for c, each in enumerate(texts) for r, t in enumerate(each)}
        while engine.busy:
            for event in engine.step():
                _deliver(event, texts, streams, where)
            passes += 1
        written = [_cut(call, each) for call, each in zip(calls, texts, strict=True)]
        for stream, one in zip(streams, written, strict=True):
            if stream is not None:
                stream.rest(max(len(row) for row in one.written))
    finally:
        for each in texts:
            for text in each:
                engine.abort(text.request)
        for call in calls:
            if call.streamer is not None:
                call.streamer.end()  # after an exception too: whoever iterates would wait for ever
    rows = tuple(text.request.tally.close() for each in texts for text in each)
    stats = CallStats(drafter.name, sum(rows, Acceptance()), rows, passes, time.perf_counter() - began)
    logger.info("generate: %s", stats)
    return written, stats


def result(one: Written, stats: CallStats) -> Any:
    """What transformers' generate returns for one call, with the record of what was done as `sooner_stats`."""
    call, steps = one.call, max(len(row) for row in one.written)
    ids = sequences(call.input_ids, one.written, call.pad)
    if not call.wants_dict:
        ids.sooner_stats = stats  # type: ignore[attr-defined]  # a tensor carries attributes
        return ids
    watches = [text.watch for text in one.texts]
    out = GenerateDecoderOnlyOutput(
        sequences=ids,
        scores=by_step([watch.scores for watch in watches], steps) if call.wants_scores else None,
        logits=by_step([watch.logits_rows for watch in watches], steps) if call.wants_logits else None,
    )
    out.sooner_stats = stats
    return out


def _add(engine: Engine, model: Model, call: Prepared, drawn_rule: Rule) -> list[_Text]:
    """One request a row; row i draws from the i-th stream of the seed."""
    drawn = call.seed is None and call.sampled
    seed = int(torch.randint(MAX_SEED, (1,))) if drawn else call.seed or 0  # from torch's own, as in transformers
    rule = drawn_rule if drawn and call.rule == "auto" else call.rule
    together = Together(len(call.rows), call.ends.padded)
    return [_text(engine, model, call, r, together, {"seed": seed, "rule": rule}) for r in range(len(call.rows))]


def _text(
    engine: Engine, model: Model, call: Prepared, r: int, together: Together, chance: Mapping[str, Any]
) -> _Text:
    row = call.rows[r]
    whole = laws.of_row(call.processors, r, call.copies)
    shape, left = laws.split(whole, row, sampled=call.sampled)
    processor = laws.RowProcessor(left, row) if left else None
    params = SamplingParams(
        max_tokens=call.ends.max_tokens,
        stop_token_ids=call.ends.stop_ids,
        logits_processors=() if processor is None else (processor,),
        **shape,
        **chance,
    )
    watch = RowWatch(
        r,
        row,
        call.ends.asked,
        together,
        model.lanes.store.device,
        wants_logits=call.wants_logits or call.wants_scores,
        processors=whole if call.wants_scores else None,
    )
    return _Text(engine.add(row.prompt, params, copy=r, watch=watch), watch, processor, call.ends.max_tokens)


def _columns(call: Prepared) -> Columns | None:
    return None if call.streamer is None else Columns(call.streamer, len(call.rows), call.pad)


def _deliver(
    event: Event,
    texts: Sequence[Sequence[_Text]],
    streams: Sequence[Columns | None],
    where: Mapping[str, tuple[int, int]],
) -> None:
    c, r = where[event.request.id]
    texts[c][r].check()
    stream = streams[c]
    if stream is not None:
        stream.put(r, event.tokens, event.finish is not None)


def _cut(call: Prepared, texts: Sequence[_Text]) -> Written:
    """Where rows end together, some may have written past that point."""
    end = texts[0].watch.together.length
    return Written(call, texts, [text.written[:end] for text in texts])
