"""What the suffix automaton costs: tokens inserted and queried a second, bytes a token, and its answers checked.

    python benchmarks/suffix.py [--tokens 1000000] [--k 8]

Tokens come one by one, and after each the continuation of the longest match is asked for, a chain of up to k, as a
drafter would at one token per step. The text has Zipf frequencies; half of it is copied from earlier places. The
counts of 200 substrings are compared with a count by numpy over the whole text. Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np

from sooner.draft.automaton import ROOT, Automaton

VOCAB = 49_152
TRUST = np.linspace(0.4, 0.95, 16)
LEAST = 0.05


def text(count: int, seed: int = 0) -> np.ndarray:
    """Spans of 5 to 60 tokens, new or copied from anywhere before by turns."""
    rng = np.random.default_rng(seed)
    made = (rng.zipf(1.3, count) % VOCAB).astype(np.int64)
    at = 1000
    while at < count:
        length = min(int(rng.integers(5, 60)), count - at)
        if rng.random() < 0.5:
            start = int(rng.integers(0, at - length)) if at > length else 0
            made[at : at + length] = made[start : start + length]
        at += length
    return made


def occurrences(tokens: np.ndarray, part: np.ndarray) -> int:
    ends = np.ones(len(tokens) - len(part) + 1, dtype=bool)
    for i, token in enumerate(part):
        ends &= tokens[i : i + len(ends)] == token
    return int(ends.sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--k", type=int, default=8)
    args = parser.parse_args()
    tokens = text(args.tokens)
    warm = Automaton()
    warm.continuations(*warm.before(warm.extend(ROOT, [1, 1])), TRUST, (1, 1, 1), LEAST)  # compiled

    automaton, end = Automaton(), ROOT
    began = time.perf_counter()
    for token in tokens.tolist():
        end = automaton.extend(end, (token,))
    inserted = time.perf_counter() - began

    automaton, end, limits, drafted, right, guess = Automaton(), ROOT, (args.k, 1, args.k), 0, 0, -1
    began = time.perf_counter()
    for token in tokens.tolist():
        right += token == guess
        end = automaton.extend(end, (token,))
        found, _, _ = automaton.continuations(*automaton.before(end), TRUST, limits, LEAST)
        drafted += len(found)
        guess = found[0] if found else -1
    both = time.perf_counter() - began

    rng = np.random.default_rng(1)
    wrong = 0
    for _ in range(200):
        start, length = int(rng.integers(0, len(tokens) - 8)), int(rng.integers(1, 8))
        part = tokens[start : start + length]
        wrong += automaton.count(part.tolist()) != occurrences(tokens, part)
    figures = {
        "tokens": len(tokens),
        "inserted_per_s": round(len(tokens) / inserted),
        "inserted_and_queried_per_s": round(len(tokens) / both),
        "bytes_per_token": round(automaton.bytes / len(tokens), 1),
        "drafted_per_query": round(drafted / len(tokens), 2),
        "first_guess_right": round(right / len(tokens), 3),
        "wrong_counts_of_200": wrong,
    }
    for name, value in figures.items():
        print(f"{name:>28}  {value:,}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
