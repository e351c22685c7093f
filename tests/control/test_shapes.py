"""How deep it is safe to ask, and what comes of it."""

from __future__ import annotations

from sooner.control.protocol import Guess
from sooner.control.shapes import Shapes, levels

CHAIN = Guess((1, 2, 3), (-1, 0, 1))
TREE = Guess((1, 2, 3, 4), (-1, -1, 0, 0))


def test_the_first_drafts_are_short_and_cheap_ones_may_double() -> None:
    shapes = Shapes(16)
    depths = []
    for _ in range(12):
        depths.append(shapes.safe)
        shapes.tried(shapes.safe, shapes.safe, cheap=True)
    assert depths == [2] * 3 + [4] * 3 + [8] * 3 + [16] * 3


def test_a_dear_one_is_not_made_deeper() -> None:
    shapes = Shapes(16)
    for _ in range(20):
        shapes.tried(2, 2, cheap=False)
    assert shapes.safe == 2


def test_the_limit_is_kept() -> None:
    shapes = Shapes(5)
    for _ in range(20):
        shapes.tried(shapes.safe, 1, cheap=True)
    assert shapes.safe == 5
    assert Shapes(0).safe == 0


def test_what_is_usual_is_what_answers_reached() -> None:
    shapes = Shapes(2)
    for turn in range(40):
        shapes.tried(2, turn % 2, cheap=True)
    assert 0.3 < shapes.usual < 0.7


def test_the_depth_of_nodes_follows_their_parents() -> None:
    assert levels(CHAIN) == [1, 2, 3]
    assert levels(TREE) == [1, 1, 2, 2]


def test_a_level_that_is_rarely_worth_a_row_is_rarely_reached() -> None:
    shapes = Shapes(8)
    for turn in range(100):
        shapes.add(CHAIN, (0, 1) if turn % 4 else (0,), 3)
    first, second, third = shapes.fill(3)
    assert first > 0.9
    assert 0.6 < second < 0.9
    assert third < 0.1


def test_siblings_count_as_rows() -> None:
    shapes = Shapes(8)
    for _ in range(100):
        shapes.add(TREE, (0, 1, 2), 2)
    assert 2.8 < sum(shapes.nodes(2)) < 3.2


def test_a_draft_of_which_nothing_was_kept_says_nothing_of_the_drafter() -> None:
    shapes = Shapes(8)
    for _ in range(100):
        shapes.add(CHAIN, (), 3)
    assert shapes.fill(3) == [1.0, 1.0, 1.0]
    for _ in range(100):
        shapes.add(Guess(), (), 3)
    assert shapes.fill(3)[0] < 0.1
