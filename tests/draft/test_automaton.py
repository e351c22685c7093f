"""The suffix automaton held to brute force: which substrings it knows, how often they came, what followed them."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sooner.draft.automaton import ROOT, Automaton

many = settings(max_examples=300, deadline=None, derandomize=True)
texts = st.lists(st.integers(0, 2), max_size=24)
groups = st.lists(texts, min_size=1, max_size=4)
EVEN = np.ones(1)


def occurrences(text: Sequence[int], part: Sequence[int]) -> int:
    return sum(list(text[i : i + len(part)]) == list(part) for i in range(len(text) - len(part) + 1))


def substrings(text: Sequence[int]) -> set[tuple[int, ...]]:
    return {tuple(text[i:j]) for i in range(len(text)) for j in range(i + 1, len(text) + 1)}


@many
@given(several=groups, other=texts)
def test_counts_and_matches_are_those_of_brute_force(several: list[list[int]], other: list[int]) -> None:
    automaton = Automaton(reach=10**6)
    for text in several:
        automaton.extend(ROOT, text)
    known = {
        part: sum(occurrences(text, part) for text in several) for text in several for part in substrings(text)
    }
    for part, count in known.items():
        assert automaton.count(part) == count
    for part in substrings(other) - known.keys():
        assert automaton.count(part) == 0
    suffixes = [other[i:] for i in range(len(other))]
    longest = next((len(s) for s in suffixes if tuple(s) in known), 0)
    assert automaton.match(other)[1] == longest


@many
@given(text=texts, steps=st.lists(st.integers(0, 5), max_size=8))
def test_a_text_in_pieces_is_the_text_and_its_longest_repeated_suffix_is_known(
    text: list[int], steps: list[int]
) -> None:
    automaton, end, length = Automaton(reach=10**6), ROOT, 0
    for step in [*steps, len(text)]:
        new = text[length : length + step]
        end, length = automaton.extend(end, new), length + len(new)
        past = text[:length]
        repeated = [n for n in range(length) if n and occurrences(past, past[length - n :]) > 1]
        state, found = automaton.before(end)
        assert found == max(repeated, default=0)
        assert found == 0 or automaton.match(past[length - found :]) == (state, found)
    assert automaton.tokens == len(text)


@many
@given(pairs=st.lists(st.tuples(st.booleans(), st.integers(0, 2)), max_size=30))
def test_two_texts_may_grow_by_turns(pairs: list[tuple[bool, int]]) -> None:
    automaton, ends = Automaton(reach=10**6), [ROOT, ROOT]
    grown: list[list[int]] = [[], []]
    for which, token in pairs:
        ends[which] = automaton.extend(ends[which], [token])
        grown[which].append(token)
    for part in substrings(grown[0]) | substrings(grown[1]):
        assert automaton.count(part) == sum(occurrences(text, part) for text in grown)


@many
@given(text=st.lists(st.integers(0, 2), min_size=1, max_size=24))
def test_what_follows_the_longest_match_comes_with_its_frequency(text: list[int]) -> None:
    """With all trust in the longest match, a node's score is its share of what followed there."""
    automaton = Automaton(reach=10**6)
    state, length = automaton.before(automaton.extend(ROOT, text))
    tokens, parents, scores = automaton.continuations(state, length, EVEN, (2, 9, 99), 1e-9)
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((token,) if parent < 0 else (*paths[parent], token))
    end = text[len(text) - length :] if length else []
    expected = {}
    for first in range(3) if length else ():
        share = occurrences(text, [*end, first]) / sum(occurrences(text, [*end, x]) for x in range(3))
        if share:
            expected[(first,)] = share
    found = {path: score for path, score in zip(paths, scores, strict=True) if len(path) == 1}
    assert found.keys() == expected.keys()
    assert all(abs(found[path] - expected[path]) < 1e-12 for path in found)
    assert all(tuple(path[:-1]) in paths for path in paths if len(path) > 1)
    assert scores == sorted(scores, reverse=True)


def test_less_trusted_matches_leave_a_share_to_shorter_ones() -> None:
    automaton = Automaton()
    end = automaton.extend(ROOT, [1, 2, 7, 5, 2, 8, 6, 1, 2])
    state, length = automaton.before(end)
    tokens, parents, scores = automaton.continuations(state, length, np.array([0, 0.5, 0.8]), (1, 9, 9), 0.01)
    assert (tokens, parents) == ([7, 8], [-1, -1])
    # 7 followed both matches: all of 0.8 and half of the shorter one's half of the rest.
    assert np.allclose(scores, [0.8 + 0.2 * 0.5 / 2, 0.2 * 0.5 / 2])


def test_limits_of_depth_width_and_nodes_hold() -> None:
    rng = np.random.default_rng(0)
    automaton = Automaton()
    state, length = automaton.before(automaton.extend(ROOT, rng.integers(0, 3, 500)))
    for depth, width, nodes in [(1, 1, 9), (4, 1, 9), (4, 2, 5), (3, 3, 30), (9, 9, 1)]:
        tokens, parents, _ = automaton.continuations(state, length, np.full(9, 0.9), (depth, width, nodes), 1e-6)
        deep = []
        for parent in parents:
            deep.append(1 if parent < 0 else deep[parent] + 1)
        assert 0 < len(tokens) <= nodes
        assert max(deep) <= depth
        assert max(parents.count(p) for p in parents) <= width


def test_a_text_in_circles_is_followed_round_and_round() -> None:
    automaton = Automaton()
    state, length = automaton.before(automaton.extend(ROOT, [1, 2, 3] * 3))
    tokens, parents, _ = automaton.continuations(state, length, np.full(20, 0.99), (8, 1, 8), 0.01)
    assert (tokens, parents) == ([1, 2, 3, 1, 2, 3, 1, 2], list(range(-1, 7)))


def test_a_text_in_circles_costs_no_more_the_longer_it_is() -> None:
    """Without a limit the counts of 200,000 equal tokens would take 20 thousand million steps."""
    automaton = Automaton(reach=8)
    automaton.extend(ROOT, [7] * 200_000)
    assert automaton.count([7]) == 8, "only the longest suffixes count"


def test_memory_is_what_the_arrays_hold() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.zipf(1.3, 60_000) % 50_000
    Automaton().extend(ROOT, [1])  # compiled before anything is counted
    tracemalloc.start()
    automaton = Automaton()
    automaton.extend(ROOT, tokens)
    tracemalloc.stop()
    assert automaton.bytes / len(tokens) <= 100
