"""Text to train on: what is read from files, and what a file that cannot be read is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sooner.errors import ConfigError
from sooner.train.data import read
from sooner.train.features import Document


def letters(text: str) -> list[int]:
    return [ord(letter) - 97 for letter in text]


def got(*paths: Path, longest: int = 100) -> list[Document]:
    return read(paths, letters, vocab=26, longest=longest)


def test_shards_keep_where_the_answer_begins(tmp_path: Path) -> None:
    save_file(
        {
            "tokens": torch.tensor([1, 2, 3, 4, 5, 6], dtype=torch.int32),
            "texts": torch.tensor([[4, 1, 0], [6, 1, 2]]),
        },
        tmp_path / "shard-00000.safetensors",
    )
    assert got(tmp_path) == [Document((1, 2, 3, 4), 1), Document((5, 6), 1)]


def test_lines_and_plain_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "abc", "response": "de"}\n\n{"text": "fg"}\n')
    (tmp_path / "b.txt").write_text("hij")
    assert got(tmp_path) == [Document((0, 1, 2, 3, 4), 3), Document((5, 6)), Document((7, 8, 9))]
    assert got(tmp_path / "b.txt", longest=2) == [Document((7, 8))]


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("a.jsonl", "{", "a.jsonl:1 is not JSON"),
        ("a.jsonl", json.dumps({"prompt": "a"}), 'a.jsonl:1 needs {"prompt"'),
        ("a.jsonl", "[1]", 'a.jsonl:1 needs {"prompt"'),
        ("a.csv", "x", "of no known kind"),
        ("shard-00000.safetensors", "x", "not a shard of text"),
        ("a.txt", "a", "no text in"),
        ("a.txt", "{{{", "has token id 26"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, name: str, content: str, named: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError) as caught:
        got(tmp_path / name)
    assert named in str(caught.value)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not there"):
        got(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="holds no text"):
        got(tmp_path)
