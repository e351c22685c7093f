"""Text a model wrote, on disk: token ids and the likeliest ids of every written row. Knows no model.

A shard is one safetensors file: `tokens` int32 [N], texts one after another; `texts` int64 [T, 3], each
text's end in `tokens`, how many of its tokens are prompt, and what it is (an index into KINDS); `rows`,
the written tokens of all texts in order: `top_ids` int32 [rows, K] and `top_logits` float16 [rows, K].
Row j of a text is the law its j-th written token was chosen from.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from sooner.draft.protocol import Tops
from sooner.errors import ConfigError

KINDS = ("document", "turn", "answer")


@dataclass(frozen=True, slots=True)
class Text:
    """tokens: prompt and what was written after it. kind: one of KINDS. tops: a row for each written token."""

    tokens: tuple[int, ...]
    prompt: int
    kind: str
    tops: Tops

    @property
    def written(self) -> int:
        return len(self.tokens) - self.prompt


def save(folder: Path, number: int, texts: Sequence[Text], following: int) -> Path:
    """Write one shard; it appears complete or not at all. following: the conversation to go on with."""
    ends: list[tuple[int, int, int]] = []
    tokens: list[int] = []
    for text in texts:
        tokens += text.tokens
        ends.append((len(tokens), text.prompt, KINDS.index(text.kind)))
    tensors = {
        "tokens": torch.tensor(tokens, dtype=torch.int32),
        "texts": torch.tensor(ends, dtype=torch.int64),
        "top_ids": torch.tensor([row for text in texts for row in text.tops.ids], dtype=torch.int32),
        "top_logits": torch.tensor([row for text in texts for row in text.tops.logits], dtype=torch.float16),
    }
    path = folder / f"shard-{number:05d}.safetensors"
    unfinished = path.with_suffix(".unfinished")
    save_file(tensors, unfinished, metadata={"following": str(following)})
    os.replace(unfinished, path)
    return path


def paths(folder: Path) -> list[Path]:
    """The shards of a folder, in order."""
    return sorted(folder.glob("shard-*.safetensors"))


def following(path: Path) -> int:
    """The conversation that comes after a shard."""
    with _opened(path) as shard:
        return int((shard.metadata() or {}).get("following", 0))


def written(path: Path) -> int:
    """How many tokens of a shard the model wrote."""
    with _opened(path) as shard:
        rows: int = shard.get_slice("top_ids").get_shape()[0]
        return rows


def read(path: Path) -> Iterator[Text]:
    """The texts of a shard. Raises ConfigError for a file that is none."""
    with _opened(path) as shard:
        found = {name: shard.get_tensor(name).tolist() for name in ("tokens", "texts", "top_ids", "top_logits")}
    begin = row = 0
    for end, prompt, kind in found["texts"]:
        rows = slice(row, row + end - begin - prompt)
        ids, logits = (tuple(map(tuple, found[name][rows])) for name in ("top_ids", "top_logits"))
        yield Text(tuple(found["tokens"][begin:end]), prompt, KINDS[kind], Tops(ids, logits))
        begin, row = end, rows.stop


def _opened(path: Path) -> safe_open:
    try:
        shard = safe_open(path, "pt")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} is not a shard of text: {error}. Delete it; it is written anew.") from None
    names: list[str] = shard.keys()  # type: ignore[no-untyped-call]  # safetensors has no types
    if not {"tokens", "texts", "top_ids", "top_logits"} <= set(names):
        raise ConfigError(f"{path} is not a shard of text: it lacks tokens, texts, top_ids or top_logits.")
    return shard
