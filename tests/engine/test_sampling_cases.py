"""Public bug reports about acceptance, residuals, temperatures, NaN, mixed batches and trees, as cases.

The numbers are those of the reference list of bug reports; the right behaviour is always that of plain
decoding. Targets are a tiny Llama or a table of laws, drafts are scripted to make each case sure to fire.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sooner.config import Budget, EngineConfig
from sooner.control.fixed import FixedController
from sooner.core.step import Step
from sooner.core.tree import EMPTY, ROOT, Draft, chain
from sooner.draft.model import ModelDrafter
from sooner.draft.none import NoDrafter
from sooner.draft.protocol import Context, Drafter
from sooner.engine.engine import Engine
from sooner.model.protocol import Model, Output
from sooner.params import Rule, SamplingParams
from sooner.testing import ScriptedDrafter, ToyModel
from tests.core.goodness import LIMIT, chi_square, off_by
from tests.engine.sampling import (
    PLAIN,
    PROMPT,
    SHARP,
    VOCAB,
    Twin,
    counts,
    drawn_tree,
    guessed_tree,
    seeds,
    serve,
    texts,
    twin,
    written,
)

COIN_RULES: tuple[Rule, ...] = ("reject", "block", "traversal")
RULES: tuple[Rule, ...] = ("match", *COIN_RULES)
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture
def target() -> Twin:
    return twin(1)


class TableModel(ToyModel):
    """The same law after every text."""

    def __init__(self, law: Sequence[float]) -> None:
        super().__init__(len(law))
        self.table = torch.tensor(law, dtype=torch.float64)

    def _logits(self, seen: Tensor, last: Tensor) -> Tensor:
        return self.table.log().expand(len(seen), -1).clone()


class Poisoned:
    """A model whose logits after the token `after` at `position` are all `value`."""

    def __init__(self, model: Model, after: int, position: int, value: float) -> None:
        self.vocab_size, self.context_limit, self.lanes = model.vocab_size, model.context_limit, model.lanes
        self._model, self._after, self._position, self._value = model, after, position, value

    def forward(self, step: Step, *, rows: Tensor, taps: Sequence[int] = ()) -> Output:
        out = self._model.forward(step, rows=rows, taps=taps)
        hit = (step.tokens[rows] == self._after) & (step.positions[rows] == self._position)
        return Output(torch.where(hit[:, None], self._value, out.logits), out.features)


# --- 15: the residual sums to zero -----------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.01, 0.5, 1.0])
@pytest.mark.parametrize("shift", [0.0, 1e-7])
def test_case_15_a_model_that_drafts_for_itself_is_accepted(
    target: Twin, temperature: float, shift: float
) -> None:
    """q equals p up to rounding: no NaN, no error, and all but a few guesses in ten thousand survive."""
    draft = twin(1)
    with torch.no_grad():
        for weights in draft.plain.parameters():
            weights.add_(shift * torch.randn(weights.shape, generator=torch.Generator().manual_seed(1)))
    draft.model._module.load_state_dict(draft.plain.state_dict())
    wanted = [
        SamplingParams(temperature=temperature, seed=s, rule=COIN_RULES[s % 3], max_tokens=6) for s in range(180)
    ]
    drafter = ModelDrafter(draft.model, VOCAB, confidence=0.0)
    done = [request.tally.close() for request in serve(target.model, drafter, Budget.chain(5), wanted)]
    drafted, accepted = sum(d.drafted for d in done), sum(d.accepted for d in done)
    assert drafted >= 900
    assert accepted >= drafted - 2


# --- 16: everything is accepted --------------------------------------------------------------------

PEAKED = (0.62, 0.2, 0.1, 0.05, 0.03)


def _uniform_chain(vocab: int) -> ScriptedDrafter:
    def script(context: Context, budget: Budget) -> Draft:
        generator = torch.Generator().manual_seed(context.seed * 64 + len(context.tokens))
        tokens = torch.randint(0, vocab, (budget.depth,), generator=generator).tolist()
        return chain(tokens, torch.full((budget.depth, vocab), 1 / vocab))

    return ScriptedDrafter(script)


@pytest.mark.parametrize("rule", ["reject", "block"])
def test_case_16_a_uniform_drafter_is_accepted_as_often_as_theory_says(rule: Rule) -> None:
    """alpha = sum of min(p, q); token by token k guesses give alpha + alpha^2 + ... + alpha^k a round."""
    count, k, vocab = 2_500, 4, len(PEAKED)
    drafter = _uniform_chain(vocab)
    found = texts(TableModel(PEAKED), drafter, Budget.chain(k), seeds(PLAIN, count, rule=rule, max_tokens=5), (0,))
    law = torch.tensor(PEAKED, dtype=torch.float64)
    joint = law[:, None, None] * law[:, None] * law
    assert chi_square(counts(found, 3, vocab), joint) > LIMIT
    alpha = float(torch.clamp(law, max=1 / vocab).sum())
    rounds = [outcome.accepted for outcome in drafter.outcomes if outcome.drafted == k]
    assert len(rounds) == count
    if rule == "reject":
        for depth in range(1, k + 1):
            share = sum(accepted >= depth for accepted in rounds) / count
            assert off_by(share, alpha**depth, count) < 4, depth
    else:
        mean = sum(rounds) / count
        assert mean > sum(alpha**depth for depth in range(1, k + 1)) - 4 * 1.2 / count**0.5


# --- 17: q is not the law the token came from ------------------------------------------------------

TWO_TARGET, TWO_DRAFT = (0.7, 0.3), (0.55, 0.45)


def _greedy_copy(context: Context, budget: Budget) -> Draft:
    return chain([0] * budget.depth)


def _warm(temperature: float, top_k: int) -> Callable[[Context, Budget], Draft]:
    weights = torch.tensor(TWO_DRAFT) ** (1 / temperature)
    weights[top_k:] = 0
    law = weights / weights.sum()

    def script(context: Context, budget: Budget) -> Draft:
        generator = torch.Generator().manual_seed(context.seed * 64 + len(context.tokens))
        tokens = torch.multinomial(law, budget.depth, replacement=True, generator=generator).tolist()
        return chain(tokens, law.expand(budget.depth, -1))

    return script


@pytest.mark.parametrize("rule", COIN_RULES)
@pytest.mark.parametrize(
    "script", [_greedy_copy, _warm(2.0, 2), _warm(1.0, 1)], ids=["greedy", "temperature 2", "top-k 1"]
)
def test_case_17_a_draft_with_settings_of_its_own_does_not_bias(
    rule: Rule, script: Callable[[Context, Budget], Draft]
) -> None:
    """Target at temperature 0.7; what was drawn, and from what, is the draft's own affair."""
    params = replace(PLAIN, temperature=0.7)
    wanted = seeds(params, 1_500, rule=rule, max_tokens=3)
    found = texts(TableModel(TWO_TARGET), ScriptedDrafter(script), Budget.chain(2), wanted, (0,))
    law = torch.tensor(TWO_TARGET, dtype=torch.float64) ** (1 / 0.7)
    law = law / law.sum()
    assert chi_square(counts(found, 3, 2), law[:, None, None] * law[:, None] * law) > LIMIT


