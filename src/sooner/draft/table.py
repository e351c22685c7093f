"""The warm table: what a target is likely to write, counted in text it wrote before. Knows no model.

One safetensors file. `triples` [n, 3], `pairs` [n, 2] and `singles` [n, 1] are the keys, last tokens of a
text; `lengths` says how many continuations each has in `ids` and `codes`, keys in that order, best first. A code
is (grade * RANKS + rank) * TRUSTS + trust, uint8. The metadata say what was counted and how sources fared.
"""

from __future__ import annotations

import json
import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from sooner.config import Budget
from sooner.draft.protocol import Context, Outcome
from sooner.draft.source import GRADES, RANKS, Guess, graded, graded_priors
from sooner.errors import DraftError

FORMAT = "sooner-table-2"
WIDTH = 8  # most continuations of a key
TRUSTS = 4  # what the count of a key is worth: below 2 rows, 8, 32, more
LEAST = 0.02  # share below which a continuation is left out
LEVEL = GRADES * RANKS * TRUSTS
KINDS = ("triples", "pairs", "singles")  # of keys, the longest first
_ID_BITS = 21  # of a number of three ids

Counts = Mapping[int, float]
"""How often each token followed a key."""


class Keys:
    """Numbers and their places, found by bisection: twelve bytes each, where a dict of pairs took 200."""

    def __init__(self, keys: Iterable[int]) -> None:
        given = np.fromiter(keys, np.int64) if not isinstance(keys, np.ndarray) else keys
        order = given.argsort(kind="stable")
        self.sorted, self.places = _array("q", given[order]), _array("i", order)

    def find(self, key: int) -> int | None:
        """The place of a key, or None."""
        at = bisect_left(self.sorted, key)
        return self.places[at] if at < len(self.sorted) and self.sorted[at] == key else None

    def __len__(self) -> int:
        return len(self.sorted)

    def __iter__(self) -> Iterator[int]:
        """By place."""
        by_place = sorted(zip(self.places, self.sorted, strict=True))
        return (key for _, key in by_place)


@dataclass(frozen=True, slots=True)
class Table:
    """A table in memory, 40 to 50 bytes a key.

    keys: of KINDS, numbers made by `numbered`; the rows of the second begin after those of the first, and so on.
    vocab: every id is below it. about: model, tokens, ... as counted. chances: by source, what guesses of each
    code were worth on held-out text. Raises DraftError for more ids than numbers can tell apart.
    """

    vocab: int
    keys: tuple[Keys, ...]
    ends: array[int]
    ids: array[int]
    codes: bytes
    about: Mapping[str, object] = field(default_factory=dict)
    chances: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.vocab > 1 << _ID_BITS:
            raise DraftError(f"a table holds at most {1 << _ID_BITS} ids, got {self.vocab}.")

    def row(self, tail: Sequence[int]) -> tuple[Guess, ...]:
        """What may follow a text that ends so: of its longest end that is a key. Shorter ones: higher codes."""
        first = 0
        for kind, keys in enumerate(self.keys):
            run = tail[-(len(KINDS) - kind) :]
            known = len(run) == len(KINDS) - kind and max(run) < self.vocab
            at = keys.find(numbered(run)) if known else None
            if at is not None:
                at += first
                begin, end = self.ends[at - 1] if at else 0, self.ends[at]
                codes = [kind * LEVEL + code for code in self.codes[begin:end]]
                return tuple(zip(self.ids[begin:end], codes, strict=True))
            first += len(keys)
        return ()


def numbered(run: Sequence[int]) -> int:
    """Up to three ids as one number."""
    number = 0
    for token in run:
        number = number << _ID_BITS | token
    return number


