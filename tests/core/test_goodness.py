"""The yardsticks themselves: they pass what is right and catch what is wrong."""

from __future__ import annotations

import pytest
import torch

from tests.core.goodness import LIMIT, chi_square, chi_square_tail, independent, uniform_fit


def _uniform(count: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(
    ("statistic", "freedom", "tail"), [(3.841459, 1, 0.05), (18.307038, 10, 0.05), (0.0, 4, 1.0)]
)
def test_chi_square_tail_has_the_tables_values(statistic: float, freedom: int, tail: float) -> None:
    assert chi_square_tail(statistic, freedom) == pytest.approx(tail, abs=1e-6)


def test_chi_square_passes_the_right_law_and_fails_one_that_is_off_by_a_fiftieth() -> None:
    law = torch.tensor([0.5, 0.3, 0.15, 0.05])
    counts = torch.tensor([10_030, 5_940, 3_020, 1_010])
    assert chi_square(counts, law) > 0.1
    assert chi_square(counts, law + torch.tensor([0.02, -0.02, 0, 0])) < LIMIT


def test_chi_square_never_excuses_what_has_no_probability() -> None:
    with pytest.raises(AssertionError, match=r"outcomes \[2\] have no probability"):
        chi_square(torch.tensor([50_000, 50_000, 1]), torch.tensor([0.5, 0.5, 0.0]))


def test_rare_outcomes_are_joined_not_left_out() -> None:
    law = torch.cat([torch.tensor([0.99]), torch.full((100,), 1e-4)])
    counts = torch.cat([torch.tensor([990]), torch.zeros(100)]).long()
    counts[5] = 60  # six times as many as the rare ones have in all
    assert chi_square(counts, law) < LIMIT


def test_uniform_fit_tells_uniform_from_nearly_uniform() -> None:
    values = _uniform(20_000)
    assert uniform_fit(values) > LIMIT
    assert uniform_fit(values**1.1) < LIMIT


def test_independent_finds_a_dependence_without_correlation() -> None:
    left, right = _uniform(20_000, 1), _uniform(20_000, 2)
    assert independent(left, right) > LIMIT
    assert independent(left, (left - 0.5).abs() * 2 * 0.999) < LIMIT
