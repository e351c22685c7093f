"""The Medusa drafter: which states and trees it uses, and that texts are those of plain decoding."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM

import sooner
from sooner.config import Budget, EngineConfig
from sooner.control.fixed import FixedController
from sooner.core.law import LawParams
from sooner.core.step import Step
from sooner.core.tree import Draft
from sooner.draft.medusa import MedusaDrafter, best_tree, shipped_tree
from sooner.draft.protocol import Context, Outcome
from sooner.engine.engine import Engine
from sooner.errors import ConfigError, ModelError
from sooner.heads.medusa import Block, Head, MedusaHeads
from sooner.model.protocol import Output
from sooner.params import SamplingParams
from sooner.testing import ToyModel, check_drafter
from tests.draft.tables import Table
from tests.engine.plain import plain_text
from tests.heads.medusa_files import expected_logits, heads_only, some_heads

VOCAB = 13
GREEDY = LawParams()


def steps(seed: int = 0) -> Tensor:
    """Where each token leads: a permutation in one cycle."""
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))
    after = torch.empty(VOCAB, dtype=torch.int64)
    after[order] = order.roll(-1)
    return after


class Cycle(Table):
    """A target that goes round a cycle; its state is the one-hot of the row's token."""

    def __init__(self, after: Tensor, sure: float = 9.0) -> None:
        super().__init__(sure * torch.eye(VOCAB)[after])

    def forward(self, step: Step, *, rows: Tensor, taps: Sequence[int] = ()) -> Output:
        out = super().forward(step, rows=rows, taps=taps)
        return Output(out.logits, torch.eye(VOCAB)[step.tokens][:, None])


def knowing(after: Tensor, count: int, own: bool = True) -> MedusaHeads:
    """Heads that are always right on Cycle: states stay as they are, the LM head of head i looks 2 + i ahead."""
    still = Block(torch.zeros(VOCAB, VOCAB), torch.zeros(VOCAB))
    heads, there = [], after
    for _ in range(count):
        there = after[there]
        if own:
            heads.append(Head((still,), torch.eye(VOCAB)[there].T.contiguous()))
        else:  # a block that adds (nearly) the one-hot whose successor is two or more steps ahead
            moved = torch.zeros(VOCAB, VOCAB)
            moved[torch.argsort(after)[there], torch.arange(VOCAB)] = 50.0
            heads.append(Head((Block(moved, None),), None))
    return MedusaHeads(tuple(heads))


def drafter(heads: MedusaHeads, after: Tensor, **options: str) -> MedusaDrafter:
    table = torch.eye(VOCAB)[after]
    return MedusaDrafter(heads, lambda x: x @ table, layers=1, hidden=VOCAB, vocab=VOCAB, **options)  # type: ignore[arg-type]


def run(model: Table | ToyModel, made: MedusaDrafter, prompts: Sequence[Sequence[int]], asked: SamplingParams,
        budget: Budget) -> tuple[list[list[int]], Engine, list[float]]:  # fmt: skip
    engine = Engine(model, made, FixedController(budget), config=EngineConfig(3, 96, 16))
    requests = [engine.add(prompt, asked) for prompt in prompts]
    while engine.busy:
        engine.step()
        engine.check()
    assert engine.guard.failures == {}
    texts = [r.tokens[len(r.prompt) :] for r in requests]
    return texts, engine, [len(t) / r.tally.close().steps for t, r in zip(texts, requests, strict=True)]


@pytest.mark.parametrize("own", [True, False], ids=["v1", "v2"])
@pytest.mark.parametrize("budget", [Budget.chain(5), Budget(5, 3, 12)], ids=["chain", "tree"])
def test_heads_that_know_the_future_are_always_right(own: bool, budget: Budget) -> None:
    """Three heads: four tokens per step. An offset wrong by one would give one."""
    after = steps()
    expected = [3]
    for _ in range(80):
        expected.append(int(after[expected[-1]]))
    texts, _, rates = run(
        Cycle(after), drafter(knowing(after, 3, own), after), [[3]], SamplingParams(max_tokens=80), budget
    )
    assert texts[0] == expected[1:]
    assert rates[0] >= 80 / 21  # the first pass has no state before the root


