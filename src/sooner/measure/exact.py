"""Is the text really the same? Drafters against plain decoding, every difference judged by its margin.

Knows no table and no terminal. A text that is not the plain one parts from it at some token. There the
plain path scores what both agree on, and the margin between the two tokens tells a near-tie, which
rounding may decide either way, from a mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from sooner.core import noise
from sooner.errors import ConfigError, RequestError
from sooner.llm import LLM, Result
from sooner.measure.bench import BASELINE, encode, open_target
from sooner.measure.rows import Noise, after, probe
from sooner.measure.workload import Question
from sooner.model.load import Loaded
from sooner.params import SamplingParams
from sooner.testing import ShiftedModel

Word = Literal["PASS", "NUMERIC", "BUG"]
Mode = Literal["greedy", "sampled"]
MODES: tuple[Mode, ...] = ("greedy", "sampled")

_PROBED = 4  # prompts whose rows are looked at
_HEIGHT = 9  # rows of a draft there, where k does not say


@dataclass(frozen=True, slots=True)
class Setup:
    """What is verified and how; options as in LLM.

    drafts: each is held to plain decoding. max_tokens: of every text. temperature, seed: of the sampled
    texts. batch: prompts that a drafter serves at once (plain decoding always serves one). raw: without the
    chat template. inject_fault: shift one position id in every draft, which must come out as a BUG.

    Raises ConfigError naming what is out of range.
    """

    model: str
    drafts: tuple[str, ...]
    k: int | None = None
    width: int | None = None
    max_tokens: int = 64
    temperature: float = 1.0
    seed: int = 0
    batch: int = 1
    dtype: str = "auto"
    device: str = "auto"
    runtime: str = "auto"
    quantize: str | None = None
    threads: int | None = None
    raw: bool = False
    inject_fault: bool = False

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ConfigError(f"batch must be at least 1, got {self.batch}.")
        if self.temperature == 0:
            raise ConfigError(
                "temperature must be above 0: it is that of the sampled texts, greedy ones come anyway."
            )
        for mode in MODES:
            self.params(mode)
        for draft in self.drafts:
            if self.drafts.count(draft) > 1:
                raise ConfigError(f"draft {draft!r} is named {self.drafts.count(draft)} times; name it once.")
            if draft == BASELINE:
                raise ConfigError("draft 'none' is plain decoding itself; name a drafter to compare with it.")

    def params(self, mode: Mode) -> SamplingParams:
        if mode == "greedy":
            return SamplingParams(max_tokens=self.max_tokens)
        return SamplingParams(max_tokens=self.max_tokens, temperature=self.temperature, seed=self.seed)


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a text parts from the plain one.

    position: index among the new tokens. expected, got: the plain text's token there and the other one, with
        what they spell; None where a text has ended, and there is no margin then.
    margin: greedy: logit of the plain text's token minus that of the other one, by the plain path. Sampled:
        the same of log p + Gumbel noise, which is what a sampled token is the largest of: the smallest
        change of scores that would swap the two. bound: what rounding may do to that margin.
    """

    question_id: int | str
    draft: str
    mode: Mode
    position: int
    expected: int | None
    got: int | None
    spelled: tuple[str, str]
    margin: float | None
    bound: float

    @property
    def word(self) -> Word:
        small = self.margin is not None and abs(self.margin) <= self.bound
        return "NUMERIC" if small else "BUG"


