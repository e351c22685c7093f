"""Drafts as trees: malformed ones are refused, and every view of a tree agrees with its parents."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sooner.core.tree import EMPTY, ROOT, Draft, Trie, ancestors, chain, children, depths, follow, is_chain


@st.composite
def drafts(draw: st.DrawFn, most: int = 10) -> Draft:
    """Any well-formed tree over four tokens."""
    tokens: list[int] = []
    parents: list[int] = []
    for node in range(draw(st.integers(0, most))):
        parent = draw(st.integers(ROOT, node - 1))
        used = {t for t, p in zip(tokens, parents, strict=True) if p == parent}
        free = sorted({0, 1, 2, 3} - used)
        if free:
            tokens.append(draw(st.sampled_from(free)))
            parents.append(parent)
        else:
            break
    return Draft(tuple(tokens), tuple(parents))


def _path(draft: Draft, node: int) -> list[int]:
    path: list[int] = []
    while node != ROOT:
        path.insert(0, node)
        node = draft.parents[node]
    return path


quick = settings(max_examples=150, deadline=None, derandomize=True, database=None)


@pytest.mark.parametrize(
    ("tokens", "parents", "message"),
    [
        ((1, 2), (ROOT,), "2 tokens but 1 parents"),
        ((1,), (0,), "node 0 has parent 0"),
        ((1, 2), (ROOT, 2), "node 1 has parent 2"),
        ((1, 2), (1, ROOT), "node 0 has parent 1"),
        ((1,), (-2,), "node 0 has parent -2"),
        ((5, 5), (ROOT, ROOT), "node -1 has two children with token 5"),
        ((1, 5, 5), (ROOT, 0, 0), "node 0 has two children with token 5"),
    ],
)
def test_a_malformed_tree_is_refused_with_its_fault(
    tokens: tuple[int, ...], parents: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Draft(tokens, parents)


@pytest.mark.parametrize("probs", [torch.ones(2, 3), torch.ones(1), torch.ones(1, 3, 1), torch.ones(0, 3)])
def test_probs_of_another_shape_are_refused(probs: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"probs must be \[1, V\]"):
        Draft((1,), (ROOT,), probs)


def test_scores_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="1 tokens but 2 scores"):
        Draft((1,), (ROOT,), scores=(0.5, 0.5))


def test_cousins_may_carry_the_same_token() -> None:
    assert len(Draft((1, 2, 3, 3), (ROOT, ROOT, 0, 1))) == 4


def test_a_draft_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EMPTY.tokens = (1,)  # type: ignore[misc]


def test_a_chain_hangs_every_node_off_the_one_before() -> None:
    assert chain([7, 7, 8]) == Draft((7, 7, 8), (ROOT, 0, 1))
    assert chain([]) == EMPTY
    assert len(EMPTY) == 0
    assert is_chain(chain([1, 2, 3]).parents)
    assert is_chain(())
    assert not is_chain((ROOT, ROOT))
    assert not is_chain((ROOT, 0, 0))


@quick
@given(draft=drafts())
def test_depths_children_and_ancestors_agree_with_the_paths(draft: Draft) -> None:
    paths = [_path(draft, node) for node in range(len(draft))]
    assert depths(draft.parents) == [len(path) for path in paths]
    above = ancestors(draft.parents)
    assert above.shape == (len(draft), len(draft))
    assert [row.nonzero().flatten().tolist() for row in above] == paths
    below = children(draft.parents)
    assert sorted(node for nodes in below.values() for node in nodes) == list(range(len(draft)))
    assert all(nodes and nodes == sorted(nodes) for nodes in below.values())
    assert all(draft.parents[node] == parent for parent, nodes in below.items() for node in nodes)


@quick
@given(draft=drafts(), tokens=st.lists(st.integers(0, 3), max_size=6))
def test_follow_finds_the_longest_path_that_the_text_takes(draft: Draft, tokens: list[int]) -> None:
    spelled = {tuple(draft.tokens[n] for n in _path(draft, node)): node for node in range(len(draft))}
    longest = max(size for size in range(len(tokens) + 1) if size == 0 or tuple(tokens[:size]) in spelled)
    found = follow(draft, tokens)
    assert found == (_path(draft, spelled[tuple(tokens[:longest])]) if longest else [])


@quick
@given(
    texts=st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=6),
    nodes=st.integers(0, 8),
    width=st.integers(1, 3),
)
def test_a_trie_shares_beginnings_and_keeps_its_limits(texts: list[list[int]], nodes: int, width: int) -> None:
    trie = Trie(nodes, width)
    for text in texts:
        trie.add(text)
    draft = trie.draft()
    assert len(draft) <= nodes
    assert trie.full == (len(draft) == nodes)
    assert all(len(below) <= width for below in children(draft.parents).values())
    prefixes = {tuple(text[:size]) for text in texts for size in range(1, len(text) + 1)}
    spelled = [tuple(draft.tokens[n] for n in _path(draft, node)) for node in range(len(draft))]
    assert len(set(spelled)) == len(spelled)
    assert set(spelled) <= prefixes


def test_a_trie_with_room_holds_every_text_and_the_first_one_first() -> None:
    trie = Trie(10, 3)
    for text in ([1, 2, 3], [1, 2, 4], [5], [1, 2, 3]):
        trie.add(text)
    assert trie.draft() == Draft((1, 2, 3, 4, 5), (ROOT, 0, 1, 1, ROOT))
