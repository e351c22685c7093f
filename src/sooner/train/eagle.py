"""Trains an EAGLE-3 head for a target. Knows how to begin and what to descend; not how text comes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sooner.errors import ConfigError
from sooner.heads import checkpoint
from sooner.heads.eagle import EagleConfig, EagleHead, Rope
from sooner.model.protocol import Ends, Model
from sooner.train import unroll
from sooner.train.curve import draw
from sooner.train.features import Document, Store, digest, frequent, shards
from sooner.train.loop import History, Plan, Progress, run
from sooner.train.unroll import Batch, Score

_SHARD = 32768  # tokens: half a minute of a small target's passes, and what a kill can lose of them
_GRAIN = 64
# What the last stream and the token say by themselves is confident and a token late; they begin softly.
_TEMPER, _CARRY = 0.1, 0.1  # of the final norm, and of the token that attention carries


@dataclass(frozen=True, slots=True)
class Recipe:
    """How an EAGLE-3 head is trained.

    vocab: ids of its LM head, the most frequent of the text. window: tokens of one sequence; batch: sequences.
    unroll: steps of training-time test; step_decay: weight of each against the one before. share: part of the
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


def begin(ends: Ends, ids: Tensor, layers_wide: tuple[int, int], vocab: int) -> EagleHead:
    """A head that starts from what it will need anyway, float32.

    The fusion passes the last stream on; every slot attends to itself and adds its token's embedding; the LM
    head is the target's rows of the draft ids. layers_wide: (heads, width of one).
    """
    hidden, (heads, dim) = ends.embedding.shape[1], layers_wide
    config = EagleConfig(
        version=3,
        hidden=hidden,
        intermediate=-(-hidden * 8 // 3 // _GRAIN) * _GRAIN,
        heads=heads,
        kv_heads=heads,
        head_dim=dim,
        vocab=vocab,
        draft_vocab=len(ids),
        target_hidden=hidden,
        streams=3,
        rope=Rope(),
        fc_norm=True,
    )
    head, wide = EagleHead(config), heads * dim
    assert head.head is not None
    assert head.norm is not None
    with torch.no_grad():
        head.fc.weight.zero_()
        head.fc.weight[:, -hidden:] = torch.eye(hidden)
        head.qkv.weight.zero_()
        # Query and key are one random map of the token, so a token fits itself best: about 6 nats more.
        match = torch.randn(wide, hidden) * (6.0 / (dim**0.5 * hidden)) ** 0.5
        head.qkv.weight[:wide, :hidden] = match
        head.qkv.weight[wide : 2 * wide, :hidden] = match
        head.qkv.weight[2 * wide :, :hidden] = torch.eye(wide, hidden)
        head.out.weight.copy_(torch.eye(hidden, wide) * _CARRY)
        head.gate_up.weight.normal_(0.0, hidden**-0.5)
        head.down.weight.zero_()
        head.head.weight.copy_(ends.head()[ids].float())
        if ends.norm is not None:
            head.norm.weight.copy_(ends.norm.float() * _TEMPER)
    return head


class EagleTask:
    """The head, its text and its loss, as the loop wants them."""

    def __init__(
        self,
        head: EagleHead,
        store: Store,
        train: Sequence[int],
        held_out: int,
        embedding: Tensor,
        recipe: Recipe,
        save: Callable[[EagleHead, History], None],
    ) -> None:
        self.module: nn.Module = head
        self.batch = recipe.batch * recipe.window
        self._head = head
        self._store, self._recipe, self._save = store, recipe, save
        self._embedding, self._train = embedding, list(train)
        self._order: tuple[int, list[tuple[int, int]]] = (-1, [])
        self._held_out = store.windows(held_out, recipe.window)
        self._per_epoch = max(len(self._epoch(0)) // recipe.batch, 1)
        if not self._held_out or not self._epoch(0):
            raise ConfigError(
                f"there is too little text for windows of {recipe.window} tokens; give more, or a smaller window."
            )

    def loss(self, step: int) -> tuple[Tensor, float]:
        r = self._recipe
        order = self._epoch(step // self._per_epoch)
        begin = step % self._per_epoch * r.batch
        chosen = [order[(begin + i) % len(order)] for i in range(r.batch)]
        generator = torch.Generator().manual_seed(r.seed * 1_000_003 + step)
        return unroll.loss(
            self._head, self._embedding, self._read(chosen), r.unroll, r.step_decay, r.share, generator
        )

    def score(self) -> Mapping[str, float]:
        total, size = Score(0, 0.0, 0.0, 0.0), self._recipe.batch
        vocab = self._store.vocab.to(self._embedding.device)
        for i in range(0, len(self._held_out), size):
            batch = self._read(self._held_out[i : i + size])
            total += unroll.score(self._head, self._embedding, vocab, batch, self._recipe.unroll)
        return {"held_out_loss": total.loss, "chain": 1 + total.chain, "tree": 1 + total.tree}

    def save(self, history: History) -> None:
        self._save(self._head, history)

    def _epoch(self, epoch: int) -> list[tuple[int, int]]:
        """Windows of an epoch in its own order, moved by its own offset."""
        if self._order[0] != epoch:
            generator = torch.Generator().manual_seed(self._recipe.seed * 7919 + epoch)
            length = self._recipe.window
            offset = int(torch.randint(0, length, (), generator=generator)) if epoch else 0
            starts = [window for shard in self._train for window in self._store.windows(shard, length, offset)]
            self._order = (epoch, [starts[i] for i in torch.randperm(len(starts), generator=generator).tolist()])
        return self._order[1]

    def _read(self, chosen: Sequence[tuple[int, int]]) -> Batch:
        read = [self._store.window(shard, start, self._recipe.window) for shard, start in chosen]
        place, kind = self._embedding.device, self._embedding.dtype
        parts = {
            name: torch.stack([getattr(w, name) for w in read]).to(place)
            for name in ("tokens", "features", "ids", "probs", "answer", "first")
        }
        return Batch(**(parts | {"features": parts["features"].to(kind)}))


def train(
    model: Model, ends: Ends, name: str, documents: Sequence[Document], out: Path, recipe: Recipe, plan: Plan,
    report: Callable[[str, Progress], None],
) -> History:  # fmt: skip
    """Features, then training; goes on where a run with the same --out was killed. Returns what it went through.

    report: told "features" with tokens done, then "training" at every step. Raises ConfigError, ModelError.
    """
    layers = model.lanes.store.shape[0]
    taps: tuple[int, ...] = (2, layers // 2, layers - 3)
    if layers < 7:
        taps = tuple(range(layers))[-3:]
    if len(taps) < 3:
        raise ConfigError(f"an EAGLE-3 head needs a target of at least 3 layers, {name} has {layers}.")
    ids, covered = frequent(documents, recipe.vocab, model.vocab_size)
    learn, held_out = split(documents, recipe.held_out)
    if not learn or not held_out:
        raise ConfigError("there is too little text to train on and to hold some out; give more.")
    store = Store(out / "features", taps, ids, name, digest(documents))
    groups = [held_out, *shards(learn, _SHARD)]
    _features(model, ends, store, groups, report)
    torch.manual_seed(recipe.seed)
    width = model.lanes.store.shape[-1]
    head = begin(ends, ids, (max(ends.embedding.shape[1] // width, 1), width), model.vocab_size)
    head.to(device=ends.embedding.device, dtype=ends.embedding.dtype)
    told: dict[str, Any] = {
        "target": name,
        "data_tokens": sum(len(d.tokens) for d in documents),
        "vocabulary_covers": round(covered, 5),
        "recipe": asdict(recipe),
        "plan": asdict(plan),
    }

    def save(head: EagleHead, history: History) -> None:
        progress = {"steps": history.step, "tokens": history.tokens, "seconds": round(history.seconds)}
        checkpoint.save(out, head, ids=ids, taps=taps, notes=told | progress | {"scores": history.entries[-1]})
        draw(out / "curve.png", history.entries)

    task = EagleTask(head, store, range(1, len(groups)), 0, ends.embedding, recipe, save)
    return run(task, plan, out, lambda progress: report("training", progress))


def _features(
    model: Model, ends: Ends, store: Store, groups: Sequence[Sequence[Document]],
    report: Callable[[str, Progress], None],
) -> None:  # fmt: skip
    total, done, fresh, began = sum(len(d.tokens) for g in groups for d in g), 0, 0, time.perf_counter()
    for shard, group in enumerate(groups):
        made = not store.path(shard).is_file()
        store.fill(model, ends, shard, group)
        size = sum(len(d.tokens) for d in group)
        done, fresh = done + size, fresh + size * made
        pace = fresh / max(time.perf_counter() - began, 1e-9)
        report("features", Progress(done, total, done, pace, float("nan"), {}))
