"""Trains an EAGLE-3 head for a target. Knows how to begin and what to descend; not how text comes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from sooner.errors import ConfigError
from sooner.heads import checkpoint
from sooner.heads.eagle import EagleConfig, EagleHead, Rope
from sooner.model.protocol import Ends, Model
from sooner.train import loss, unroll
from sooner.train.curve import draw
from sooner.train.features import Document
from sooner.train.loop import History, Plan, run
from sooner.train.recipe import Recipe, Report, prepare
from sooner.train.windows import Windows

_GRAIN = 64
# What the last stream and the token say by themselves is confident and a token late; they begin softly.
_TEMPER, _CARRY = 0.1, 0.1  # of the final norm, and of the token that attention carries


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
        windows: Windows,
        embedding: Tensor,
        recipe: Recipe,
        save: Callable[[EagleHead, History], None],
    ) -> None:
        self.module: nn.Module = head
        self.batch = recipe.batch * recipe.window
        self._head, self._windows, self._recipe, self._save = head, windows, recipe, save
        self._embedding = embedding

    def loss(self, step: int) -> tuple[Tensor, float]:
        r, batch = self._recipe, self._windows.batch(step)
        assert self._head.head is not None  # EAGLE-3
        wanted = loss.drawn(batch, r.unroll, r.share, self._windows.generator(step))
        read = unroll.unrolled(self._head, self._embedding, batch, r.unroll, [these.rows for these in wanted])
        return loss.loss_of(read, self._head.head.weight, wanted, r.step_decay)

    @torch.no_grad()
    def score(self) -> Mapping[str, float]:
        total, head = loss.Score(0, 0.0, 0.0, 0.0), self._head.head
        assert head is not None
        vocab = self._windows.store.vocab.to(self._embedding.device)
        for batch in self._windows.held_out():
            seen = unroll.unrolled(self._head, self._embedding, batch, self._recipe.unroll)
            total += loss.score(seen, head, vocab, batch)
        return total.told()

    def save(self, history: History) -> None:
        self._save(self._head, history)


def train(
    model: Model, ends: Ends, name: str, documents: Sequence[Document], out: Path, recipe: Recipe, plan: Plan,
    report: Report,
) -> History:  # fmt: skip
    """Features, then training; goes on where a run with the same --out was killed. Returns what it went through.

    Raises ConfigError, ModelError.
    """
    layers = model.lanes.store.shape[0]
    taps: tuple[int, ...] = (2, layers // 2, layers - 3)
    if layers < 7:
        taps = tuple(range(layers))[-3:]
    if len(taps) < 3:
        raise ConfigError(f"an EAGLE-3 head needs a target of at least 3 layers, {name} has {layers}.")
    text = prepare(model, ends, name, documents, out, taps, recipe, plan, report)
    torch.manual_seed(recipe.seed)
    width = model.lanes.store.shape[-1]
    head = begin(ends, text.ids, (max(ends.embedding.shape[1] // width, 1), width), model.vocab_size)
    head.to(device=ends.embedding.device, dtype=ends.embedding.dtype)

    def save(head: EagleHead, history: History) -> None:
        checkpoint.save(out, head, ids=text.ids, taps=taps, notes=text.notes | history.notes())
        draw(out / "curve.png", history.entries)

    task = EagleTask(head, text.windows, ends.embedding, recipe, save)
    return run(task, plan, out, lambda progress: report("training", progress))