# --- 20: probability zero at the edge --------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("width", [1, 3])
def test_case_20_what_top_k_removed_is_never_written_however_often_it_is_proposed(
    target: Twin, rule: Rule, width: int
) -> None:
    params = replace(PLAIN, top_k=2)
    joint = target.joint(PROMPT, params, 3)
    for drafter in (drawn_tree(width, uniform=True), guessed_tree(width)):
        budget = Budget(depth=2, width=width, nodes=width + width**2)
        found = texts(target.model, drafter, budget, seeds(params, 150, rule=rule, max_tokens=3))
        assert all(joint[tuple(text)] > 0 for text in found)


# --- 21: not a number ------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_case_21_nan_in_the_draft_model_only_ends_the_draft(
    target: Twin, temperature: float, value: float
) -> None:
    """A broken law of the draft at one position: the draft stops before it, the text is the plain one."""
    draft = Poisoned(twin(2).model, after=2, position=len(PROMPT), value=value)
    params = [SamplingParams(temperature=temperature, seed=s, rule="match", max_tokens=6) for s in range(40)]
    plain = texts(target.model, NoDrafter(), Budget.chain(4), params)
    assert any(text[0] == 2 for text in plain)
    assert texts(target.model, ModelDrafter(draft, VOCAB, confidence=0.0), Budget.chain(4), params) == plain


