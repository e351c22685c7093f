"""What the controller thinks of a guess: learnt by kind and by request, from verified and from watched drafts."""

from __future__ import annotations

from array import array
from random import Random

import pytest

from sooner.control.belief import Beliefs, begin
from sooner.control.belief_plain import PlainBeliefs
from sooner.control.protocol import Guess, Tried
from sooner.control.state import Nodes
from sooner.native.belief import Prices

CHAIN = Guess((1, 2, 3, 4), (-1, 0, 1, 2))
TREE = Guess((1, 9, 2, 8), (-1, -1, 0, 0))


def offered(token: int) -> Guess:
    """A drafter that knows the text 1, 2, 3, 4, 1, 2, ... offers what comes from `token` on."""
    return Guess(tuple((token + i - 1) % 4 + 1 for i in range(4)), (-1, 0, 1, 2))


def survivals(beliefs: Beliefs, name: str, guess: Guess) -> list[float]:
    """The chance of each node."""
    free = Prices(array("d", [0.0] * len(guess)), array("d", [0.0] * len(guess)), 1, 0.01, 100.0, 100.0, 0.0, 0.0)
    weighed, _ = beliefs.weigh([(name, guess)], 0.0, free)
    found = {node: -value for value, node in zip(weighed.values, weighed.nodes, strict=True)}
    return [found.get(node, 0.0) for node in range(len(guess))]


def first(beliefs: Beliefs, name: str = "r", guess: Guess = CHAIN) -> float:
    return survivals(beliefs, name, guess)[0]


def test_a_node_never_has_a_better_chance_than_its_parent() -> None:
    beliefs = begin()
    for guess in (CHAIN, TREE):
        chances = survivals(beliefs, "r", guess)
        assert all(c <= chances[p] for c, p in zip(chances, guess.parents, strict=True) if p >= 0)


def test_guesses_that_fail_lose_their_chance_and_those_that_hold_win_it() -> None:
    bad, good = begin(), begin()
    for _ in range(60):
        bad.learn([Tried("r", (7,), CHAIN, (0, 1, 2, 3), ())])
        good.learn([Tried("r", (1, 2, 3, 4, 5), CHAIN, (0, 1, 2, 3), (0, 1, 2, 3))])
    assert first(bad) < 0.05
    assert min(survivals(good, "r", CHAIN)) > 0.7


def test_what_was_not_verified_is_compared_with_the_text_that_came() -> None:
    """Nothing kept, one token a pass: the same as if all had been verified."""
    watched, wrong = begin(), begin()
    for _ in range(20):
        for token in (1, 2, 3, 4):
            watched.learn([Tried("r", (token,), offered(token), ())])
        wrong.learn([Tried("r", (7,), CHAIN, ())])
    assert first(watched) > 0.8
    assert first(wrong) < 0.15


def test_nodes_left_out_below_an_accepted_path_are_watched_too() -> None:
    beliefs = begin()
    for _ in range(30):
        beliefs.learn([Tried("r", (1, 2), CHAIN, (0,), (0,))])
        beliefs.learn([Tried("r", (3,))])
        beliefs.learn([Tried("r", (4,))])
    assert survivals(beliefs, "r", CHAIN)[3] > 0.7


def test_a_drawn_guess_is_judged_by_its_verdict_alone() -> None:
    """Its token may be rejected and yet come: the text says nothing of the acceptance."""
    drawn = Guess((1, 2), (-1, 0), drawn=True)
    beliefs = begin()
    before = first(beliefs, guess=drawn)
    for _ in range(20):
        beliefs.learn([Tried("r", (1,), drawn, ())])
    assert first(beliefs, guess=drawn) == before


def test_one_request_may_differ_from_the_others() -> None:
    beliefs = begin()
    for _ in range(40):
        beliefs.learn([Tried("bad", (7,), CHAIN, (0, 1, 2, 3), ())])
        beliefs.learn([Tried("good", (1, 2, 3, 4, 5), CHAIN, (0, 1, 2, 3), (0, 1, 2, 3))])
    assert first(beliefs, "bad") < 0.2 < 0.8 < first(beliefs, "good")
    assert 0.2 < first(beliefs, "new") < 0.95


def test_a_change_of_character_shows_within_twenty_tokens() -> None:
    beliefs = begin()
    for _ in range(300):
        beliefs.learn([Tried("r", (7,), CHAIN, ())])
    assert first(beliefs) < 0.03
    for _ in range(5):
        for token in (1, 2, 3, 4):
            beliefs.learn([Tried("r", (token,), offered(token), ())])
    assert first(beliefs) > 0.4


def test_what_is_known_of_a_request_for_long_can_still_change() -> None:
    """Half of its guesses were right two thousand times; then nearly all are, and none of them is a surprise."""
    beliefs = begin()
    for turn in range(2000):
        path = (0, 1, 2, 3) if turn % 2 else ()
        beliefs.learn([Tried("r", (1, 2, 3, 4, 5)[: len(path) + 1] if path else (7,), CHAIN, (0, 1, 2, 3), path)])
        beliefs.learn([Tried("other", (7,), CHAIN, (0, 1, 2, 3), ())])
    before = first(beliefs, "r")
    for _ in range(10):
        beliefs.learn([Tried("r", (1, 2, 3, 4, 5), CHAIN, (0, 1, 2, 3), (0, 1, 2, 3))])
    assert first(beliefs, "r") > before + 0.1