@pytest.mark.parametrize(
    "asked",
    [
        SamplingParams(max_tokens=60),
        SamplingParams(max_tokens=60, temperature=0.9, seed=3),
        SamplingParams(max_tokens=60, temperature=0.6, top_p=0.8, seed=4),
    ],
    ids=["greedy", "seed", "top-p"],
)
@pytest.mark.parametrize("tree", ["measured", "shipped"])
def test_texts_are_those_of_plain_decoding(asked: SamplingParams, tree: str) -> None:
    """On a target whose states say next to nothing: most guesses are wrong."""
    model = ToyModel(VOCAB, order=3)
    g = torch.Generator().manual_seed(0)
    heads = MedusaHeads(
        tuple(
            Head((Block(torch.randn(1, 1, generator=g).double(), torch.randn(1, generator=g).double()),),
                 torch.randn(VOCAB, 1, generator=g).double())
            for _ in range(3)
        )
    )  # fmt: skip
    made = MedusaDrafter(heads, lambda x: x, layers=1, hidden=1, vocab=VOCAB, tree=tree)  # type: ignore[arg-type]
    prompts = [[3, 1, 4, 1, 5], [2, 7], [1], list(range(12)) * 3]
    texts, _, _ = run(model, made, prompts, asked, Budget(3, 6, 18))
    for prompt, text in zip(prompts, texts, strict=True):
        assert text == plain_text(ToyModel(VOCAB, order=3).next_logits, prompt, asked)[0]


def test_a_sampled_text_without_a_seed_follows_the_law() -> None:
    """Rule traversal on trees of point masses; a target that is unsure, heads that are right when it is not."""
    after = steps()
    model = Cycle(after, sure=1.0)
    law = torch.softmax(model.table[5], -1)
    counts = torch.zeros(VOCAB)
    made = drafter(knowing(after, 2), after)
    asked = SamplingParams(max_tokens=3, temperature=1.0)
    engine = Engine(model, made, FixedController(Budget(2, 2, 5)), config=EngineConfig(64, 1024, 64))
    requests = [engine.add([5], asked) for _ in range(3000)]
    while engine.busy:
        engine.step()
    # The third token, guessed by head 0 in the second pass: its law is that of two steps and one more.
    expected = torch.linalg.matrix_power(torch.softmax(model.table, -1), 2)
    third = (law @ expected) * len(requests)
    for request in requests:
        counts[request.tokens[3]] += 1
    chi = float(((counts - third) ** 2 / third).sum())
    assert chi < 12 + 6 * (2 * 12) ** 0.5, "12 degrees of freedom, six standard deviations"


def context(tokens: Sequence[int], name: str = "r") -> Context:
    return Context(name, list(tokens), GREEDY, 0, "match")


def outcome(tokens: Sequence[int], rows: int, name: str = "r", draft: Draft | None = None) -> Outcome:
    """A pass whose row r has the one-hot of r as its state."""
    features = torch.eye(VOCAB)[:rows, None]
    return Outcome(name, tuple(tokens), len(tokens) - 1, 0, features, draft or Draft())


def test_the_state_is_that_of_the_last_row_that_survived() -> None:
    after = steps()
    tree = Draft((7, 8, 9), (-1, 0, 0))
    for tokens, row in [((4,), 1), ((7, 4), 2), ((7, 9, 4), 4)]:
        made = drafter(knowing(after, 1), after)
        made.observe([outcome(tokens, 5, draft=tree)])  # two certain tokens, then three nodes
        [draft] = made.propose([context([1, 2, *tokens])], [Budget.chain(1)])
        assert draft.tokens == (int(after[after[row]]),)


def test_without_a_state_there_is_no_guess() -> None:
    after = steps()
    made = drafter(knowing(after, 2), after)
    chain = [Budget.chain(2)]
    assert made.propose([context([1, 2])], chain) == [Draft()]
    made.observe([Outcome("r", (), 0, 0, torch.eye(VOCAB)[:3, None])])  # a chunk of a prompt
    assert made.propose([context([1, 2])], chain) == [Draft()]
    made.observe([outcome([4], 3)])
    assert made.propose([context([1, 2, 5])], chain) == [Draft()], "another root than the one that was seen"
    assert len(made.propose([context([1, 2, 4])], chain)[0]) == 2
    made.forget("r")
    made.forget("r")
    assert made.propose([context([1, 2, 4])], chain) == [Draft()]


def test_requests_are_guessed_together_as_if_alone() -> None:
    after = steps()
    made = drafter(knowing(after, 3), after)
    outcomes = [outcome([4], rows, f"r{rows}") for rows in (1, 2, 3)]
    made.observe(outcomes)
    contexts = [context([4], f"r{rows}") for rows in (1, 2, 3)]
    budgets = [Budget(3, 2, 6), Budget(0, 0, 0), Budget.chain(1)]
    together = made.propose(contexts, budgets)
    for one, budget, draft in zip(contexts, budgets, together, strict=True):
        assert made.propose([one], [budget]) == [draft]
    assert [len(draft) for draft in together] == [6, 0, 1]


@pytest.mark.parametrize("tree", ["measured", "shipped"])
def test_it_keeps_the_protocol(tree: str) -> None:
    after = steps()
    check_drafter(lambda: Seeing(drafter(knowing(after, 3), after, tree=tree)), VOCAB, steps=40)


