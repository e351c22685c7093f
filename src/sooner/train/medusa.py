"""Trains Medusa heads that share the target's LM head. Knows what to descend; not how text comes.

Head i reads the target's last state at a token and learns the target's law one token further than head i - 1.
Only the blocks are trained; of the LM head the rows of the draft ids are enough.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from sooner.errors import ConfigError
from sooner.heads import medusa as files
from sooner.heads.medusa import Block, Head, MedusaHeads
from sooner.model.protocol import Ends, Model
from sooner.train import loss
from sooner.train.curve import draw
from sooner.train.features import Document
from sooner.train.loop import History, Plan, run
from sooner.train.recipe import Recipe, Report, prepare
from sooner.train.windows import Batch, Windows


class Blocks(nn.Module):
    """`count` heads of `depth` blocks each, every one of which passes its input on to begin with."""

    def __init__(self, count: int, depth: int, hidden: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(
            nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(depth)) for _ in range(count)
        )
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> list[Tensor]:
        """[N, h] -> for each head what the LM head reads, [N, h]."""
        seen = []
        for head in self._rows():
            state = x
            for block in head:
                state = state + silu(block(state))
            seen.append(state)
        return seen

    def exported(self, ids: Tensor) -> MedusaHeads:
        """As they are drafted with; ids: the target's id of each row of the LM head they were trained for."""
        heads = tuple(
            Head(tuple(Block(b.weight.detach(), b.bias.detach()) for b in head), None) for head in self._rows()
        )
        return MedusaHeads(heads, ids)

    def _rows(self) -> list[list[nn.Linear]]:
        rows = [list(head) for head in self.heads if isinstance(head, nn.ModuleList)]
        return [[block for block in row if isinstance(block, nn.Linear)] for row in rows]


class MedusaTask:
    """Blocks, text and loss, as the loop wants them. matrix: the LM head's rows of the draft ids."""

    def __init__(
        self, blocks: Blocks, windows: Windows, matrix: Tensor, recipe: Recipe, save: Callable[[History], None]
    ) -> None:
        self.module: nn.Module = blocks
        self.batch = recipe.batch * recipe.window
        self._blocks, self._windows, self._matrix = blocks, windows, matrix
        self._recipe, self._save = recipe, save

    def loss(self, step: int) -> tuple[Tensor, float]:
        r, batch = self._recipe, self._windows.batch(step)
        generator = self._windows.generator(step)
        return loss.loss(self._seen(batch), self._matrix, batch, r.step_decay, r.share, generator)

    @torch.no_grad()
    def score(self) -> Mapping[str, float]:
        total = loss.Score(0, 0.0, 0.0, 0.0)
        vocab = self._windows.store.vocab.to(self._matrix.device)
        for batch in self._windows.held_out():
            total += loss.score(self._seen(batch), lambda x: x @ self._matrix.T, vocab, batch)
        return total.told()

    def save(self, history: History) -> None:
        self._save(history)

    def _seen(self, batch: Batch) -> list[Tensor]:
        seen: list[Tensor] = self._blocks(batch.features.flatten(0, 1)[:, 0])
        return seen


def train(
    model: Model, ends: Ends, name: str, documents: Sequence[Document], out: Path, recipe: Recipe, plan: Plan,
    report: Report, *, blocks: int = 1,
) -> History:  # fmt: skip
    """Features, then training; goes on where a run with the same --out was killed. Returns what it went through.

    recipe.unroll: how many heads; blocks: of each. Raises ConfigError, ModelError.
    """
    if blocks < 1:
        raise ConfigError(f"blocks must be at least 1, got {blocks}.")
    layers, hidden = model.lanes.store.shape[0], ends.embedding.shape[1]
    text = prepare(model, ends, name, documents, out, (layers,), recipe, plan, report)
    matrix = ends.head()[text.ids.to(ends.embedding.device)].to(ends.embedding.dtype)
    module = Blocks(recipe.unroll, blocks, hidden).to(ends.embedding.device, ends.embedding.dtype)

    def save(history: History) -> None:
        files.save(out, module.exported(text.ids), notes=text.notes | history.notes())
        draw(out / "curve.png", history.entries)

    task = MedusaTask(module, text.windows, matrix, recipe, save)
    return run(task, plan, out, lambda progress: report("training", progress))
