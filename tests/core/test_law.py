"""From logits to laws: the same distribution as transformers, row by row, and safe at every edge."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from sooner.core import noise
from sooner.core.edit import LawParams
from sooner.core.law import Law, draw, law, log_probs

WIDTHS = (7, 300, 5_000)
GREEDY = LawParams()
SHAPES = (
    LawParams(1.0),
    LawParams(0.3),
    LawParams(1.7),
    LawParams(1.0, top_k=1),
    LawParams(0.8, top_k=2),
    LawParams(1.0, top_k=50),
    LawParams(1.0, top_k=10_000),
    LawParams(1.0, top_p=0.5),
    LawParams(0.7, top_p=0.9),
    LawParams(1.3, top_p=0.999),
    LawParams(1.0, top_p=1e-6),
    LawParams(1.0, min_p=0.1),
    LawParams(1.5, min_p=1.0),
    LawParams(0.9, top_k=20, top_p=0.8, min_p=0.05),
    LawParams(2.0, top_k=3, top_p=0.95, min_p=0.3),
    LawParams(1.0, typical_p=0.2),
    LawParams(0.8, typical_p=0.95),
    LawParams(1.0, top_k=40, top_p=0.9, typical_p=0.6),
)


def _random(vocab: int, seed: int, rows: int = 3, spread: float = 2.5) -> Tensor:
    return spread * torch.randn((rows, vocab), generator=torch.Generator().manual_seed(seed))


def _laws(logits: Tensor, params: Sequence[LawParams]) -> Tensor:
    """Probabilities [n, V] of sampled rows."""
    return _dense(law(logits, params))


def _dense(laws: Law) -> Tensor:
    rows = [laws.row(r) for r in range(len(laws.best))]
    return torch.stack([row for row in rows if row is not None])


def _transformers(logits: Tensor, params: LawParams) -> Tensor:
    """The law by transformers' own warpers, in their order."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    if params.typical_p < 1:
        warpers.append(TypicalLogitsWarper(params.typical_p))
    ids = torch.zeros((len(logits), 1), dtype=torch.int64)
    warped: Tensor = warpers(ids, logits.float())
    return warped.softmax(-1)


def _assert_same(found: Tensor, expected: Tensor) -> None:
    """Equal support, and probabilities equal up to float32 rounding (relative 3e-5, as logits are divided
    by a temperature before they go through exp)."""
    assert torch.equal(found > 0, expected > 0)
    torch.testing.assert_close(found, expected, rtol=3e-5, atol=1e-9)


def _assert_same_up_to_ties(found: Tensor, expected: Tensor) -> None:
    """The same probabilities as often; which of several equals survive an edge, transformers leaves to a
    sort that is not stable."""
    _assert_same(found.sort(-1).values, expected.sort(-1).values)
    sure = expected > expected.where(expected > 0, 2.0).amin(-1, keepdim=True)
    assert bool((found > 0)[sure].all())


def _name(params: LawParams) -> str:
    fields = ("temperature", "top_k", "top_p", "min_p", "typical_p")
    plain = LawParams(1.0)
    changed = [f"{f}={getattr(params, f)}" for f in fields if getattr(params, f) != getattr(plain, f)]
    return ",".join(changed) or "plain"


@pytest.mark.parametrize("vocab", WIDTHS)
@pytest.mark.parametrize("params", SHAPES, ids=_name)
def test_a_law_is_that_of_transformers(params: LawParams, vocab: int) -> None:
    logits = _random(vocab, seed=vocab)
    _assert_same(_laws(logits, [params] * 3), _transformers(logits, params))


@pytest.mark.parametrize("vocab", WIDTHS)
@pytest.mark.parametrize("params", SHAPES, ids=_name)
def test_a_law_is_that_of_transformers_among_many_ties(params: LawParams, vocab: int) -> None:
    """bfloat16 logits take few values, so cuts of top-k and top-p fall among equals."""
    logits = _random(vocab, seed=vocab + 1).bfloat16()
    assert len(logits[0].unique()) < vocab or vocab == 7
    _assert_same_up_to_ties(_laws(logits, [params] * 3), _transformers(logits, params))


@pytest.mark.parametrize("mass", [0.3, 0.9, 0.999])
@pytest.mark.parametrize("spread", [0.0, 0.05, 0.5])
def test_a_flat_nucleus_of_many_candidates_is_that_of_transformers(spread: float, mass: float) -> None:
    logits = _random(5_000, seed=9, spread=spread)
    found = _laws(logits, [LawParams(1.0, top_p=mass)] * 3)
    assert int((found > 0).sum(-1).min()) > 256
    _assert_same_up_to_ties(found, _transformers(logits, LawParams(1.0, top_p=mass)))