def test_case_21_a_draft_model_of_nothing_but_nan_leaves_plain_sampling(target: Twin) -> None:
    class AllNan(Poisoned):
        def forward(self, step: Step, *, rows: Tensor, taps: Sequence[int] = ()) -> Output:
            return Output(torch.full((len(rows), VOCAB), math.nan))

    drafter = ModelDrafter(AllNan(twin(2).model, 0, 0, 0.0), VOCAB)
    wanted = [
        replace(p, seed=s, rule="traversal", max_tokens=4) for s, p in enumerate([PLAIN, SHARP, GREEDY] * 20)
    ]
    done = serve(target.model, drafter, Budget.chain(4), wanted)
    assert all(request.tally.close().drafted == 0 for request in done)
    assert [written(r) for r in done] == texts(target.model, NoDrafter(), Budget.chain(4), wanted)


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("params", [GREEDY, PLAIN, SHARP], ids=["greedy", "plain", "sharp"])
def test_case_21_nan_in_the_target_ends_that_request_alone(
    rule: Rule, params: SamplingParams, value: float
) -> None:
    """The tokens before it are right and kept, the error is named, every step goes on with a real id."""
    wanted = [replace(params, seed=s, rule=rule, max_tokens=5) for s in range(24)]
    make, budget = (drawn_tree if params is PLAIN else guessed_tree), Budget(depth=2, width=2, nodes=6)
    whole = texts(twin(1).model, make(2), budget, wanted)
    seconds = [text[1] for text in whole]
    poison = max(seconds, key=seconds.count)
    model = Poisoned(twin(1).model, after=poison, position=len(PROMPT) + 1, value=value)
    engine = Engine(model, make(2), FixedController(budget), config=EngineConfig(32, 4096, 512))
    requests = [engine.add(PROMPT, own) for own in wanted]
    while engine.busy:
        running = sum(request.finish is None for request in requests)
        events = engine.step()
        assert len(events) == running
        assert all(event.tokens or event.finish == "error" for event in events)
        assert all(0 <= token < VOCAB for event in events for token in event.tokens)
    engine.check()
    for request, text in zip(requests, whole, strict=True):
        struck = written(request)[1] == poison
        assert request.finish == ("error" if struck else "length")
        assert len(written(request)) == (2 if struck else 5)
        assert ("not finite" in (request.error or "")) == struck
        # block and traversal judge a draft that holds a broken row by other coins; texts may then differ.
        if rule in ("match", "reject"):
            assert written(request) == text[: len(written(request))]
    struck_ones = sum(request.error is not None for request in requests)
    assert struck_ones > 0
    assert params is GREEDY or struck_ones < len(requests)


