"""The likeliest ids of every row: they are those of topk, and they reach the drafters that ask."""

from __future__ import annotations

import pytest
import torch

from sooner.config import Budget, EngineConfig
from sooner.control.fixed import FixedController
from sooner.core.tree import ROOT, Draft
from sooner.draft.protocol import Outcome
from sooner.engine.engine import Engine
from sooner.engine.tops import likeliest
from sooner.errors import DraftError
from sooner.params import SamplingParams
from sooner.testing import ScriptedDrafter, ToyModel

TREE = Draft((1, 2, 3), (-1, 0, -1))


@pytest.mark.parametrize("vocab", [5, 1024, 20_000, 16_384, 17_409])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_are_those_of_topk(vocab: int, dtype: torch.dtype) -> None:
    logits = torch.randn((3, vocab), generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[0, -4:] = 9.0 + torch.arange(4).to(dtype)  # several in the last fold
    logits[1, [1, 3]] = 8.0
    values, ids = likeliest(logits, 4)
    assert torch.equal(values, logits.topk(4, dim=-1).values)
    assert torch.equal(logits.gather(-1, ids), values)
    assert all(len(set(row)) == 4 for row in ids.tolist())


class Asking(ScriptedDrafter):
    tops = 3


def outcomes(drafter: ScriptedDrafter, prompts: list[list[int]]) -> list[Outcome]:
    engine = Engine(ToyModel(17), drafter, FixedController(Budget(3, 3, 9)), config=EngineConfig(4, 64, 4))
    for prompt in prompts:
        engine.add(prompt, SamplingParams(max_tokens=12, repetition_penalty=1.3))
    while engine.busy:
        engine.step()
    assert engine.guard.failures == {}
    return drafter.outcomes


def test_root_and_nodes_come_with_the_models_own_likeliest_ids() -> None:
    seen = outcomes(
        Asking(lambda context, budget: TREE if budget.nodes > 2 and budget.depth > 1 else Draft()),
        [[3, 1, 4, 1, 5, 9]],
    )
    text = [3, 1, 4, 1, 5, 9]
    with_draft = 0
    for outcome in seen:
        if not outcome.tokens:
            assert outcome.tops is None  # a prompt chunk, whose laws nobody wanted
            continue
        assert outcome.tops is not None
        assert outcome.tail == tuple(text[-3:])
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(outcome.draft.tokens, outcome.draft.parents, strict=True):
            paths.append((*paths[0 if parent == ROOT else parent + 1], token))
        assert len(outcome.tops.ids) == len(outcome.tops.logits) == len(paths)
        for path, ids, logits in zip(paths, outcome.tops.ids, outcome.tops.logits, strict=True):
            best = ToyModel(17).next_logits([*text, *path]).topk(3)
            assert ids == tuple(best.indices.tolist())
            assert logits == pytest.approx(best.values.tolist())
        text += outcome.tokens
        with_draft += len(outcome.draft) > 0
    assert with_draft > 3


def test_nobody_pays_who_does_not_ask() -> None:
    seen = outcomes(ScriptedDrafter(lambda context, budget: Draft()), [[1], [2, 3]])
    assert {outcome.tops for outcome in seen} == {None}


@pytest.mark.parametrize("wanted", [-1, 65, 2.5, "8"])
def test_a_drafter_that_wants_a_strange_number_of_them_is_refused(wanted: object) -> None:
    drafter = Asking(lambda context, budget: Draft())
    drafter.tops = wanted  # type: ignore[assignment]  # on purpose
    with pytest.raises(DraftError, match="tops; from 0 to 64"):
        Engine(ToyModel(), drafter, FixedController(Budget.chain(0)))
