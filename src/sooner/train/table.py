"""Counts a warm table from text the target wrote, and what its guesses are worth. Knows no model.

Every written row counts with the probabilities of its likeliest ids, not with the one id that came: a row says
more than a token. What the guesses of each kind are worth is found on text the counts have not seen.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sooner.config import Budget
from sooner.core.edit import LawParams
from sooner.core.tree import chain, follow
from sooner.draft.combine import CombineDrafter
from sooner.draft.protocol import TAIL, Context, Outcome, Tops
from sooner.draft.recycle import RecycleSource
from sooner.draft.sources import LookupSource
from sooner.draft.table import KINDS, Table, TableSource, build
from sooner.errors import ConfigError
from sooner.train import shards
from sooner.train.shards import Text

BUDGET = Budget(depth=8, width=8, nodes=15)
_HELD = 10  # every so many-th shard is held out
_RARE = 0.01  # probability below which a candidate is not counted
_LONGEST = len(KINDS)  # tokens of a key
_TWICE = 1.5  # what two rows count for at least

Progress = Callable[[int, int], None]
"""Told how many shards are done, of how many."""


@dataclass(frozen=True, slots=True)
class Score:
    """What a joined tree with the table gave on held-out text: tokens / steps (steps: simulated passes)."""

    tokens: int
    steps: int

    @property
    def tokens_per_step(self) -> float:
        """1.00 is plain decoding."""
        return self.tokens / self.steps if self.steps else 0.0


class Counts:
    """How often each token followed runs of one, two and three tokens; about 1 KB of memory a row."""

    def __init__(self) -> None:
        self.after: dict[tuple[int, ...], dict[int, float]] = defaultdict(lambda: defaultdict(float))
        self.rows = 0

    def worth_keeping(self) -> dict[tuple[int, ...], dict[int, float]]:
        """All but the triples seen once: four in five are, and they say little that their pair does not."""
        return {
            run: counts
            for run, counts in self.after.items()
            if len(run) < _LONGEST or sum(counts.values()) >= _TWICE
        }

    def add(self, text: Text) -> None:
        """Count every written row of a text."""
        for row, (ids, logits) in enumerate(zip(text.tops.ids, text.tops.logits, strict=True)):
            at = text.prompt + row - 1
            if not math.isfinite(logits[0]):
                continue
            self.rows += 1
            weights = [math.exp(logit - logits[0]) for logit in logits]
            total = sum(weights)
            rows = [self.after[text.tokens[at + 1 - n : at + 1]] for n in range(1, min(_LONGEST, at + 1) + 1)]
            for token, weight in zip(ids, weights, strict=True):
                share = weight / total
                if share >= _RARE:
                    for counts in rows:
                        counts[token] += share


def make(
    paths: Sequence[Path], vocab: int, about: Mapping[str, object], progress: Progress = lambda done, of: None
) -> tuple[Table, Score]:
    """A table of all shards, with the chances and the score that held-out shards gave.

    The chances come from a table of nine tenths of the shards, tried on the last tenth; with fewer than two shards
    there are none. Raises ConfigError without shards, and for ids outside the vocabulary.
    """
    if not paths:
        raise ConfigError("there are no shards to count: give --self-generate, or --data with a folder of shards.")
    counts, held = Counts(), [path for i, path in enumerate(paths) if i % _HELD == _HELD - 1 or i == 1]
    steps = len(paths) + len(held)
    for i, path in enumerate(p for p in paths if p not in held):
        _count(counts, path, vocab)
        progress(i + 1, steps)
    tried = build(vocab, counts.worth_keeping(), about)
    drafter = CombineDrafter("auto", [LookupSource(), RecycleSource(), TableSource(tried)])
    score = Score(0, 0)
    for i, path in enumerate(held):
        some = try_out(drafter, (text for text in shards.read(path) if text.kind == "answer"))
        score = Score(score.tokens + some.tokens, score.steps + some.steps)
        _count(counts, path, vocab)
        progress(len(paths) - len(held) + 2 * (i + 1), steps)
    whole = build(vocab, counts.worth_keeping(), {**about, "rows": counts.rows})
    return replace(whole, chances=drafter.learned() if score.steps else {}), score


def try_out(drafter: CombineDrafter, texts: Iterable[Text]) -> Score:
    """Draft along texts as they were written, as if each were verified; the drafter learns meanwhile.

    The rows of rejected nodes are not known, so recycled candidates are fewer than in a real run.
    """
    tokens = steps = 0
    for number, text in enumerate(texts):
        name, at = f"text-{number}", text.prompt
        while at < len(text.tokens) - 1:
            root, row = at, at - text.prompt
            budget = BUDGET.within(len(text.tokens) - at - 2, BUDGET.nodes)
            context = Context(name, text.tokens[: root + 1], LawParams(), 0, "match")
            [draft] = drafter.propose([context], [budget])
            path = follow(draft, text.tokens[root + 1 : -1])
            came = text.tokens[root + 1 : root + 2 + len(path)]
            rows = slice(row + 1, row + 2 + len(path))
            tops = Tops(text.tops.ids[rows], text.tops.logits[rows])
            accepted = chain([draft.tokens[node] for node in path])
            tail = text.tokens[max(root + 1 - TAIL, 0) : root + 1]
            drafter.observe([Outcome(name, came, len(path), len(draft), None, accepted, tail, tops)])
            at, tokens, steps = at + len(came), tokens + len(came), steps + 1
        drafter.forget(name)
    return Score(tokens, steps)


def _count(counts: Counts, path: Path, vocab: int) -> None:
    for text in shards.read(path):
        if max(max(text.tokens), max(map(max, text.tops.ids))) >= vocab:
            raise ConfigError(
                f"{path} has ids of {vocab} or more, which this target does not have: another model's?"
            )
        counts.add(text)
