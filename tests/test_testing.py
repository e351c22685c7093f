"""The shipped doubles and checks: they pass what keeps the protocols and name what does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import sooner.core.step
import sooner.testing
from sooner.config import Budget
from sooner.core.law import LawParams
from sooner.core.tree import ROOT, Draft, chain, depths
from sooner.draft.lookup import LookupDrafter
from sooner.draft.model import ModelDrafter
from sooner.draft.none import NoDrafter
from sooner.draft.protocol import Context, Drafter, Outcome
from sooner.errors import DraftError, ModelError
from sooner.model.attention import Visible, visible
from sooner.model.lanes import LaneCache
from sooner.testing import ScriptedDrafter, ShiftedModel, ToyModel, check_drafter, check_model, oracle

VOCAB = 17


class Free:
    """Keeps the protocol: one node a draft, where allowed. Broken drafters below change one thing."""

    name = "free"
    taps: tuple[int, ...] = ()

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        return [self.one(context, budget) for context, budget in zip(contexts, budgets, strict=True)]

    def one(self, context: Context, budget: Budget) -> Draft:
        return Draft() if budget.empty else chain([1])

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        pass

    def forget(self, request_id: str) -> None:
        pass


@pytest.mark.parametrize(
    "make",
    [
        NoDrafter,
        LookupDrafter,
        lambda: LookupDrafter(5, 2),
        lambda: ModelDrafter(ToyModel(VOCAB), VOCAB, 0.0),
        lambda: ModelDrafter(ToyModel(VOCAB - 3), VOCAB),
        lambda: ModelDrafter(ToyModel(VOCAB + 3), VOCAB, 1.0),
        lambda: ModelDrafter(ToyModel(VOCAB, context_limit=9), VOCAB),
        Free,
    ],
    ids=["none", "lookup", "long lookup", "model", "narrow model", "wide model", "short model", "free"],
)
def test_a_drafter_that_keeps_the_protocol_passes(make: Callable[[], Drafter]) -> None:
    for seed in range(3):
        check_drafter(make, VOCAB, steps=24, seed=seed)


class OutOfVocabulary(Free):
    def one(self, context: Context, budget: Budget) -> Draft:
        return Draft() if budget.empty else chain([VOCAB])


class TooDeep(Free):
    def one(self, context: Context, budget: Budget) -> Draft:
        return Draft() if budget.empty else chain([1] * (budget.depth + 1))


class TooWide(Free):
    def one(self, context: Context, budget: Budget) -> Draft:
        count = budget.width + 1
        return Draft() if budget.empty else Draft(tuple(range(count)), (ROOT,) * count)


class DraftsUnasked(Free):
    def one(self, context: Context, budget: Budget) -> Draft:
        return chain([1])


class NotADraft(Free):
    def one(self, context: Context, budget: Budget) -> Any:
        return [1]


class OneTooFew(Free):
    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        return super().propose(contexts, budgets)[1:]


class ReturnsNothing(Free):
    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> Any:
        return None


class ChangesItsContext(Free):
    def one(self, context: Context, budget: Budget) -> Draft:
        context.tokens.append(1)  # type: ignore[attr-defined]  # broken on purpose
        return Draft()


class LawsOfAnotherWidth(Free):
    def one(self, context: Context, budget: Budget) -> Draft:
        return Draft() if budget.empty else chain([1], torch.full((1, VOCAB - 1), 1 / (VOCAB - 1)))


class LogitsForLaws(Free):
    def one(self, context: Context, budget: Budget) -> Draft:
        return Draft() if budget.empty else chain([1], torch.ones((1, VOCAB)))


class ImpossibleToken(Free):
    def one(self, context: Context, budget: Budget) -> Draft:
        return Draft() if budget.empty else chain([1], torch.eye(VOCAB)[2:3])


class NoWidthLeft(Free):
    """Knows nothing of width 1: two children of the root whenever two nodes are allowed."""

    def one(self, context: Context, budget: Budget) -> Draft:
        return Draft((1, 2), (ROOT, ROOT)) if budget.nodes >= 2 and budget.depth else Draft()


class RaisesInPropose(Free):
    def one(self, context: Context, budget: Budget) -> Draft:
        raise KeyError("propose")


class RaisesInObserve(Free):
    def observe(self, outcomes: Sequence[Outcome]) -> None:
        raise KeyError("observe")


class RaisesForUnknownRequests(Free):
    def forget(self, request_id: str) -> None:
        if request_id == "check-never-seen":
            raise KeyError("forget")


class MalformedTree(Free):
    def one(self, context: Context, budget: Budget) -> Draft:
        return Draft((1, 1), (ROOT, ROOT))


class Nameless:
    taps = ()

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        return [Draft() for _ in contexts]


BROKEN: list[tuple[Callable[[], Any], str]] = [
    (Nameless, "lacks name, taps, propose, observe or forget"),
    (OutOfVocabulary, "token ids must be ints from 0 to 16"),
    (TooDeep, "but the budget is"),
    (TooWide, "but the budget is"),
    (NoWidthLeft, "but the budget is"),
    (DraftsUnasked, "but the budget is"),
    (NotADraft, "expected a Draft, got list"),
    (OneTooFew, "drafts for"),
    (ReturnsNothing, "propose"),
    (ChangesItsContext, "changed the tokens of a context"),
    (LawsOfAnotherWidth, "probs must be floats"),
    (LogitsForLaws, "probability distribution"),
    (ImpossibleToken, "no mass"),
    (RaisesInPropose, "propose"),
    (RaisesInObserve, "observe"),
    (RaisesForUnknownRequests, "forget"),
    (MalformedTree, "two children with token 1"),
]


@pytest.mark.parametrize(("make", "named"), BROKEN, ids=[make.__name__ for make, _ in BROKEN])
def test_a_broken_drafter_is_told_what_is_broken(make: Callable[[], Any], named: str) -> None:
    with pytest.raises(DraftError) as caught:
        check_drafter(make, VOCAB)
    assert named in str(caught.value)


PROMPT = [3, 1, 4, 1, 5]
TREE = Draft((2, 3, 2, 7, 7, 1), (ROOT, ROOT, 0, 0, 1, 3))


@pytest.mark.parametrize("prompt", [PROMPT, [3], [3, 1]], ids=["five", "one", "two"])
@pytest.mark.parametrize("draft", [TREE, chain([2, 3, 4]), Draft()], ids=["tree", "chain", "nothing"])
def test_the_toy_model_passes(prompt: list[int], draft: Draft) -> None:
    model = ToyModel(VOCAB)
    assert check_model(model, prompt, draft, tolerance=0.0) == 0.0
    assert model.lanes.in_use == 0


def siblings_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def mask(segments: list[Any], height: int, columns: int) -> Visible:
        seen = visible(segments, height, columns)
        for s, segment in enumerate(segments):
            own = torch.arange(segment.start, segment.start + segment.rows)
            seen.mask[s, : segment.rows] = torch.arange(columns) <= own[:, None]
        return seen

    monkeypatch.setattr(sooner.testing, "visible", mask)


def positions_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sooner.core.step, "depths", lambda parents: [d + 1 for d in depths(parents)])


def nothing_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LaneCache, "_compact", lambda self, lane, start, path: None)


def nan_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ToyModel, "_logits", lambda self, seen, last: torch.full((len(seen), VOCAB), float("nan")))


@pytest.mark.parametrize("mistake", [siblings_seen, positions_off, nothing_moved, nan_logits])
def test_a_model_with_a_mistake_fails(
    mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    with pytest.raises(ModelError, match="logits in a tree differ"):
        check_model(ToyModel(VOCAB), PROMPT, TREE)


def test_a_model_that_stages_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LaneCache, "stage", lambda self, lane, tokens, parents: None)
    with pytest.raises((ModelError, ValueError)):
        check_model(ToyModel(VOCAB), PROMPT, TREE)


def test_toy_logits_depend_on_every_token_and_its_place() -> None:
    model = ToyModel(VOCAB)
    base = model.next_logits(PROMPT)
    for i in range(len(PROMPT)):
        changed = list(PROMPT)
        changed[i] = (changed[i] + 1) % VOCAB
        assert not torch.equal(model.next_logits(changed), base)
    assert not torch.equal(model.next_logits([1, 3, 4, 1, 5]), base), "order counts"
    assert not torch.equal(model.next_logits([0, *PROMPT]), base), "places count"


def test_a_toy_of_higher_order_repeats_itself() -> None:
    """Two of three rows depend on the last token alone, so lookup has something to find."""
    model = ToyModel(VOCAB, order=3)
    last = [model.next_logits([i % VOCAB, (3 * i) % VOCAB, 7]) for i in range(60)]
    common = max(sum(torch.equal(a, b) for b in last) for a in last)
    assert 20 < common < 60


def test_a_scripted_drafter_keeps_a_record() -> None:
    drafter = ScriptedDrafter(lambda context, budget: chain([5]))
    context = Context("r", [1], LawParams(), 0, "match")
    assert drafter.propose([context], [Budget.chain(1)]) == [chain([5])]
    drafter.observe([Outcome("r", (5,), 1, 1)])
    drafter.forget("r")
    assert (drafter.contexts, drafter.forgotten) == ([context], ["r"])
    assert drafter.outcomes == [Outcome("r", (5,), 1, 1)]


def test_an_oracle_plays_back_its_text_and_errs_where_it_is_told_to() -> None:
    context = Context("r", [1, 2], LawParams(), 0, "match")
    text = [1, 2, 3, 4, 5]
    assert oracle(text).propose([context], [Budget.chain(2)]) == [chain([3, 4])]
    assert oracle(text).propose([context], [Budget.chain(9)]) == [chain([3, 4, 5])]
    assert oracle(text, right=1, vocab=6).propose([context], [Budget.chain(3)]) == [chain([3, 5, 0])]


def test_the_model_with_a_fault_is_caught_by_check_model() -> None:
    with pytest.raises(ModelError, match="differ from those of the path alone"):
        check_model(ShiftedModel(ToyModel()), [1, 2, 3, 4], chain([5, 6, 7]))
