"""Loss and scores of heads that guess several tokens ahead."""

from __future__ import annotations

import torch

from sooner.train import loss
from sooner.train.loss import Score
from tests.train.test_unroll import DRAFT, H, tiny_batch


def test_a_head_that_always_names_the_next_token_scores_every_step() -> None:
    """One that names another id scores none."""
    batch = tiny_batch(1, 9)
    batch.tokens[0] = torch.arange(9)
    for wrong, chain in ((0, 3.0), (1, 0.0)):
        seen = [
            torch.nn.functional.one_hot((torch.arange(9) + 2 + step + wrong) % DRAFT, DRAFT).double()
            for step in range(3)
        ]
        found = loss.score(seen, lambda x: x, torch.arange(DRAFT), batch)
        assert (found.rows, found.chain) == (5, chain)


def test_a_frozen_lm_head_gets_no_gradient_and_the_states_the_same_one() -> None:
    batch = tiny_batch(1, 9)
    torch.manual_seed(4)
    matrix = torch.randn(DRAFT, H, dtype=torch.float64)
    states = torch.randn(9, H, dtype=torch.float64)
    grads = []
    for frozen in (False, True):
        x, m = states.clone().requires_grad_(), matrix.clone().requires_grad_(not frozen)
        loss.loss([x, x * 0.5], m, batch, 0.8, 1.0, torch.Generator())[0].backward()
        assert (m.grad is None) == frozen
        grads.append(x.grad)
    assert torch.equal(grads[0], grads[1])


def test_scores_add_up_by_their_rows() -> None:
    total = Score(1, 1.0, 2.0, 3.0) + Score(3, 2.0, 3.0, 4.0)
    assert (total.rows, total.chain, total.tree, total.loss) == (4, 1.75, 2.75, 3.75)
