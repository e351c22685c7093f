"""Serving under load: what is sent, when, and how the figures follow from the moments tokens came."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from sooner.config import Budget, EngineConfig
from sooner.control.adaptive import AdaptiveController
from sooner.control.fixed import FixedController
from sooner.draft.lookup import LookupDrafter
from sooner.engine.engine import Engine
from sooner.errors import ConfigError
from sooner.measure.load import Arrival, LoadRun, Order, Served, bench, compare, figures, percentile, serve, table
from sooner.measure.plots import curves, heat_map, writable
from sooner.params import SamplingParams
from sooner.testing import ToyModel

ORDERS = [Order(tuple(range(3 + i)), SamplingParams(max_tokens=4 + i % 5)) for i in range(10)]
# What the tools that draw vllm bench's results read.
VLLM = {
    "duration",
    "completed",
    "failed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "output_throughput",
    "total_token_throughput",
    "max_concurrent_requests",
    "spec_decode_acceptance_rate",
    "spec_decode_acceptance_length",
    "spec_decode_num_drafts",
    "spec_decode_draft_tokens",
    "spec_decode_accepted_tokens",
    "spec_decode_per_position_acceptance_rates",
    *(f"{kind}_{of}_ms" for kind in ("mean", "median", "std", "p99") for of in ("ttft", "tpot", "itl", "e2el")),
}


def engine(k: int | None) -> Engine:
    controller = AdaptiveController(Budget.chain(8)) if k is None else FixedController(Budget.chain(k))
    return Engine(ToyModel(17, order=3), LookupDrafter(), controller, config=EngineConfig(16, 128, 64))


@pytest.mark.parametrize("concurrency", [1, 3, 16])
@pytest.mark.parametrize("arrival", [Arrival(), Arrival(2000.0)], ids=["closed", "poisson"])
def test_every_order_is_served_and_never_more_at_once_than_asked(concurrency: int, arrival: Arrival) -> None:
    done = serve(engine(4), ORDERS, concurrency, arrival)
    assert [len(one.tokens) for one in done.served] == [order.params.max_tokens for order in ORDERS]
    assert [one.prompt for one in done.served] == [len(order.prompt) for order in ORDERS]
    assert 1 <= done.most_at_once <= concurrency
    assert not any(one.failed for one in done.served)


def test_the_texts_do_not_depend_on_setting_or_load() -> None:
    engines = {"plain": engine(0), "k=4": engine(4), "adaptive": engine(None)}
    for concurrency in (1, 5):
        cells = compare(engines, ORDERS, concurrency, Arrival(), repeats=2)
        assert [cell.equal for cell in cells.values()] == [len(ORDERS)] * 3
        assert all(len(cell.runs) == 2 for cell in cells.values())


def test_a_text_that_differs_is_counted() -> None:
    other = Engine(ToyModel(17, order=1), LookupDrafter(), FixedController(Budget.chain(2)))
    cells = compare({"plain": engine(0), "other": other}, ORDERS, 2, Arrival())
    assert cells["plain"].equal == len(ORDERS)
    assert cells["other"].equal < len(ORDERS)


def test_poisson_moments_are_the_same_for_the_same_seed_and_of_the_right_rate() -> None:
    moments = Arrival(5.0).moments(2000, seed=3)
    assert moments == Arrival(5.0).moments(2000, seed=3)
    assert moments == sorted(moments)
    assert moments[-1] / 2000 == pytest.approx(1 / 5.0, rel=0.1)


@pytest.mark.parametrize(
    "text", ["", "open", "poisson", "poisson:", "poisson:0", "poisson:-1", "poisson:x", "poisson:nan"]
)
def test_an_arrival_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="arrival"):
        Arrival.parse(text)


def test_figures_follow_from_the_moments() -> None:
    one = Served(1.0, [(1.5, 1), (1.7, 2), (2.0, 1)], (1, 2, 3, 4), prompt=10)
    found = figures(LoadRun((one,), 4.0, 1))
    assert set(found) >= VLLM
    assert found["mean_ttft_ms"] == pytest.approx(500)
    assert found["mean_tpot_ms"] == pytest.approx(500 / 3)
    assert found["mean_itl_ms"] == pytest.approx(500 / 3), "tokens that came together have no time between them"
    assert found["p99_e2el_ms"] == pytest.approx(1000)
    assert (found["output_throughput"], found["total_token_throughput"]) == (1.0, 3.5)


def test_percentiles_are_those_of_numpy() -> None:
    values = [1.0, 2.0, 4.0, 8.0]
    assert percentile(values, 50) == statistics.median(values)
    assert percentile(values, 90) == pytest.approx(6.8)
    assert (percentile(values, 0), percentile(values, 100)) == (1.0, 8.0)


def test_results_are_tabulated_and_drawn(tmp_path: Path) -> None:
    found = bench({"plain": engine(0), "adaptive": engine(None)}, ORDERS, [1, 4], Arrival())
    assert table(found).row_count == 4
    curves(found, tmp_path / "load.png")
    heat_map({"chat": {1: 1.2, 4: 0.98}}, tmp_path / "heat.png", title="ratio")
    for name in ("load.png", "heat.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_a_picture_for_a_folder_that_is_not_there_is_refused_first(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no folder"):
        writable([tmp_path / "missing" / "load.png"])
