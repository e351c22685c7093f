"""Drafters side by side: the same prompts, one process, one target, taking turns. Knows no table.

For every prompt each contender runs in turn, and the order rotates from prompt to prompt, so what the
machine does meanwhile hits all of them alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from sooner.config import EngineConfig
from sooner.control.protocol import StepRecord
from sooner.errors import ConfigError, RequestError, unknown
from sooner.llm import LLM
from sooner.measure.profile import Split, split
from sooner.measure.workload import Question
from sooner.model.load import Loaded, load
from sooner.model.plain import PlainModel
from sooner.params import SamplingParams

BASELINE = "none"
# transformers' own generate, by the name it has here -> its prompt_lookup_num_tokens.
OUTSIDE: Mapping[str, int | None] = {"transformers": None, "transformers:lookup": 10}

WARM_UP = 16  # tokens


@dataclass(frozen=True, slots=True)
class Run:
    """One text that one contender wrote.

    first: how many of the tokens came with the prompt's pass. steps: passes that gave tokens, that one
    included. drafted, accepted: guesses verified and delivered, None where nobody counts them.
    prompt_s, decode_s: seconds up to the first tokens, and from there to the last. split: where they went.
    """

    tokens: tuple[int, ...]
    first: int
    steps: int
    drafted: int | None
    accepted: int | None
    prompt_s: float
    decode_s: float
    split: Split | None = None


Contender = Callable[[Sequence[int], SamplingParams], Run]


@dataclass(frozen=True, slots=True)
class Measured:
    """What one contender did with one prompt. run: of all repeats the one with the median decode_s.

    equal: every repeat wrote the baseline's tokens; None where that is not to be expected.
    """

    run: Run
    equal: bool | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """runs[name][i]: what contender `name` did with questions[i]. dtype, device: the target's."""

    questions: tuple[Question, ...]
    runs: Mapping[str, tuple[Measured, ...]]
    dtype: str
    device: str


@dataclass(frozen=True, slots=True)
class Setup:
    """What is compared and how; options as in LLM. raw: without the chat template.

    Raises ConfigError for a draft named twice, an unknown form of transformers, and repeat below 1.
    """

    model: str
    drafts: tuple[str, ...]
    k: int | None = None
    width: int | None = None
    dtype: str = "auto"
    device: str = "auto"
    raw: bool = False
    repeat: int = 1
    runtime: str = "auto"
    quantize: str | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.repeat < 1:
            raise ConfigError(f"repeat must be at least 1, got {self.repeat}.")
        for draft in self.drafts:
            if draft.startswith("transformers") and draft not in OUTSIDE:
                raise ConfigError(unknown("draft", draft, OUTSIDE))
            if self.drafts.count(draft) > 1:
                raise ConfigError(f"draft {draft!r} is named {self.drafts.count(draft)} times; name it once.")

    @property
    def contenders(self) -> tuple[str, ...]:
        """The drafts, with the baseline in front if it was left out."""
        return self.drafts if BASELINE in self.drafts else (BASELINE, *self.drafts)


def bench(
    setup: Setup,
    questions: Sequence[Question],
    params: SamplingParams,
    progress: Callable[[], None] = lambda: None,
) -> Comparison:
    """Load the target once and compare the drafters on the questions; `progress` is called after every text."""
    target = open_target(setup)
    prompts = encode(target, questions, raw=setup.raw, room=params.max_tokens or 1)
    measured = compare(contenders(target, setup), prompts, params, repeat=setup.repeat, progress=progress)
    dtype = str(target.model.lanes.store.dtype).removeprefix("torch.")
    return Comparison(tuple(questions), measured, dtype, str(target.device))