@dataclass(frozen=True, slots=True)
class Outcome:
    """All texts of one drafter in one mode. steps, tokens: passes and tokens of the drafter's texts."""

    draft: str
    mode: Mode
    texts: int
    divergences: tuple[Divergence, ...]
    steps: int
    tokens: int

    @property
    def identical(self) -> int:
        return self.texts - len(self.divergences)

    @property
    def word(self) -> Word:
        words = {divergence.word for divergence in self.divergences}
        return "BUG" if "BUG" in words else "NUMERIC" if words else "PASS"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of every drafter and mode, and the noise of the rows they ran on."""

    outcomes: tuple[Outcome, ...]
    noise: Noise
    device: str

    @property
    def word(self) -> Word:
        """BUG if any text or any row is beyond rounding, NUMERIC if any text differs, else PASS."""
        words = {outcome.word for outcome in self.outcomes}
        if self.noise.broken or "BUG" in words:
            return "BUG"
        return "NUMERIC" if "NUMERIC" in words else "PASS"


def texts(setup: Setup, questions: int) -> int:
    """How many texts `verify` writes: progress is told of each."""
    return questions * len(MODES) * (1 + len(setup.drafts))


def verify(
    setup: Setup, questions: Sequence[Question], progress: Callable[[int], None] = lambda count: None
) -> Verdict:
    """Load the target once and hold every drafter to plain decoding, greedy and sampled with a seed."""
    target = open_target(setup)
    prompts = encode(target, questions, raw=setup.raw, room=setup.max_tokens)
    drafting = replace(target, model=ShiftedModel(target.model)) if setup.inject_fault else target
    plain = LLM(target, BASELINE)
    drafters = {
        # A fixed k: a controller that turns a drafter off would leave nothing to compare.
        name: LLM(drafting, name, k=setup.k or 8, width=setup.width, dtype=setup.dtype, threads=setup.threads)
        for name in setup.drafts
    }
    expected = {mode: _write(plain, prompts, setup.params(mode), 1, progress) for mode in MODES}
    found = _probe(target, drafting, prompts, expected["greedy"], setup)
    ids = [question.question_id for question in questions]
    outcomes = []
    for name, llm in drafters.items():
        for mode in MODES:
            written = _write(llm, prompts, setup.params(mode), setup.batch, progress)
            pairs = zip(ids, expected[mode], written, strict=True)
            judged = [_judge(target, setup, found, (name, mode), *pair) for pair in pairs]
            steps, tokens = (sum(getattr(one.stats, part) for one in written) for part in ("steps", "emitted"))
            outcomes.append(Outcome(name, mode, len(prompts), tuple(filter(None, judged)), steps, tokens))
    return Verdict(tuple(outcomes), found, str(target.device))


def _write(
    llm: LLM,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    batch: int,
    progress: Callable[[int], None],
) -> list[Result]:
    written: list[Result] = []
    for start in range(0, len(prompts), batch):
        results = llm.generate([*prompts[start : start + batch]], params)
        for one in results:
            if one.finish_reason == "error":
                raise RequestError(str(one.error))
        written += results
        progress(len(results))
    return written


def _probe(
    target: Loaded, drafting: Loaded, prompts: Sequence[list[int]], texts: Sequence[Result], setup: Setup
) -> Noise:
    height = _HEIGHT if setup.k is None else setup.k + 1
    whole = [[*prompt, *one.token_ids] for prompt, one in zip(prompts, texts, strict=True)]
    with target.lock:
        return probe(target.model, drafting.model, whole[:_PROBED], height, trees=setup.width != 1)


def _judge(
    target: Loaded,
    setup: Setup,
    found: Noise,
    run: tuple[str, Mode],
    question: int | str,
    plain: Result,
    other: Result,
) -> Divergence | None:
    """Where a text of `run` parts from the plain one, or None. run: draft and mode."""
    left, right = plain.token_ids, other.token_ids
    if left == right:
        return None
    longer = range(max(len(left), len(right)))
    place = next(i for i in longer if left[i : i + 1] != right[i : i + 1])
    expected, got = (tokens[place] if place < len(tokens) else None for tokens in (left, right))
    temperature = setup.temperature if run[1] == "sampled" else None
    margin = None
    if expected is not None and got is not None:
        common = [*plain.prompt_token_ids, *left[:place]]
        with target.lock:
            logits = after(target.model, common, place + 1)[-1]
        margin = margin_between(logits, expected, got, len(common), temperature, setup.seed)
    spelled = _spell(target, expected), _spell(target, got)
    return Divergence(question, *run, place, expected, got, spelled, margin, found.bound / (temperature or 1.0))


def _spell(target: Loaded, token: int | None) -> str:
    if token is None:
        return ""
    text: str = target.tokenizer.decode([token])
    return text


def margin_between(
    logits: Tensor, expected: int, got: int, position: int, temperature: float | None, seed: int
) -> float:
    """What `expected` is ahead of `got` by, after `logits` [V], at `position` of the text (prompt included).

    temperature None: by their logits. Else by log p + Gumbel noise, the noise being that of the seed.
    """
    pair = torch.tensor([expected, got], device=logits.device)
    scores = logits[pair].double()
    if temperature is not None:
        key = noise.key(seed, position, noise.TARGET)
        scores = scores / temperature + noise.gumbel(key, pair)
    return float(scores[0] - scores[1])