class Seeing:
    """Hands a drafter states with every outcome, as an engine does."""

    name = "medusa"
    taps = (1,)

    def __init__(self, inner: MedusaDrafter) -> None:
        self.propose, self.forget, self._inner = inner.propose, inner.forget, inner

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        self._inner.observe([outcome(o.tokens[-1:], 2, o.request_id) for o in outcomes])


def test_the_shipped_tree_has_its_63_nodes() -> None:
    tree = shipped_tree()
    assert len(tree) == len(set(tree)) == 63
    assert [sum(len(path) == depth for path in tree) for depth in (1, 2, 3, 4)] == [10, 28, 23, 2]
    assert all(path[:-1] in tree for path in tree if len(path) > 1)


rates = st.lists(st.lists(st.floats(0.01, 1), min_size=1, max_size=3), min_size=1, max_size=3)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(rates=rates, nodes=st.integers(0, 5), depth=st.integers(0, 3), width=st.integers(0, 3))
def test_the_computed_tree_is_the_best_there_is(
    rates: list[list[float]], nodes: int, depth: int, width: int
) -> None:
    """Held to every set of paths, for wide budgets; otherwise it keeps within them."""

    def value(path: Sequence[int]) -> float:
        found = 1.0
        for head, rank in enumerate(path):
            found *= rates[head][rank]
        return found

    tree = best_tree(rates, Budget(depth, width, nodes))
    assert len(tree) <= nodes
    assert all(len(path) <= depth for path in tree)
    assert all(path[:-1] in tree for path in tree if len(path) > 1)
    assert all(sum(p[:-1] == path[:-1] for p in tree) <= width for path in tree)
    paths = [p for n in range(1, len(rates) + 1) for p in itertools.product(*(range(len(r)) for r in rates[:n]))]
    if width >= 3 and depth >= len(rates):
        best = sorted(map(value, paths), reverse=True)[:nodes]
        assert sum(map(value, tree)) == pytest.approx(sum(best))


def test_accuracies_are_measured_and_change_the_tree() -> None:
    """Head 0 is right with its second guess only; after a while that is the one that goes first."""
    after = steps()
    made = drafter(knowing(after, 2), after)
    before = made.accuracies[0][:2]
    assert before[0] > before[1]
    for _ in range(200):
        made.observe([outcome([4], 2)])
        [draft] = made.propose([context([4])], [Budget(1, 3, 3)])
        made.observe(
            [outcome([draft.tokens[1] if draft.tokens[0] == int(after[after[1]]) else draft.tokens[0], 4], 2)]
        )
    now = made.accuracies[0][:2]
    assert now[1] > 0.8 > now[0]
    made.observe([outcome([4], 2)])
    [draft] = made.propose([context([4])], [Budget(1, 1, 1)])
    assert draft.tokens != (int(after[after[1]]),)


def test_heads_of_another_target_and_unknown_trees_are_refused() -> None:
    after = steps()
    with pytest.raises(ModelError, match="states of width 13"):
        MedusaDrafter(knowing(after, 1), lambda x: x, layers=1, hidden=5, vocab=VOCAB)
    with pytest.raises(ConfigError, match=r"unknown tree 'best'. Allowed: measured, shipped"):
        drafter(knowing(after, 1), after, tree="best")


@pytest.mark.parametrize("runtime", ["fused", "hf"])
@pytest.mark.parametrize("vocab", [320, None], ids=["v1", "v2"])
def test_heads_from_files_on_a_real_model(tiny: Path, tmp_path: Path, vocab: int | None, runtime: str) -> None:
    """Their first guess is that of the mathematics on the state transformers gives; texts are the plain ones."""
    written = some_heads(3, 1, 32, vocab)
    heads_only(tmp_path, written)
    asked = SamplingParams(max_tokens=24)
    plain = sooner.LLM(str(tiny), draft="none", dtype="float32", runtime=runtime)
    llm = sooner.LLM(str(tiny), draft=f"medusa:{tmp_path}", dtype="float32", runtime=runtime, k=3, width=2)
    made = llm.generate("once upon a time", asked)
    assert made.token_ids == plain.generate("once upon a time", asked).token_ids
    assert made.stats.drafted > 0
    assert made.stats.draft_failures == 0
    ids = [*made.prompt_token_ids, *made.token_ids[:1]]
    module = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    with torch.no_grad():
        state = module(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states[-1][0, -1]
    wanted = [int(row.argmax()) for row in expected_logits(written, state, module.lm_head.weight.detach())]
    request = llm.engine.add(made.prompt_token_ids, SamplingParams(max_tokens=9))
    llm.engine.step()
    [draft] = llm.engine.guard.drafter.propose([context(request.tokens, request.id)], [Budget.chain(3)])
    assert list(draft.tokens) == wanted
    llm.engine.abort(request)