def count_codes(counts: Counts) -> list[tuple[int, int]]:
    """The continuations of one key worth keeping, best first, with their codes."""
    total = sum(counts.values())
    best = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:WIDTH]
    best = [(token, share) for token, count in best if (share := count / total) >= LEAST]
    trust = min(TRUSTS - 1, max(0, int(math.log2(total) + 1) // 2))
    codes = graded([share for _, share in best])
    return [(token, code * TRUSTS + trust) for (token, _), code in zip(best, codes, strict=True)]


def build(vocab: int, counted: Mapping[tuple[int, ...], Counts], about: Mapping[str, object]) -> Table:
    """A table of the counts of runs of one to three tokens."""
    by_kind = [[run for run in counted if len(run) == len(KINDS) - kind] for kind in range(len(KINDS))]
    ends, ids, codes = array("i"), array("i"), bytearray()
    for counts in (counted[run] for runs in by_kind for run in runs):
        for token, code in count_codes(counts):
            ids.append(token)
            codes.append(code)
        ends.append(len(ids))
    keys = tuple(Keys(numbered(run) for run in runs) for runs in by_kind)
    return Table(vocab, keys, ends, ids, bytes(codes), about)


def save(table: Table, path: Path) -> None:
    """Write a table; ids take two bytes where the vocabulary allows it."""
    kind = torch.uint16 if table.vocab <= 1 << 16 else torch.int32
    runs = {
        name: _runs(torch.tensor(list(keys), dtype=torch.int64), len(KINDS) - i).to(kind)
        for i, (name, keys) in enumerate(zip(KINDS, table.keys, strict=True))
    }
    lengths = torch.diff(torch.tensor(table.ends, dtype=torch.int64), prepend=torch.zeros(1, dtype=torch.int64))
    tensors = {
        **runs,
        "lengths": lengths.to(torch.uint8),
        "ids": torch.tensor(table.ids, dtype=torch.int64).to(kind),
        "codes": torch.tensor(list(table.codes), dtype=torch.uint8),
    }
    about = {"format": FORMAT, "vocab": table.vocab, "about": table.about, "chances": table.chances}
    save_file(tensors, path, metadata={"sooner": json.dumps(about)})


def load(path: Path, vocab: int) -> Table:
    """Read a table for a target with `vocab` logits. Raises DraftError for one that is none or does not fit."""
    try:
        with safe_open(path, "pt") as file:
            said = json.loads((file.metadata() or {}).get("sooner", "{}"))
            if said.get("format") != FORMAT:
                raise DraftError(f"{path} is not a table of format {FORMAT}. Make one: sooner train table.")
            # numpy's, here and below: torch's sorting and copying keep memory of their own
            found = {name: file.get_tensor(name).numpy() for name in (*KINDS, "lengths", "ids", "codes")}
    except (OSError, SafetensorError, ValueError) as error:
        raise DraftError(f"the table {path} cannot be read: {error}. Make one: sooner train table.") from None
    if said["vocab"] > vocab:
        raise DraftError(
            f"the table {path} was counted for {said['vocab']} ids, but this target has {vocab}. "
            "Make one for it: sooner train table."
        )
    _check(path, found, said["vocab"])
    keys = tuple(Keys(_numbers(found[name].astype(np.int64))) for name in KINDS)
    ends, ids = _array("i", found["lengths"].cumsum(dtype=np.int64)), _array("i", found["ids"])
    chances = {name: tuple(values) for name, values in said["chances"].items()}
    codes = found["codes"].tobytes()
    return Table(said["vocab"], keys, ends, ids, codes, said["about"], chances)


def _numbers(runs: np.ndarray) -> np.ndarray:
    """`numbered` of the rows of [n, length]."""
    number = np.zeros(len(runs), np.int64)
    for column in runs.T:
        number = number << _ID_BITS | column
    return number


def _runs(numbers: torch.Tensor, length: int) -> torch.Tensor:
    """Back from numbers [n] to runs [n, length]."""
    shifts = torch.arange(length - 1, -1, -1) * _ID_BITS
    return numbers[:, None] >> shifts & (1 << _ID_BITS) - 1


def _array(code: str, values: np.ndarray) -> array[int]:
    """Numbers without an object for each."""
    made = array(code)
    made.frombytes(values.astype("i8" if code == "q" else "i4").tobytes())
    return made


def _check(path: Path, found: Mapping[str, np.ndarray], vocab: int) -> None:
    keys, continuations = sum(len(found[name]) for name in KINDS), len(found["ids"])
    lengths = found["lengths"]
    sound = all(found[name].shape[1:] == (len(KINDS) - i,) for i, name in enumerate(KINDS))
    sound = (
        sound and len(lengths) == keys and int(lengths.sum(dtype=np.int64)) == continuations == len(found["codes"])
    )
    ids = [found[name] for name in (*KINDS, "ids") if found[name].size]
    if not sound or any(int(some.min()) < 0 or int(some.max()) >= vocab for some in ids):
        raise DraftError(f"the table {path} is damaged: its parts do not fit together. Make it anew.")
    if len(found["codes"]) and int(found["codes"].max()) >= LEVEL:
        raise DraftError(f"the table {path} is damaged: it has codes above {LEVEL - 1}. Make it anew.")


class TableSource:
    """The continuations a warm table has for the last tokens, as many as it knows. The code is kind and code."""

    name = "table"
    taps: tuple[int, ...] = ()
    tops = 0
    priors: tuple[float, ...] = tuple(
        p for trust in (0.8, 0.7, 0.5) for p in graded_priors(trust) for _ in range(TRUSTS)
    )

    def __init__(self, table: Table) -> None:
        self.table = table
        self._rows: dict[tuple[int, ...], tuple[Guess, ...]] = {}  # those asked for, as guesses

    def begin(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> None:
        if len(self._rows) > _REMEMBERED:
            self._rows.clear()

    def after(self, request_id: str, path: tuple[int, ...], tail: tuple[int, ...]) -> Sequence[Guess]:
        key = tail[-len(KINDS) :]
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = self.table.row(key)
        return row

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """A table does not change."""

    def forget(self, request_id: str) -> None:
        """Nothing is kept by request."""


_REMEMBERED = 20_000
