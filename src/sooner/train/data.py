"""Reads text to train heads on: shards a target wrote, JSON lines, plain text. Knows no features."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from sooner.errors import ConfigError
from sooner.train.features import Document

Encode = Callable[[str], Sequence[int]]
_FORMS = "shard-*.safetensors (what `sooner train table` keeps), .jsonl or .txt"


def read(paths: Sequence[Path], encode: Encode, *, vocab: int, longest: int) -> list[Document]:
    """All documents of files and folders, in order, each cut to `longest` tokens.

    .jsonl: a line is {"prompt": ..., "response": ...}, both together what the model saw and wrote, or
    {"text": ...}. Raises ConfigError for whatever cannot be read, and for ids outside the vocabulary.
    """
    documents = [_cut(d, longest) for path in paths for file in _files(path) for d in _documents(file, encode)]
    documents = [d for d in documents if len(d.tokens) > 1]
    for document in documents:
        if max(document.tokens) >= vocab:
            raise ConfigError(
                f"the text has token id {max(document.tokens)}, the target {vocab} ids: another model's?"
            )
    if not documents:
        raise ConfigError(f"there is no text in {', '.join(map(str, paths))}.")
    return documents


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        found = sorted(path.glob("shard-*.safetensors")) or sorted([*path.glob("*.jsonl"), *path.glob("*.txt")])
        if not found:
            raise ConfigError(f"{path} holds no text to train on: {_FORMS}.")
        return found
    if not path.is_file():
        raise ConfigError(f"{path} is not there. Text to train on: {_FORMS}.")
    return [path]


def _documents(file: Path, encode: Encode) -> Iterator[Document]:
    if file.suffix == ".safetensors":
        yield from _shard(file)
    elif file.suffix == ".jsonl":
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            if line.strip():
                yield _line(line, encode, f"{file}:{number}")
    elif file.suffix == ".txt":
        yield Document(tuple(encode(file.read_text(encoding="utf-8"))))
    else:
        raise ConfigError(f"{file} is of no known kind. Text to train on: {_FORMS}.")


def _shard(file: Path) -> Iterator[Document]:
    """Texts of a shard: `tokens` one after another, `texts` rows of (end, prompt tokens, kind)."""
    try:
        with safe_open(file, "pt") as shard:
            tokens = shard.get_tensor("tokens").tolist()
            texts = shard.get_tensor("texts").tolist()
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{file} is not a shard of text: {error}.") from error
    begin = 0
    for end, prompt, *_ in texts:
        yield Document(tuple(tokens[begin:end]), prompt)
        begin = end


def _line(line: str, encode: Encode, where: str) -> Document:
    try:
        entry: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}.") from error
    parts = [entry.get(name) for name in ("prompt", "response", "text")] if isinstance(entry, dict) else [None] * 3
    prompt, response, text = (part if isinstance(part, str) else None for part in parts)
    if text is not None:
        return Document(tuple(encode(text)))
    if prompt is None or response is None:
        raise ConfigError(f'{where} needs {{"prompt": ..., "response": ...}} or {{"text": ...}}.')
    asked, whole = encode(prompt), encode(prompt + response)
    return Document(tuple(whole), min(len(asked), len(whole) - 1))


def _cut(document: Document, longest: int) -> Document:
    return Document(document.tokens[:longest], document.answer)
