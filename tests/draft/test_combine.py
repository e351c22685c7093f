"""One tree of several sources: the likeliest nodes first, chances learned, texts those of plain decoding."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest

from sooner.config import Budget, EngineConfig
from sooner.control.fixed import FixedController
from sooner.core.edit import LawParams
from sooner.core.tree import Draft
from sooner.draft.combine import CombineDrafter
from sooner.draft.protocol import Context, Outcome
from sooner.draft.recycle import RecycleSource
from sooner.draft.source import Guess
from sooner.draft.sources import DraftSource, LookupSource
from sooner.draft.table import TableSource, build
from sooner.engine.engine import Engine
from sooner.errors import ConfigError
from sooner.params import SamplingParams
from sooner.testing import ScriptedDrafter, ToyModel, check_drafter
from tests.engine.plain import plain_text


class Fixed:
    """A source that knows what follows each path."""

    taps: tuple[int, ...] = ()
    tops = 0

    def __init__(
        self, name: str, guesses: Mapping[tuple[int, ...], Sequence[Guess]], priors: Sequence[float]
    ) -> None:
        self.name, self.guesses, self.priors = name, guesses, tuple(priors)
        self.forgotten: list[str] = []

    def begin(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> None: ...

    def after(self, request_id: str, path: tuple[int, ...], tail: tuple[int, ...]) -> Sequence[Guess]:
        return self.guesses.get(path, ())

    def observe(self, outcomes: Sequence[Outcome]) -> None: ...

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)


def draft(drafter: CombineDrafter, budget: Budget, name: str = "r") -> Draft:
    [made] = drafter.propose([Context(name, [1, 2], LawParams(), 0, "match")], [budget])
    return made


WORTH = (0.8, 0.5, 0.3, 0.1)
LEFT = Fixed("left", {(): [(10, 0), (11, 2)], (10,): [(12, 1), (13, 3)], (11,): [(14, 0)]}, WORTH)
RIGHT = Fixed("right", {(): [(20, 1), (11, 1)], (10,): [(13, 1)]}, WORTH)


def test_the_likeliest_node_comes_first_whatever_its_source() -> None:
    made = draft(CombineDrafter("both", [LEFT, RIGHT]), Budget(3, 4, 7))
    named = dict(zip(zip(made.tokens, made.parents, strict=True), made.scores or (), strict=True))
    assert named[(10, -1)] == 0.8
    assert named[(11, -1)] == 0.5  # the more confident of two sources counts
    assert named[(20, -1)] == 0.5
    assert made.scores == tuple(sorted(made.scores or (), reverse=True))
    assert sorted(round(score, 3) for score in named.values()) == [0.4, 0.4, 0.4, 0.5, 0.5, 0.8]


def by_hand(sources: Sequence[Fixed], budget: Budget, floor: float) -> tuple[list[int], list[int]]:
    """Tokens and parents of a joined tree: of all that may come next, always the best."""
    paths: dict[int, tuple[int, ...]] = {-1: ()}
    scores, open_, parents = {-1: 1.0}, [], []
    node = -1
    while True:
        if len(paths[node]) < budget.depth:
            named = [(s.priors[code], token) for s in sources for token, code in s.guesses.get(paths[node], ())]
            best = {token: max(chance for chance, other in named if other == token) for _, token in named}
            worth = sorted(((c, t) for t, c in best.items() if scores[node] * c >= floor), reverse=True)
            for rank, (chance, token) in enumerate(worth[: budget.width]):
                open_.append((-scores[node] * chance, node * budget.width + rank, token, node))
        if not open_ or len(parents) == budget.nodes:
            return [paths[i][-1] for i in range(len(parents))], parents
        score, _, token, parent = chosen = min(open_)
        open_.remove(chosen)
        node = len(parents)
        parents.append(parent)
        paths[node], scores[node] = (*paths[parent], token), -score


@pytest.mark.parametrize("seed", range(20))
def test_the_tree_is_the_one_that_a_search_by_hand_finds(seed: int) -> None:
    draw = random.Random(seed)
    paths = [(), *((a,) for a in range(4)), *((a, b) for a in range(4) for b in range(4))]
    sources = [
        Fixed(
            name,
            {path: [(draw.randrange(4), draw.randrange(9)) for _ in range(draw.randrange(4))] for path in paths},
            [draw.choice((0.9, 0.5, 0.3, 0.1, 0.02)) for _ in range(9)],
        )
        for name in ("one", "two", "three")
    ]
    budget = Budget(draw.randint(1, 4), draw.randint(1, 4), draw.randint(1, 12))
    made = draft(CombineDrafter("all", sources, floor=0.03), budget)
    assert (list(made.tokens), list(made.parents)) == by_hand(sources, budget, 0.03)


@pytest.mark.parametrize(
    "budget", [Budget(2, 2, 3), Budget(1, 4, 9), Budget(3, 1, 2), Budget(0, 2, 2), Budget(2, 2, 0)]
)
def test_no_budget_is_overdrawn(budget: Budget) -> None:
    made = draft(CombineDrafter("both", [LEFT, RIGHT]), budget)
    whole = draft(CombineDrafter("both", [LEFT, RIGHT]), Budget(budget.depth, budget.width, 9))
    assert made.tokens == whole.tokens[: budget.nodes]
    if budget.width == 1:
        assert made.parents == tuple(range(-1, len(made) - 1))


def test_a_node_not_worth_its_row_is_left_out() -> None:
    made = draft(CombineDrafter("both", [LEFT, RIGHT], floor=0.45), Budget(3, 4, 9))
    assert set(made.tokens) == {10, 11, 20}
    assert min(made.scores or ()) >= 0.45


def test_chances_follow_what_survives_and_the_tree_follows_them() -> None:
    wrong = Fixed("wrong", {(): [(5, 0)]}, [0.9])
    right = Fixed("right", {(): [(6, 0)]}, [0.2])
    drafter = CombineDrafter("both", [wrong, right])
    assert draft(drafter, Budget.chain(1)).tokens == (5,)
    for _ in range(20):
        made = draft(drafter, Budget.chain(1))
        drafter.observe([Outcome("r", (6,), 0, len(made), None, made)])
    assert draft(drafter, Budget.chain(1)).tokens == (6,)  # learned though it was never drafted before
    assert drafter.values[0] < 0.3 < 0.7 < drafter.values[1]


def test_only_guesses_along_the_text_are_judged() -> None:
    drafter = CombineDrafter("left", [LEFT])
    made = draft(drafter, Budget(3, 4, 9))
    drafter.observe([Outcome("r", (11, 99), 1, len(made), None, made)])
    seen = [value for value, prior in zip(drafter.values, WORTH, strict=True) if value != prior]
    assert len(seen) == 2  # codes 0 (10 and 14, both wrong) and 2 (11, right); what hangs below 10 was not judged
    assert drafter.values[0] < 0.8
    assert drafter.values[2] > 0.3


def test_what_is_known_of_a_source_replaces_its_priors() -> None:
    assert CombineDrafter("l", [LEFT], {"left": [0.1] * 4}).values == [0.1] * 4
    assert CombineDrafter("l", [LEFT], {"left": [0.1]}).values == list(WORTH)  # of another version


def test_every_source_forgets() -> None:
    drafter = CombineDrafter("both", [LEFT, RIGHT])
    draft(drafter, Budget.chain(1), "gone")
    drafter.forget("gone")
    assert LEFT.forgotten[-1] == RIGHT.forgotten[-1] == "gone"
    drafter.observe([Outcome("gone", (10,), 1, 1)])
    assert drafter.values == [*WORTH, *WORTH]


def test_taps_and_tops_are_those_of_all_sources() -> None:
    first, second = ScriptedDrafter(lambda c, b: Draft()), ScriptedDrafter(lambda c, b: Draft())
    first.name, first.taps, second.name, second.taps = "one", (2, 0), "two", (1, 0)
    sources = [DraftSource(first), DraftSource(second), RecycleSource()]
    drafter = CombineDrafter("all", sources)
    assert (drafter.taps, drafter.tops) == ((2, 0, 1), 8)
    assert [source.places for source in sources[:2] if isinstance(source, DraftSource)] == [(0, 1), (2, 1)]


def test_sources_that_cannot_be_joined_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one; got none"):
        CombineDrafter("empty", [])
    with pytest.raises(ConfigError, match="different sources"):
        CombineDrafter("twice", [LEFT, LEFT])
    with pytest.raises(ConfigError, match="floor"):
        CombineDrafter("left", [LEFT], floor=1.0)


def everything() -> CombineDrafter:
    pairs: dict[tuple[int, ...], dict[int, float]] = {
        (a, b): {(a * b) % 17: 3.0, a: 1.0} for a in range(17) for b in range(17)
    }
    table = build(17, pairs | {(a,): {a: 1.0} for a in range(17)}, {})
    script = ScriptedDrafter(lambda context, budget: Draft((3,), (-1,)) if not budget.empty else Draft())
    sources = [LookupSource(), RecycleSource(60), TableSource(table), DraftSource(script)]
    return CombineDrafter("everything", sources)


MADE = {
    "recycle": lambda: CombineDrafter("recycle", [RecycleSource(60)]),
    "lookup+recycle": lambda: CombineDrafter("lookup+recycle", [LookupSource(), RecycleSource()]),
    "everything": everything,
}


@pytest.mark.parametrize("name", MADE)
def test_they_keep_the_drafter_protocol(name: str) -> None:
    check_drafter(MADE[name], 17)


@pytest.mark.parametrize("budget", [Budget.chain(5), Budget(6, 3, 14)], ids=["chain", "tree"])
@pytest.mark.parametrize(
    "asked",
    [
        SamplingParams(max_tokens=60),
        SamplingParams(max_tokens=60, temperature=0.9, seed=3),
        SamplingParams(max_tokens=60, repetition_penalty=1.2, temperature=0.5, seed=4, top_k=5),
    ],
    ids=["greedy", "seed", "penalty"],
)
@pytest.mark.parametrize("name", MADE)
def test_texts_are_those_of_plain_decoding(name: str, asked: SamplingParams, budget: Budget) -> None:
    engine = Engine(ToyModel(order=5), MADE[name](), FixedController(budget), config=EngineConfig(4, 128, 16))
    prompts = [[3, 1, 4, 1, 5], [2, 7, 1], [3, 1, 4], [1]]
    requests = [engine.add(prompt, asked) for prompt in prompts]
    while engine.busy:
        engine.step()
        engine.check()
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.tokens[len(prompt) :] == plain_text(ToyModel(order=5).next_logits, prompt, asked)[0]
    assert sum(request.tally.close().accepted for request in requests) > 10
    assert engine.guard.failures == {}