@pytest.mark.parametrize("vocab", [255, 256, 257])
def test_the_nucleus_is_right_where_its_candidates_end(vocab: int) -> None:
    logits = _random(vocab, seed=vocab, spread=0.3)
    for mass in (0.5, 0.98, 0.99999):
        _assert_same(
            _laws(logits, [LawParams(1.0, top_p=mass)] * 3), _transformers(logits, LawParams(1.0, top_p=mass))
        )


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(
    levels=st.lists(st.integers(0, 5), min_size=2, max_size=12),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([0.05, 0.35, 0.55, 0.85, 1.0]),
    min_p=st.sampled_from([0.0, 0.07, 0.4, 1.0]),
)
def test_a_law_of_few_levels_is_that_of_transformers(
    levels: list[int], top_k: int, top_p: float, min_p: float
) -> None:
    """Small whole logits: every filter cuts among ties all the time."""
    logits = torch.tensor([levels], dtype=torch.float32)
    params = LawParams(1.0, top_k, top_p, min_p)
    _assert_same_up_to_ties(_laws(logits, [params]), _transformers(logits, params))


@pytest.mark.parametrize("vocab", [5, 100, 5_000])
def test_among_equals_at_the_edge_of_the_nucleus_the_higher_ids_stay(vocab: int) -> None:
    """One rule, so that a law is a function of its logits; an unstable sort would not be."""
    logits = torch.zeros((1, vocab))
    logits[0, 1] = 1.0
    kept = _laws(logits, [LawParams(1.0, top_p=0.8)])[0] > 0
    count = int(kept.sum())
    assert 1 < count < vocab
    assert kept.nonzero().flatten().tolist() == [1, *range(vocab - count + 1, vocab)]


# --- rows of one batch -----------------------------------------------------------------------------


def _assert_rows_alone(logits: Tensor, params: Sequence[LawParams]) -> None:
    together = law(logits, params)
    for r, own in enumerate(params):
        alone = law(logits[r : r + 1], [own])
        assert int(together.best[r]) == int(alone.best[0])
        assert bool(together.broken[r]) == bool(alone.broken[0])
        row, row_alone = together.row(r), alone.row(0)
        assert (row is None) == (row_alone is None) == own.greedy
        if row is not None and row_alone is not None:
            assert torch.equal(row, row_alone), f"row {r}, {own}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("vocab", WIDTHS)
def test_a_row_does_not_depend_on_its_neighbours(vocab: int, dtype: torch.dtype) -> None:
    """Bit for bit, in either order, with greedy rows in between; flat rows make others sort in full."""
    params = [p for pair in zip(SHAPES, [GREEDY] * len(SHAPES), strict=True) for p in pair]
    logits = _random(vocab, seed=3, rows=len(params))
    logits[::4] *= 0.01
    _assert_rows_alone(logits.to(dtype), params)
    _assert_rows_alone(logits.to(dtype).flip(0), params)


def test_a_row_of_a_wide_vocabulary_does_not_depend_on_its_neighbours_with_several_threads() -> None:
    """torch splits the sum of one long row among threads, but several rows row by row, and rounds otherwise."""
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        params = [
            LawParams(1.0),
            LawParams(0.9, top_p=0.9),
            LawParams(1.0, min_p=0.1),
            LawParams(1.0, top_p=0.999),
        ]
        logits = _random(50_000, seed=11, rows=4)
        _assert_rows_alone(logits, params)
        _assert_rows_alone(0.01 * logits, params)
    finally:
        torch.set_num_threads(threads)


def test_one_flat_neighbour_does_not_move_a_nucleus() -> None:
    """All rows of one top_p go through the same sort; the second one needs all 5,000 values."""
    logits = _random(5_000, seed=4, rows=4)
    logits[1] = 0.0
    _assert_rows_alone(logits, [LawParams(1.0, top_p=0.9)] * 4)


@pytest.mark.parametrize("vocab", WIDTHS)
def test_no_rows_and_only_greedy_rows_have_no_probabilities(vocab: int) -> None:
    nothing = law(torch.zeros((0, vocab)), [])
    assert len(nothing.best) == len(nothing.broken) == 0
    greedy = law(_random(vocab, seed=1), [GREEDY] * 3)
    assert all(greedy.greedy(r) and greedy.row(r) is None for r in range(3))


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0], [3.0, 3.0, 3.0, 3.0], [-math.inf, -5.0, -math.inf, -5.0]])
    assert law(logits, [GREEDY] * 3).best == [1, 0, 1]
    assert law(logits.bfloat16(), [GREEDY] * 3).best == [1, 0, 1]


def test_laws_of_rows_with_different_parameters_are_found_by_their_index() -> None:
    logits = _random(7, seed=5, rows=4)
    params = [LawParams(0.5), GREEDY, LawParams(1.0, top_k=2), GREEDY]
    found = law(logits, params)
    assert [found.greedy(r) for r in range(4)] == [False, True, False, True]
    assert found.row(1) is None
    row = found.row(2)
    assert row is not None
    assert int((row > 0).sum()) == 2
    assert found.best == logits.argmax(-1).tolist()