class Opening(Protocol):
    """What every setup of a measurement says of its target; see `sooner.model.load.load`."""

    @property
    def model(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def runtime(self) -> str: ...
    @property
    def quantize(self) -> str | None: ...
    @property
    def threads(self) -> int | None: ...


def open_target(setup: Opening) -> Loaded:
    """The target of a setup, loaded as it says."""
    return load(
        setup.model,
        dtype=setup.dtype,
        device=setup.device,
        runtime=setup.runtime,
        quantize=setup.quantize,
        threads=setup.threads,
    )


def contenders(target: Loaded, setup: Setup) -> dict[str, Contender]:
    """One contender for each draft, all over the same target; transformers has a copy of its own."""
    made: dict[str, Contender] = {}
    outside: PlainModel | None = None
    for draft in setup.contenders:
        if draft in OUTSIDE:
            outside = outside or PlainModel(target)
            made[draft] = _outside(outside, OUTSIDE[draft])
        else:
            # Shared beginnings would give the second to come the prompt that the first has computed.
            alone = EngineConfig(reuse_prefixes=False)
            how: dict[str, Any] = {"dtype": setup.dtype, "threads": setup.threads, "config": alone}
            made[draft] = _ours(LLM(target, draft, k=setup.k, width=setup.width, **how))
    return made


def encode(target: Loaded, questions: Sequence[Question], *, raw: bool, room: int) -> list[list[int]]:
    """Token ids of every question's first turn, through the chat template unless `raw`.

    Raises RequestError naming the question whose prompt does not leave `room` tokens of the context.
    """
    limit = target.model.context_limit
    prompts = []
    for question in questions:
        text = question.turns[0]
        prompt = target.encode(text) if raw else target.encode_chat([{"role": "user", "content": text}])
        if limit is not None and len(prompt) + room > limit:
            raise RequestError(
                f"question {question.question_id} has {len(prompt)} tokens; with {room} more it does not fit into "
                f"the model's context of {limit}. Lower --max-tokens, or choose others with --category."
            )
        prompts.append(prompt)
    return prompts


def compare(
    racing: Mapping[str, Contender],
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    repeat: int = 1,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, tuple[Measured, ...]]:
    """Run every contender on every prompt, `repeat` times, in an order that rotates.

    First each writes a few tokens after the first prompt, which do not count.
    """
    order = list(racing)
    for name in order:
        racing[name](prompts[0], replace(params, max_tokens=min(params.max_tokens or WARM_UP, WARM_UP)))
    runs: dict[str, list[list[Run]]] = {name: [[] for _ in prompts] for name in order}
    for turn in range(repeat):
        for i, prompt in enumerate(prompts):
            first = (turn + i) % len(order)
            for name in order[first:] + order[:first]:
                runs[name][i].append(racing[name](prompt, params))
                progress()
    expected = [repeats[0].tokens for repeats in runs[BASELINE]]
    unpaired = [] if params.greedy else list(OUTSIDE)  # transformers draws other random numbers
    return {
        name: tuple(
            _measured(repeats, None if name in unpaired else tokens)
            for repeats, tokens in zip(runs[name], expected, strict=True)
        )
        for name in order
    }


def _measured(repeats: Sequence[Run], expected: tuple[int, ...] | None) -> Measured:
    middle = sorted(repeats, key=lambda run: run.decode_s)[(len(repeats) - 1) // 2]
    return Measured(middle, None if expected is None else all(run.tokens == expected for run in repeats))


def _ours(llm: LLM) -> Contender:
    def run(prompt: Sequence[int], params: SamplingParams) -> Run:
        first = 0
        records: list[StepRecord] = []
        llm.engine.watch = records.append
        began = time.perf_counter()
        for chunk in llm.stream(prompt, params):
            first = first or len(chunk.token_ids)
            if chunk.result is not None:
                done = chunk.result
        wall_s = time.perf_counter() - began
        llm.engine.watch = None
        if done.finish_reason == "error":
            raise RequestError(str(done.error))
        s = done.stats
        parts = split(records, wall_s)
        return Run(done.token_ids, first, s.steps, s.drafted, s.accepted, s.prompt_s, s.decode_s, parts)

    return run


def _outside(model: PlainModel, lookup: int | None) -> Contender:
    def run(prompt: Sequence[int], params: SamplingParams) -> Run:
        done = model.generate(prompt, params, lookup)
        return Run(done.tokens, done.first, done.steps, None, None, done.prompt_s, done.decode_s)

    return run