# --- 22: temperature zero, and mixed batches -------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: guessed_tree(2), lambda: drawn_tree(2), NoDrafter])
def test_case_22_greedy_and_sampled_requests_share_a_batch_in_any_order(
    target: Twin, make: Callable[[], Drafter]
) -> None:
    """Temperatures 0, 1e-6 and 0.7, alone and together: nobody's text depends on its neighbours."""
    kinds = [GREEDY, replace(PLAIN, temperature=1e-6), replace(PLAIN, temperature=0.7)]
    wanted = [replace(p, seed=s, rule=rule, max_tokens=8) for p in kinds for rule in RULES for s in range(2)]
    budget = Budget(depth=2, width=2, nodes=6)
    alone = [texts(target.model, make(), budget, [own])[0] for own in wanted]
    assert all(text == alone[0] for text, own in zip(alone, wanted, strict=True) if own.temperature < 0.1)
    assert len({tuple(text) for text in alone}) > 1
    for order in itertools.permutations(range(3)):
        ranked = sorted(range(len(wanted)), key=lambda i: (i % 2, order[i // 8], i))
        together = texts(target.model, make(), budget, [wanted[i] for i in ranked])
        assert together == [alone[i] for i in ranked]


def test_case_22_a_greedy_model_that_drafts_for_itself_is_always_accepted(target: Twin) -> None:
    drafter = ModelDrafter(twin(1).model, VOCAB, confidence=0.0)
    (request,) = serve(target.model, drafter, Budget.chain(4), [replace(GREEDY, max_tokens=20)])
    stats = request.tally.close()
    assert stats.accepted == stats.drafted == 16
    assert stats.steps == 4


# --- 23: trees -------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("rule", ["match", "reject", "traversal"])
def test_case_23_trees_of_width_two_and_four_keep_the_law(target: Twin, rule: Rule, width: int) -> None:
    budget = Budget(depth=2, width=width, nodes=width + width**2)
    joint = target.joint(PROMPT, PLAIN, 2)
    found = texts(target.model, drawn_tree(width), budget, seeds(PLAIN, 1_500, rule=rule, max_tokens=3))
    assert chi_square(counts(found, 2), joint) > LIMIT


@pytest.mark.parametrize(
    "params", [GREEDY, replace(PLAIN, temperature=0.2, top_p=0.8, seed=5), replace(PLAIN, seed=5)], ids=str
)
def test_case_23_the_text_does_not_depend_on_the_shape_of_the_tree(target: Twin, params: SamplingParams) -> None:
    shapes = [Budget(1, 1, 1), Budget(4, 1, 4), Budget(1, 4, 4), Budget(2, 2, 6), Budget(3, 2, 14)]
    wanted = [replace(params, max_tokens=16)]
    plain = texts(target.model, NoDrafter(), Budget.chain(1), wanted)
    for budget in shapes:
        for drafter in (guessed_tree(budget.width), drawn_tree(budget.width)):
            assert texts(target.model, drafter, budget, wanted) == plain


def test_case_23_duplicate_siblings_are_refused_and_cost_nothing_but_speed(target: Twin) -> None:
    """One of two equal siblings would be tried against a law that has lost it already."""
    drafter = ScriptedDrafter(lambda context, budget: Draft((1, 1), (ROOT, ROOT)))
    engine = Engine(target.model, drafter, FixedController(Budget(1, 2, 2)))
    request = engine.add(PROMPT, replace(PLAIN, seed=3, max_tokens=8))
    while engine.busy:
        engine.step()
    assert written(request) == texts(target.model, NoDrafter(), Budget.chain(1), [request.params])[0]
    assert engine.guard.failures == {"raised": 7}


@pytest.mark.parametrize("rule", RULES)
def test_case_23_all_siblings_rejected_gives_the_one_token_that_is_left(rule: Rule) -> None:
    """Siblings hold every token but one, and the target allows only that one."""
    model = TableModel((0.0, 0.0, 1.0, 0.0))
    tokens = (0, 1, 3)
    q = torch.tensor([[0.25, 0.25, 0.25, 0.25], [0, 1 / 3, 1 / 3, 1 / 3], [0, 0, 0.5, 0.5]])
    for draft in (Draft(tokens, (ROOT,) * 3), Draft(tokens, (ROOT,) * 3, q)):
        drafter = ScriptedDrafter(lambda context, budget, d=draft: d if budget.depth else EMPTY)  # type: ignore[misc]
        wanted = seeds(PLAIN, 5, rule=rule, max_tokens=4)
        assert texts(model, drafter, Budget(1, 3, 3), wanted, (0,)) == [[2, 2, 2, 2]] * 5
