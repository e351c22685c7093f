"""Trains a draft model: some layers of the target, distilled on its text. Knows not how text comes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from sooner.model.protocol import Ends, Model
from sooner.model.pruned import Pruned
from sooner.train import loss
from sooner.train.curve import draw
from sooner.train.features import Document
from sooner.train.loop import History, Plan, run
from sooner.train.recipe import Recipe, Report, prepare
from sooner.train.windows import Batch, Windows


class DraftTask:
    """The model, its text and its loss, as the loop wants them. matrix: the LM head's, which is kept."""

    def __init__(
        self, pruned: Pruned, windows: Windows, matrix: Tensor, recipe: Recipe, save: Callable[[History], None]
    ) -> None:
        self.module: nn.Module = pruned.module
        self.batch = recipe.batch * recipe.window
        self._pruned, self._windows, self._matrix = pruned, windows, matrix
        self._recipe, self._save = recipe, save

    def loss(self, step: int) -> tuple[Tensor, float]:
        r, batch = self._recipe, self._windows.batch(step)
        seen = self._ahead(batch, 1)
        return loss.loss(seen, self._matrix, batch, 1.0, r.share, self._windows.generator(step))

    @torch.no_grad()
    def score(self) -> Mapping[str, float]:
        total = loss.Score(0, 0.0, 0.0, 0.0)
        vocab = self._windows.store.vocab.to(self._matrix.device)
        for batch in self._windows.held_out():
            seen = self._ahead(batch, self._recipe.unroll)
            total += loss.score(seen, lambda x: x @ self._matrix.T, vocab, batch)
        return total.told()

    def save(self, history: History) -> None:
        self._save(history)

    def _ahead(self, batch: Batch, steps: int) -> list[Tensor]:
        """What the LM head reads one token and more after each slot: as long as guesses are right, drafting
        reads the text itself."""
        states = self._pruned.states(batch.tokens)
        return [torch.roll(states, -1 - step, dims=1).flatten(0, 1) for step in range(steps)]


def train(
    model: Model, ends: Ends, name: str, documents: Sequence[Document], out: Path, recipe: Recipe, plan: Plan,
    report: Report, *, layers: int,
) -> History:  # fmt: skip
    """The target's laws, then training; goes on where a run with the same --out was killed.

    layers: how many of the target's stay. recipe.unroll: guesses in a row that are scored; recipe.vocab is not
    used. Raises ConfigError, ModelError.
    """
    pruned = Pruned(name, layers, ends.embedding)
    text = prepare(model, ends, name, documents, out, (), replace(recipe, vocab=model.vocab_size), plan, report)
    matrix = ends.head().to(ends.embedding.dtype)

    def save(history: History) -> None:
        pruned.save(out, text.notes | history.notes())
        draw(out / "curve.png", history.entries)

    task = DraftTask(pruned, text.windows, matrix, recipe, save)
    return run(task, plan, out, lambda progress: report("training", progress))
