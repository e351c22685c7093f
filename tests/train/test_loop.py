"""The loop: a killed run ends where an undisturbed one does, and settings that make no sense are named."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sooner.errors import ConfigError
from sooner.train.loop import History, Plan, Progress, run


class Killed(Exception):
    """Stands for a signal between two steps."""


class Line:
    """Fits y = 3 x with one weight."""

    batch = 4

    def __init__(self, kill_at: int | None = None) -> None:
        torch.manual_seed(0)
        self.module: nn.Module = nn.Linear(1, 1)
        self.saves: list[int] = []
        self._kill_at = kill_at

    def loss(self, step: int) -> tuple[Tensor, float]:
        if step == self._kill_at:
            raise Killed
        x = torch.full((4, 1), float(step % 5 - 2))
        loss = ((self.module(x) - 3 * x) ** 2).mean()
        return loss, float(loss.detach())

    def score(self) -> Mapping[str, float]:
        with torch.no_grad():
            return {"error": abs(float(self.module(torch.ones(1, 1))) - 3)}

    def save(self, history: History) -> None:
        self.saves.append(history.step)


def weights(task: Line) -> list[float]:
    return [float(p.detach()) for p in task.module.parameters()]


def ignore(progress: Progress) -> None:
    pass


@pytest.mark.parametrize("kill_at", [1, 25, 59])
def test_a_killed_run_goes_on_to_the_same_weights(tmp_path: Path, kill_at: int) -> None:
    plan = Plan(60, 0.1, every=10, save_s=0.0)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    whole = Line()
    wanted = run(whole, plan, tmp_path / "a", ignore)
    with pytest.raises(Killed):
        run(Line(kill_at), plan, tmp_path / "b", ignore)
    again = Line()
    found = run(again, plan, tmp_path / "b", ignore)
    assert weights(again) == weights(whole)
    assert again.saves[-1] == 60
    assert [e["step"] for e in found.entries] == [e["step"] for e in wanted.entries] == [10, 20, 30, 40, 50, 60]
    assert found.tokens == wanted.tokens == 240


def test_it_learns_and_tells_how_it_stands(tmp_path: Path) -> None:
    told: list[Progress] = []
    run(Line(), Plan(200, 0.1, every=50), tmp_path, told.append)
    assert [p.step for p in told] == list(range(1, 201))
    assert told[-1].scores["error"] < 0.05 < told[0].loss
    assert told[-1].tokens == 800
    assert told[-1].tokens_per_s > 0


def test_the_rate_rises_then_falls_to_its_floor() -> None:
    plan = Plan(1000, 1.0, warmup=0.1, floor=0.02)
    rates = [plan.rate_at(step) for step in range(1000)]
    assert rates[0] == 0.01
    assert rates[:100] == sorted(rates[:100])
    assert rates[100:] == sorted(rates[100:], reverse=True)
    assert rates[99] == 1.0
    assert rates[-1] == pytest.approx(0.02, abs=1e-4)


def test_a_run_out_of_time_ends_with_a_score_and_goes_on_no_more(tmp_path: Path) -> None:
    task, told = Line(), list[Progress]()
    found = run(task, Plan(10**7, 0.1, every=10**6, minutes=0.002), tmp_path, told.append)
    assert 1 <= found.step < 10**7
    assert task.saves == [found.step]
    assert found.entries[-1]["seconds"] >= 0.12
    again = run(Line(), Plan(10**7, 0.1, every=10**6, minutes=0.002), tmp_path, ignore)
    assert again.step == found.step


def test_the_rate_falls_with_the_time_that_is_gone() -> None:
    plan = Plan(1000, 1.0, minutes=1.0)
    assert [plan.stage(100, seconds) for seconds in (0.0, 6.0, 30.0)] == [100.0, 100.0, 500.0]
    assert Plan(1000, 1.0).stage(100, 1e6) == 100.0


def test_a_state_of_other_weights_is_refused(tmp_path: Path) -> None:
    run(Line(), Plan(2, 0.1), tmp_path, ignore)
    other = Line()
    other.module = nn.Linear(2, 1)
    with pytest.raises(ConfigError, match="other weights"):
        run(other, Plan(2, 0.1), tmp_path, ignore)


@pytest.mark.parametrize(
    "bad", [{"steps": 0}, {"steps": 5, "every": 0}, {"steps": 5, "rate": 0.0}, {"steps": 5, "minutes": 0.0}]
)
def test_settings_without_sense_are_named(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Plan(**bad)  # type: ignore[arg-type]