def test_a_draw_from_a_truncated_row_is_the_draw_from_its_whole_law() -> None:
    """A law kept as its few candidates has the noise of their ids, not of their places."""
    logits = _random(300, seed=12, rows=len(SHAPES))
    params = list(SHAPES)
    found = law(logits, params)
    rows = [r for r in range(len(params)) for _ in range(40)]
    keys = [noise.key(seed, 3, noise.TARGET) for seed in range(len(rows))]
    drawn = draw(found, rows, keys)
    assert drawn == noise.race(_dense(found)[rows], keys).tolist()
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    assert draw(found, [rows[i] for i in order], [keys[i] for i in order]) == [drawn[i] for i in order]
    assert draw(found, [], []) == []


# --- edges -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", ["nan", "inf", "nothing"])
@pytest.mark.parametrize("params", [GREEDY, LawParams(1.0), LawParams(0.7, 5, 0.9, 0.01)], ids=_name)
def test_a_broken_row_is_flagged_and_its_neighbours_are_untouched(params: LawParams, bad: str) -> None:
    logits = _random(300, seed=6, rows=3)
    whole = law(logits, [params] * 3)
    if bad == "nothing":
        logits[1] = -math.inf
    else:
        logits[1, 123] = float(bad)
    found = law(logits, [params] * 3)
    assert found.broken == [False, True, False]
    for r in (0, 2):
        assert int(found.best[r]) == int(whole.best[r])
        row, before = found.row(r), whole.row(r)
        assert row is before is None or torch.equal(row, before)  # type: ignore[arg-type]


def test_forbidden_tokens_do_not_break_a_row() -> None:
    logits = torch.tensor([[1.0, -math.inf, 0.5, -math.inf]])
    for params in SHAPES:
        found = law(logits, [params])
        assert found.broken == [False]
        probs = _dense(found)
        assert probs[0, [1, 3]].tolist() == [0, 0]
        assert float(probs.sum()) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-45, 5e-324])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_tiny_temperature_is_finite_and_one_hot(dtype: torch.dtype, temperature: float) -> None:
    """Below 1e-45 a temperature is 0 in float32, and 0 / 0 made every law NaN; its rows were not flagged."""
    logits = torch.tensor([[1.0, 3.0, -math.inf, 2.0], [-8.0, -9.0, -8.5, -math.inf]], dtype=dtype)
    for top_p in (1.0, 0.9):
        probs = _laws(logits, [LawParams(temperature, top_p=top_p)] * 2)
        assert probs.tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]


def test_equal_best_tokens_share_a_tiny_temperature() -> None:
    probs = _laws(torch.tensor([[3.0, 1.0, 3.0]]), [LawParams(1e-6)])
    assert probs.tolist() == [[0.5, 0, 0.5]]


@pytest.mark.parametrize("temperature", [1e6, 1e38, 1e39, 1.7e308])
def test_a_huge_temperature_is_uniform_over_what_is_allowed(temperature: float) -> None:
    """Above 3e38 a temperature is infinite in float32, and -inf / inf made the law NaN."""
    logits = torch.tensor([[1.0, 3.0, -math.inf, 2.0]])
    probs = _laws(logits, [LawParams(temperature)])
    assert probs[0].tolist() == pytest.approx([1 / 3, 1 / 3, 0, 1 / 3], abs=1e-5)


def test_large_logits_do_not_overflow() -> None:
    logits = torch.tensor([[3e38, 1e38, -3e38]])
    found = law(logits, [LawParams(1.0)])
    assert found.broken == [False]
    assert _dense(found).tolist() == [[1, 0, 0]]


@pytest.mark.parametrize("params", SHAPES, ids=_name)
def test_every_law_is_a_law_and_keeps_the_likeliest_token(params: LawParams) -> None:
    """But for typical-p, which may leave the likeliest token out as too obvious."""
    logits = _random(300, seed=8, rows=20)
    found = law(logits, [params] * 20)
    probs = _dense(found)
    assert bool((probs >= 0).all())
    torch.testing.assert_close(probs.sum(-1), torch.ones(20), rtol=0, atol=1e-5)
    assert params.typical_p < 1 or probs.argmax(-1).tolist() == found.best


def test_float64_stays_float64_and_half_precision_is_widened_first() -> None:
    logits = _random(50, seed=2)
    for params in (LawParams(0.7), LawParams(0.7, top_p=0.9)):
        assert _laws(logits.double(), [params] * 3).dtype == torch.float64
        for dtype in (torch.float16, torch.bfloat16):
            narrow = logits.to(dtype)
            assert torch.equal(_laws(narrow, [params] * 3), _laws(narrow.float(), [params] * 3))


def test_log_probs_are_raw_and_in_float32() -> None:
    logits = _random(300, seed=7).bfloat16()
    found = log_probs(logits)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, logits.double().log_softmax(-1).float())