def test_scores_are_taken_for_what_they_proved_to_be_worth() -> None:
    """A drafter that says 0.95 and is right one time in five."""
    boast = Guess((1,), (-1,), (0.95,))
    beliefs = begin()
    for turn in range(200):
        path = (0,) if turn % 5 == 0 else ()
        beliefs.learn([Tried(f"r{turn}", (1, 2) if path else (7,), boast, (0,), path)])
    assert first(beliefs, "new", boast) == pytest.approx(0.2, abs=0.12)


def test_luck_counts_for_less_where_the_drafter_has_scored_its_guesses() -> None:
    """On recorded drafts a request's own luck made the chances of scored guesses worse."""
    scored, plain = Guess((1,), (-1,), (0.5,)), Guess((1,), (-1,))
    fallen = []
    for guess in (scored, plain):
        beliefs = begin()
        for turn in range(400):
            path = (0,) if turn % 2 else ()
            beliefs.learn([Tried(f"r{turn}", (1, 2) if path else (7,), guess, (0,), path)])
        before = first(beliefs, "new", guess)
        for _ in range(6):
            beliefs.learn([Tried("unlucky", (7,), guess, (0,), ())])
        fallen.append(before - first(beliefs, "unlucky", guess))
    assert 0 < fallen[0] < 0.5 * fallen[1]


def test_second_children_are_expected_to_do_worse_than_first_ones() -> None:
    chances = survivals(begin(), "r", TREE)
    assert chances[1] < chances[0] / 2


def test_what_is_known_of_a_request_goes_with_it() -> None:
    beliefs = begin()
    for turn in range(1000):
        beliefs.learn([Tried(f"r{turn}", (7,), CHAIN, ())])
        beliefs.forget(f"r{turn}")
    assert not len(beliefs)


def random_guess(random: Random) -> Guess:
    size = random.choice((0, 1, 3, 8, 20))
    parents = tuple(random.randint(-1, i - 1) for i in range(size))
    tokens = tuple(random.randint(0, 3) for _ in range(size))
    if random.random() < 0.5:
        return Guess(tokens, parents, drawn=random.random() < 0.3)
    scores: list[float] = []
    for parent in parents:
        scores.append((1.0 if parent < 0 else scores[parent]) * random.choice((0.0, 0.01, 0.5, 0.9, 0.9999, 1.0)))
    return Guess(tokens, parents, tuple(scores))


def random_tried(random: Random, name: str) -> Tried:
    """What might have come of a guess: kept nodes with their parents, a path among them, and tokens."""
    guess = random_guess(random)
    kept: list[int] = []
    for node, parent in enumerate(guess.parents):
        if random.random() < 0.6 and (parent < 0 or parent in kept):
            kept.append(node)
    path: list[int] = []
    for node in kept:
        if guess.parents[node] == (path[-1] if path else -1) and random.random() < 0.5:
            path.append(node)
    if random.random() < 0.4:
        kept, path = [], []
    more = tuple(random.randint(0, 3) for _ in range(random.randint(1, 3)))
    return Tried(name, tuple(guess.tokens[node] for node in path) + more, guess, tuple(kept), tuple(path))


def random_prices(random: Random, most: int) -> Prices:
    costs = array("d", [random.uniform(0.0, 0.002) for _ in range(most + random.randint(0, 2))])
    alone = costs if random.random() < 0.5 else array("d", [0.7 * cost for cost in costs])
    ready = random.randint(1, 4)
    rate = ready / 0.01
    return Prices(costs, alone, ready, 0.01, rate * random.uniform(1, 3), rate, 0.1, 0.05)


def by_node(nodes: Nodes) -> dict[tuple[int, int], float]:
    return dict(zip(zip(nodes.places, nodes.nodes, strict=True), nodes.values, strict=True))


@pytest.mark.parametrize("seed", range(4))
def test_in_c_and_in_python_they_learn_and_tell_the_same(seed: int) -> None:
    random, one, plain = Random(seed), begin(), PlainBeliefs()
    some = 0
    for turn in range(300):
        asked = [(f"r{random.randint(0, 5)}", random_guess(random)) for _ in range(random.randint(0, 4))]
        prices = random_prices(random, sum(len(guess) for _, guess in asked))
        for floor in (0.0, 0.02):
            (told, worth), (expected, worth_too) = (
                one.weigh(asked, floor, prices),
                plain.weigh(asked, floor, prices),
            )
            assert list(zip(*told, strict=True)) == sorted(zip(*told, strict=True))
            assert by_node(told) == pytest.approx(by_node(expected), rel=1e-9)
            assert worth == pytest.approx(worth_too, rel=1e-9)
            some += 0 < worth.nodes < len(told.values)
        tried = [random_tried(random, f"r{i}") for i in random.sample(range(6), random.randint(0, 5))]
        assert one.learn(tried) == plain.learn(tried)
        assert one.waiting == plain.waiting
        if turn % 17 == 0:
            for b in (one, plain):
                b.forget(f"r{turn % 6}")
        for levels, expected_levels in zip(
            one.levels(["r0", "new"], 16), plain.levels(["r0", "new"], 16), strict=True
        ):
            assert levels == pytest.approx(expected_levels, rel=1e-9)
    assert some > 50
