"""How heads are trained, and the text made ready for it: split, draft ids, features. Knows no head."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from sooner.errors import ConfigError
from sooner.model.protocol import Ends, Model
from sooner.train.features import Document, Store, digest, frequent, shards
from sooner.train.loop import Plan, Progress
from sooner.train.windows import Windows

Report = Callable[[str, Progress], None]
"""Told "features" with tokens done, then "training" at every step."""

_SHARD = 32768  # tokens: half a minute of a small target's passes, and what a kill can lose of them


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a head is trained.

    vocab: ids it learns to guess, the most frequent of the text. window: tokens of one sequence; batch: sequences.
    unroll: tokens it learns to guess one after another (EAGLE: steps of
    training-time test; Medusa: heads); step_decay: weight of each against the one before. share: part of the
    slots whose loss is taken at each step. held_out: tokens of text kept for scoring.
    """

    vocab: int = 8192
    window: int = 512
    batch: int = 2
    unroll: int = 3
    step_decay: float = 0.8
    share: float = 0.25
    held_out: int = 16384
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("vocab", "batch", "unroll", "held_out"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.window < self.unroll + 2:
            raise ConfigError(f"window must be at least unroll + 2 = {self.unroll + 2}, got {self.window}.")
        if not 0 < self.share <= 1:
            raise ConfigError(f"share must be above 0 and at most 1, got {self.share}.")


def split(documents: Sequence[Document], held_out: int) -> tuple[list[Document], list[Document]]:
    """(to train on, held out): every so many-th document, until about `held_out` tokens, a tenth at most."""
    total = sum(len(d.tokens) for d in documents)
    every = max(total // max(min(held_out, total // 10), 1), 2)
    kept = set(range(every - 1, len(documents), every))
    return (
        [d for i, d in enumerate(documents) if i not in kept],
        [d for i, d in enumerate(documents) if i in kept],
    )


@dataclass(frozen=True, slots=True)
class Material:
    """Text made ready. ids: the target's id of each draft id. notes: what to say of it in config.json."""

    windows: Windows
    ids: Tensor
    notes: dict[str, Any]


def prepare(
    model: Model, ends: Ends, name: str, documents: Sequence[Document], out: Path, taps: Sequence[int],
    recipe: Recipe, plan: Plan, report: Report,
) -> Material:  # fmt: skip
    """Run the text through the target, unless OUT/features holds it. Raises ConfigError, ModelError."""
    ids, covered = frequent(documents, recipe.vocab, model.vocab_size)
    learn, held_out = split(documents, recipe.held_out)
    if not learn or not held_out:
        raise ConfigError("there is too little text to train on and to hold some out; give more.")
    store = Store(out / "features", taps, ids, name, digest(documents))
    groups = [held_out, *shards(learn, _SHARD)]
    _features(model, ends, store, groups, report)
    windows = Windows(
        store, range(1, len(groups)), 0,
        length=recipe.window, count=recipe.batch, seed=recipe.seed, place=ends.embedding,
    )  # fmt: skip
    notes = {
        "target": name,
        "data_tokens": sum(len(d.tokens) for d in documents),
        "vocabulary_covers": round(covered, 5),
        "recipe": asdict(recipe),
        "plan": asdict(plan),
    }
    return Material(windows, ids, notes)


def _features(
    model: Model, ends: Ends, store: Store, groups: Sequence[Sequence[Document]],
    report: Report,
) -> None:  # fmt: skip
    total, done, fresh, began = sum(len(d.tokens) for g in groups for d in g), 0, 0, time.perf_counter()
    for shard, group in enumerate(groups):
        made = not store.path(shard).is_file()
        store.fill(model, ends, shard, group)
        size = sum(len(d.tokens) for d in group)
        done, fresh = done + size, fresh + size * made
        pace = fresh / max(time.perf_counter() - began, 1e-9)
        report("features", Progress(done, total, done, pace, float("nan"), {}))
