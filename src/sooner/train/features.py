"""What heads are trained on: the target's features and its law at every token of a text, stored in shards.

Knows no head. A shard is written whole or not at all, so a run that was killed goes on with the next one.
Disk: (2 * taps * H + 6 * TOP + 4) bytes a token; memory: one shard.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from sooner.core.step import Segment, pack
from sooner.errors import ModelError
from sooner.model.protocol import Ends, Model

TOP = 32  # candidates kept of the law at each token
_ROWS = 1024  # rows in one pass of the target
_NONE = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class Document:
    """One text of the target's, as tokens; `answer`: from where on the target wrote (0 = all of it)."""

    tokens: tuple[int, ...]
    answer: int = 0


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens that follow each other, with what the target made of them.

    tokens: int64 [n]. features: [n, taps, H]. ids, probs: [n, TOP], the likeliest *draft* ids after each
    token and their probabilities, which sum to 1. answer: bool [n], written by the target. first: bool
    [n], where a document begins.
    """

    tokens: Tensor
    features: Tensor
    ids: Tensor
    probs: Tensor
    answer: Tensor
    first: Tensor


def frequent(documents: Sequence[Document], count: int, vocab: int) -> tuple[Tensor, float]:
    """The `count` ids seen most often in what the target wrote, ascending, and the share of it they cover."""
    seen = torch.zeros(vocab, dtype=torch.int64)
    for document in documents:
        seen += torch.bincount(
            torch.tensor(document.tokens[document.answer :], dtype=torch.int64), minlength=vocab
        )
    best = torch.argsort(seen, descending=True, stable=True)[:count].sort().values
    return best, float(seen[best].sum() / seen.sum().clamp(min=1))


def shards(documents: Sequence[Document], tokens: int) -> list[list[Document]]:
    """Documents in groups of about so many tokens."""
    groups: list[list[Document]] = [[]]
    room = tokens
    for document in documents:
        if room <= 0:
            groups.append([])
            room = tokens
        groups[-1].append(document)
        room -= len(document.tokens)
    return [group for group in groups if group]


def digest(documents: Sequence[Document]) -> str:
    """What tells one text from another."""
    whole = hashlib.sha256()
    for document in documents:
        whole.update(array("q", [len(document.tokens), document.answer, *document.tokens]).tobytes())
    return whole.hexdigest()[:16]


class Store:
    """A folder of shards for one target, text (see `digest`), set of taps and draft vocabulary.

    Raises ModelError if the folder was begun for others.
    """

    def __init__(self, folder: Path, taps: Sequence[int], vocab: Tensor, target: str, text: str) -> None:
        self._folder = folder
        self.taps, self.vocab = tuple(taps), vocab
        folder.mkdir(parents=True, exist_ok=True)
        stamp = {"target": target, "text": text, "taps": list(taps), "vocab": len(vocab)}
        known = folder / "store.json"
        if known.is_file() and json.loads(known.read_text()) != stamp:
            raise ModelError(
                f"{folder} holds features of another run ({known.read_text().strip()}); use another --out."
            )
        known.write_text(json.dumps(stamp))

    def path(self, shard: int) -> Path:
        return self._folder / f"features-{shard:04d}.safetensors"

    def fill(self, model: Model, ends: Ends, shard: int, documents: Sequence[Document]) -> None:
        """Run the documents through the target and write one shard, unless it is there."""
        if self.path(shard).is_file():
            return
        head = ends.head()[self.vocab.to(ends.embedding.device)]
        features, ids, probs = [], [], []
        for seen in _passes(model, documents, self.taps):
            features.append(seen[:, :-1].cpu())
            law = torch.softmax(seen[:, -1] @ head.T, dim=-1)
            best = law.topk(min(TOP, len(head)), dim=-1)
            ids.append(best.indices.to(torch.int32).cpu())
            probs.append((best.values.float() / best.values.float().sum(-1, keepdim=True)).half().cpu())
        marks = [[i >= d.answer for i in range(len(d.tokens))] for d in documents]
        part = self.path(shard).with_suffix(".part")
        save_file(
            {
                "tokens": torch.tensor([t for d in documents for t in d.tokens], dtype=torch.int32),
                "features": torch.cat(features),
                "ids": torch.cat(ids),
                "probs": torch.cat(probs),
                "answer": torch.tensor([m for row in marks for m in row]),
                "first": torch.tensor([i == 0 for d in documents for i in range(len(d.tokens))]),
            },
            part,
        )
        part.replace(self.path(shard))

    def window(self, shard: int, start: int, length: int) -> Window:
        """Read `length` tokens of a shard from `start` on."""
        with safe_open(self.path(shard), "pt") as file:
            get = {name: file.get_slice(name)[start : start + length] for name in file.keys()}  # noqa: SIM118  # no mapping
        return Window(
            get["tokens"].long(), get["features"], get["ids"].long(), get["probs"], get["answer"], get["first"]
        )

    def windows(self, shard: int, length: int, offset: int = 0) -> list[tuple[int, int]]:
        """Where a shard's windows of `length` tokens begin, as (shard, start), from `offset` on."""
        with safe_open(self.path(shard), "pt") as file:
            count = file.get_slice("tokens").get_shape()[0]
        return [(shard, start) for start in range(offset, count - length + 1, length)]


@torch.no_grad()
def _passes(model: Model, documents: Sequence[Document], taps: Sequence[int]) -> Iterator[Tensor]:
    """Features [n, taps + 1, H] of all tokens of the documents, in order; the last is the final state."""
    wanted = (*taps, model.lanes.store.shape[0])
    for group in _groups(documents):
        lanes = [model.lanes.open() for _ in group]
        try:
            longest = max(len(d.tokens) for d in group)
            seen: list[list[Tensor]] = [[] for _ in group]
            for start in range(0, longest, _ROWS):
                live = [g for g, d in enumerate(group) if len(d.tokens) > start]
                parts = [group[g].tokens[start : start + _ROWS] for g in live]
                step = pack([Segment(lanes[g], start, p, law=False) for g, p in zip(live, parts, strict=True)])
                features = model.forward(step, rows=_NONE, taps=wanted).features
                if features is None:
                    raise ModelError("this target hands over no features, so no head can be trained for it.")
                for s, g in enumerate(live):
                    seen[g].append(features[step.offsets[s] : step.offsets[s + 1]])
                    model.lanes.settle(lanes[g], group[g].tokens[: start + _ROWS])
            yield from (torch.cat(parts) for parts in seen)
        finally:
            for lane in lanes:
                model.lanes.close(lane)


def _groups(documents: Sequence[Document]) -> Iterator[list[Document]]:
    """Neighbours that fit into one pass together; one that does not fit into a pass is alone."""
    group: list[Document] = []
    for document in documents:
        if group and sum(len(d.tokens) for d in group) + len(document.tokens) > _ROWS:
            yield group
            group = []
        group.append(document)
    if group:
        yield group
