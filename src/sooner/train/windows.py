"""Text cut into windows, batches of them in a seeded order, and what each slot has to say. Knows no head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sooner.errors import ConfigError
from sooner.train.features import Store


@dataclass(frozen=True, slots=True)
class Batch:
    """Windows side by side: tokens [B, T]; features [B, T, S, H]; ids, probs [B, T, TOP]; answer, first [B, T]."""

    tokens: Tensor
    features: Tensor
    ids: Tensor
    probs: Tensor
    answer: Tensor
    first: Tensor


@dataclass(frozen=True, slots=True)
class Labels:
    """What one step has to say: rows (of B * T) that have a label, and the target's law there."""

    rows: Tensor
    ids: Tensor
    probs: Tensor


def labels(batch: Batch, step: int, rows: Tensor | None = None) -> Labels:
    """Of slot i at `step`: the target's law after token i + 1 + step. Slots at a document's end have none.

    rows: which of them to take, int64; all by default.
    """
    have = have_label(batch, step).flatten()
    rows = have.nonzero()[:, 0] if rows is None else rows[have[rows]]
    source = rows + 1 + step
    return Labels(rows, batch.ids.flatten(0, 1)[source], batch.probs.flatten(0, 1)[source])


def have_label(batch: Batch, step: int) -> Tensor:
    """bool [B, T]: whether token i + 1 + step is of the same window and document as token i."""
    ahead = 1 + step
    have = torch.ones_like(batch.first)
    have[:, -ahead:] = False
    for distance in range(1, ahead + 1):
        have[:, :-distance] &= ~batch.first[:, distance:]
    return have


class Windows:
    """Batches of `count` windows of `length` tokens, out of the shards of a store.

    An epoch has its own order and its own offset, so step number i is a function of (text, seed, i).
    place: a tensor whose device and type the batches take. Raises ConfigError where there is too little text.
    """

    def __init__(
        self,
        store: Store,
        train: Sequence[int],
        held_out: int,
        *,
        length: int,
        count: int,
        seed: int,
        place: Tensor,
    ) -> None:
        self.store, self.length, self.count = store, length, count
        self._train, self._seed, self._place = list(train), seed, place
        self._order: tuple[int, list[tuple[int, int]]] = (-1, [])
        self._held_out = store.windows(held_out, length)
        self._per_epoch = max(len(self._epoch(0)) // count, 1)
        if not self._held_out or not self._epoch(0):
            raise ConfigError(
                f"there is too little text for windows of {length} tokens; give more, or a smaller window."
            )

    def batch(self, step: int) -> Batch:
        """The batch of a training step."""
        order = self._epoch(step // self._per_epoch)
        begin = step % self._per_epoch * self.count
        return self._read([order[(begin + i) % len(order)] for i in range(self.count)])

    def held_out(self) -> Iterator[Batch]:
        """All windows of the held-out text."""
        for i in range(0, len(self._held_out), self.count):
            yield self._read(self._held_out[i : i + self.count])

    def generator(self, step: int) -> torch.Generator:
        """What a training step draws with."""
        return torch.Generator().manual_seed(self._seed * 1_000_003 + step)

    def _epoch(self, epoch: int) -> list[tuple[int, int]]:
        if self._order[0] != epoch:
            generator = torch.Generator().manual_seed(self._seed * 7919 + epoch)
            offset = int(torch.randint(0, self.length, (), generator=generator)) if epoch else 0
            starts = [w for shard in self._train for w in self.store.windows(shard, self.length, offset)]
            self._order = (epoch, [starts[i] for i in torch.randperm(len(starts), generator=generator).tolist()])
        return self._order[1]

    def _read(self, chosen: Sequence[tuple[int, int]]) -> Batch:
        read = [self.store.window(shard, start, self.length) for shard, start in chosen]
        place, kind = self._place.device, self._place.dtype
        parts = {
            name: torch.stack([getattr(w, name) for w in read]).to(place)
            for name in ("tokens", "features", "ids", "probs", "answer", "first")
        }
        return Batch(**(parts | {"features": parts["features"].to(kind)}))
