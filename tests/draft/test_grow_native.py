"""Joined trees in C against the same in Python: drafts, scores and what is learned, along texts that repeat."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from sooner.config import Budget
from sooner.core.edit import LawParams
from sooner.core.tree import Draft, follow
from sooner.draft.grow import Grower, SourceGrower
from sooner.draft.grow_native import NativeGrower, fits
from sooner.draft.protocol import Context, Outcome, Tops
from sooner.draft.recycle import RecycleSource
from sooner.draft.source import Source
from sooner.draft.sources import DraftSource, LookupSource
from sooner.draft.table import Table, TableSource, build
from sooner.testing import ScriptedDrafter

VOCAB = 23
KINDS = ("lookup", "recycle", "lookup+recycle", "recycle+table", "lookup+recycle+table", "table+lookup")


def table(dice: random.Random) -> Table:
    def row() -> dict[int, float]:
        return {dice.randrange(VOCAB - 2): float(dice.randint(1, 60)) for _ in range(dice.randint(1, 12))}

    def runs(length: int, count: int) -> dict[tuple[int, ...], dict[int, float]]:
        return {tuple(dice.randrange(VOCAB) for _ in range(length)): row() for _ in range(count)}

    # fewer ids than the texts have: the target's vocabulary may be the larger one
    return build(VOCAB - 2, runs(1, 15) | runs(2, 200) | runs(3, 900), {})


def sources(kind: str, warm: Table, limit: int = 60) -> list[Source]:
    made = {"lookup": LookupSource, "recycle": lambda: RecycleSource(limit), "table": lambda: TableSource(warm)}
    return [made[name]() for name in kind.split("+")]


def growers(kind: str, seed: int, floor: float = 0.02) -> tuple[Grower, Grower]:
    """In C and in Python."""
    warm = table(random.Random(seed))
    made: list[Grower] = []
    for grower in (NativeGrower, SourceGrower):
        parts = sources(kind, warm)
        assert fits(parts)
        priors = [p for source in parts for p in source.priors]
        firsts = [sum(len(source.priors) for source in parts[:i]) for i in range(len(parts))]
        made.append(grower(parts, firsts, priors, floor))
    return made[0], made[1]


class Text:
    """A request that writes by a hidden bigram law, and what a target would say of its rows."""

    def __init__(self, name: str, dice: random.Random) -> None:
        self.name, self.dice = name, dice
        self.tokens = [dice.randrange(VOCAB) for _ in range(dice.randint(1, 40))]

    def context(self) -> Context:
        return Context(self.name, tuple(self.tokens), LawParams(), 0, "match")

    def outcome(self, draft: Draft, told: bool) -> Outcome:
        dice, tail = self.dice, tuple(self.tokens[-3:])
        dropped = dice.random() < 0.2  # a controller verifies less than was proposed
        verified = Draft(draft.tokens[:1], draft.parents[:1]) if dropped and len(draft) else draft
        came = [(self.tokens[-1] * 7 + 3) % VOCAB if dice.random() < 0.8 else dice.randrange(VOCAB)]
        path = follow(verified, came)
        while path and len(path) == len(came) and len(came) < 6:
            came.append((came[-1] * 7 + 3) % VOCAB)
            path = follow(verified, came)
        came = came[: len(path) + 1]
        rows = [tuple(dice.sample(range(VOCAB), 8)) for _ in range(1 + len(verified))]
        logits = [tuple(sorted((dice.gauss(0, 3) for _ in range(8)), reverse=True)) for _ in rows]
        if dice.random() < 0.1:
            logits[-1] = (float("nan"), *logits[-1][1:])
        self.tokens += came
        tops = Tops(tuple(rows), tuple(logits)) if told else None
        return Outcome(self.name, tuple(came), len(path), len(verified), None, verified, tail, tops)


def same(pair: tuple[Grower, Grower], contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
    ours, right = (grower.propose(contexts, budgets) for grower in pair)
    for a, b in zip(ours, right, strict=True):
        assert (a.tokens, a.parents) == (b.tokens, b.parents)
        assert a.scores == pytest.approx(b.scores, rel=1e-12) if len(a) else not len(b)
    return ours


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_and_what_is_learned_are_those_of_the_sources(kind: str, seed: int) -> None:
    pair, dice = growers(kind, seed), random.Random(seed)
    texts, drafted, born = [Text(f"t{i}", dice) for i in range(3)], 0, 3
    for _ in range(150):
        some = dice.sample(texts, dice.randint(1, 3))
        budgets = [
            Budget(dice.randint(1, 6), dice.randint(1, 5), dice.randint(1, 20))
            if dice.random() < 0.9
            else Budget(0, 0, 0)
            for _ in some
        ]
        drafts = same(pair, [text.context() for text in some], budgets)
        drafted += sum(len(draft) for draft in drafts)
        outcomes = [t.outcome(d, dice.random() < 0.8) for t, d in zip(some, drafts, strict=True)]
        for grower in pair:
            grower.observe(outcomes)
        assert pair[0].values() == pytest.approx(pair[1].values(), rel=1e-12)
        if dice.random() < 0.05:
            gone = texts.pop(dice.randrange(3))
            texts.append(Text(f"t{born}", dice))
            born += 1
            for grower in pair:
                grower.forget(gone.name)
    assert drafted > 500


def test_what_is_learned_fades_alike() -> None:
    """Counts are halved after a thousand of a kind, so that chances follow the text."""
    pair = growers("lookup", 1)
    text = [1, 2, 3] * 4
    for turn in range(1300):
        drafts = same(pair, [Context("r", tuple(text[-12:]), LawParams(), 0, "match")], [Budget(2, 1, 2)])
        came = (drafts[0].tokens[0] if turn < 1100 else 9,)
        for grower in pair:
            grower.observe([Outcome("r", came, int(turn < 1100), 2, None, drafts[0], (3,))])
    assert pair[0].values() == pytest.approx(pair[1].values(), rel=1e-12)
    assert 0.5 < pair[0].values()[4] < 0.8  # of all 1,300 guesses 0.85 were right


def test_an_id_with_a_new_life_begins_with_a_new_text() -> None:
    pair = growers("lookup", 0)
    for tokens in ([1, 2, 3, 1, 2, 3, 1], [5, 1], [5, 1, 2, 5, 1]):
        drafts = same(pair, [Context("r", tokens, LawParams(), 0, "match")], [Budget(3, 2, 6)])
    assert drafts[0].tokens[0] == 2


def test_nodes_below_the_floor_are_left_out_alike() -> None:
    pair, dice = growers("lookup+recycle+table", 3, floor=0.2), random.Random(3)
    text = Text("r", dice)
    for _ in range(40):
        drafts = same(pair, [text.context()], [Budget(6, 4, 20)])
        assert all(score >= 0.2 for score in drafts[0].scores or ())
        came = text.outcome(drafts[0], told=True)
        for grower in pair:
            grower.observe([came])


def test_what_is_heard_of_a_request_that_is_not_known_teaches_like_any_other() -> None:
    pair, dice = growers("recycle", 4), random.Random(4)
    text = Text("stranger", dice)
    came = [text.outcome(Draft(), told=True) for _ in range(20)]
    for grower in pair:
        grower.observe(came)
        grower.observe([Outcome("nobody", (), 0, 0)])
        grower.forget("never seen")
    same(pair, [Context("other", text.tokens[:-1], LawParams(), 0, "match")], [Budget(4, 4, 12)])


def test_rows_that_do_not_fit_a_draft_are_refused() -> None:
    ours, right = growers("recycle", 5)
    torn = Outcome("r", (1,), 0, 1, None, Draft((4,), (-1,)), (2, 3), Tops(((1, 2),), ((1.0, 0.0),)))
    for grower in (ours, right):
        with pytest.raises(ValueError, match=r"rows of likeliest|shorter|longer"):
            grower.observe([torn])


def test_rows_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="different lengths"):
        Tops(((1, 2), (3,)), ((1.0, 0.0), (1.0,)))
    ours, _ = growers("recycle", 5)
    outcomes = [
        Outcome(name, (1,), 0, 0, None, Draft(), (2, 3), Tops((ids,), ((0.0,) * len(ids),)))
        for name, ids in (("a", (1, 2)), ("b", (1, 2, 3)))
    ]
    with pytest.raises(ValueError, match="different lengths"):
        ours.observe(outcomes)


def test_the_store_of_rows_is_bounded() -> None:
    ours, _ = growers("recycle", 6)
    assert isinstance(ours, NativeGrower)
    for at in range(2000):
        tops = Tops(((1, 2),), ((1.0, 0.0),))
        ours.observe([Outcome("r", (1,), 0, 0, None, Draft(), (at, at + 1), tops)])
        assert ours.keys <= 2 * 60
    assert ours.keys >= 60


def test_other_sources_are_asked_themselves() -> None:
    script = ScriptedDrafter(lambda context, budget: Draft())
    assert fits([LookupSource()])
    assert not fits([LookupSource(), DraftSource(script)])
