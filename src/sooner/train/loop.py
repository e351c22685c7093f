"""The training loop: steps, schedule, scores on held-out text, and a state that survives being killed.

Knows no head and no target. Weights are trained in their own type, with a float32 copy that the optimiser moves.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sooner.errors import ConfigError

_STATE = "state.pt"


@dataclass(frozen=True, slots=True)
class Plan:
    """steps: batches in all. rate: the highest learning rate; warmup: share of the steps it rises over, then it
    falls as a cosine to `floor` of itself. clip: most norm of the gradient. every: steps between scores.
    save_s: seconds between saves of the state; what a kill can lose. minutes: of training in all, resumed runs
    together; where they are gone before the steps are, the schedule hurries along and training ends with them."""

    steps: int
    rate: float = 1e-3
    warmup: float = 0.03
    floor: float = 0.02
    clip: float = 1.0
    decay: float = 0.01
    every: int = 250
    save_s: float = 40.0
    minutes: float | None = None

    def __post_init__(self) -> None:
        if self.steps < 1 or self.every < 1:
            raise ConfigError(f"training needs steps >= 1 and every >= 1, got {self.steps} and {self.every}.")
        if not self.rate > 0:
            raise ConfigError(f"rate must be positive, got {self.rate}.")
        if self.minutes is not None and not self.minutes > 0:
            raise ConfigError(f"minutes must be positive, got {self.minutes}.")

    def stage(self, step: int, seconds: float) -> float:
        """Where the schedule is, in steps: at what is done, or at what the time gone is worth."""
        gone = 0.0 if self.minutes is None else seconds / (60 * self.minutes) * self.steps
        return max(float(step), gone)

    def rate_at(self, step: float) -> float:
        rise = max(self.steps * self.warmup, 1.0)
        if step < rise:
            return self.rate * (step + 1) / rise
        done = (step - rise) / max(self.steps - rise, 1.0)
        return self.rate * (self.floor + (1 - self.floor) * (1 + math.cos(math.pi * min(done, 1.0))) / 2)


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands: steps done, tokens a second of this run, smoothed loss, last scores by name."""

    step: int
    steps: int
    tokens: int
    tokens_per_s: float
    loss: float
    scores: Mapping[str, float]


@dataclass(slots=True)
class History:
    """What a run has been through: one entry for each scoring, `seconds` and `tokens` since the very start."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    entries: list[dict[str, float]] = field(default_factory=list)

    def notes(self) -> dict[str, Any]:
        """What a checkpoint says of its training."""
        seconds = round(self.seconds)
        return {"steps": self.step, "tokens": self.tokens, "seconds": seconds, "scores": self.entries[-1]}


class Task(Protocol):
    """What is trained. batch: tokens of one batch."""

    module: nn.Module
    batch: int

    def loss(self, step: int) -> tuple[Tensor, float]:
        """What to descend in this step, and the figure to show."""

    def score(self) -> Mapping[str, float]:
        """Figures on held-out text."""

    def save(self, history: History) -> None:
        """Write the checkpoint, and the curve beside it."""


def run(task: Task, plan: Plan, folder: Path, report: Callable[[Progress], None]) -> History:
    """Train, or go on training, until the plan is through; the state lies in `folder`."""
    pairs = [(p, p.detach().float().clone()) for p in task.module.parameters() if p.requires_grad]
    wide = [{"params": [m for _, m in pairs if m.dim() > 1], "weight_decay": plan.decay}]
    narrow = [{"params": [m for _, m in pairs if m.dim() <= 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(wide + narrow, lr=plan.rate, betas=(0.9, 0.95), fused=True)
    history = _resume(folder, pairs, optimizer)
    began, saved, start, smooth = time.perf_counter(), time.perf_counter(), history.step, math.nan
    spent = history.seconds
    scores: Mapping[str, float] = history.entries[-1] if history.entries else {}
    for step in range(history.step, plan.steps):
        if plan.stage(step, history.seconds) >= plan.steps:
            break
        for group in optimizer.param_groups:
            group["lr"] = plan.rate_at(plan.stage(step, history.seconds))
        descend, shown = task.loss(step)
        descend.backward()  # type: ignore[no-untyped-call]  # torch's own
        _move(pairs, optimizer, plan.clip)
        smooth = shown if math.isnan(smooth) else 0.95 * smooth + 0.05 * shown
        history.step, history.tokens = step + 1, history.tokens + task.batch
        now = time.perf_counter()
        history.seconds = spent + now - began
        last = plan.stage(step + 1, history.seconds) >= plan.steps
        if (step + 1) % plan.every == 0 or last:
            scores = {"step": step + 1, "tokens": history.tokens, "seconds": history.seconds, "loss": smooth}
            scores |= task.score()
            history.entries.append(dict(scores))
            task.save(history)
        if now - saved > plan.save_s or last:
            _keep(folder, pairs, optimizer, history)
            saved = time.perf_counter()
        pace = (step + 1 - start) * task.batch / max(time.perf_counter() - began, 1e-9)
        report(Progress(step + 1, plan.steps, history.tokens, pace, smooth, scores))
    return history


def _move(pairs: list[tuple[nn.Parameter, Tensor]], optimizer: torch.optim.Optimizer, clip: float) -> None:
    """One step of the optimiser on the float32 copies, then back into the weights."""
    for parameter, copy in pairs:
        if parameter.grad is None:
            copy.grad = None
        elif copy.grad is None:
            copy.grad = parameter.grad.float()
        else:
            copy.grad.copy_(parameter.grad)  # fresh memory of this size costs more than the copying
        parameter.grad = None
    nn.utils.clip_grad_norm_([copy for _, copy in pairs], clip)
    optimizer.step()
    with torch.no_grad():
        for parameter, copy in pairs:
            parameter.copy_(copy)


def _keep(
    folder: Path, pairs: list[tuple[nn.Parameter, Tensor]], optimizer: torch.optim.Optimizer, history: History
) -> None:
    part = folder / f"{_STATE}.part"
    state = {
        "weights": [copy for _, copy in pairs],
        "optimizer": optimizer.state_dict(),
        "history": asdict(history),
    }
    torch.save(state, part)
    part.replace(folder / _STATE)
    (folder / "history.json").write_text(json.dumps(history.entries, indent=1) + "\n")


def _resume(folder: Path, pairs: list[tuple[nn.Parameter, Tensor]], optimizer: torch.optim.Optimizer) -> History:
    path = folder / _STATE
    if not path.is_file():
        return History()
    state = torch.load(path, weights_only=True)
    shapes = [tuple(t.shape) for t in state["weights"]]
    if shapes != [tuple(copy.shape) for _, copy in pairs]:
        raise ConfigError(f"{path} belongs to a run with other weights; use another --out, or delete it.")
    optimizer.load_state_dict(state["optimizer"])
    with torch.no_grad():
        for (parameter, copy), kept in zip(pairs, state["weights"], strict=True):
            copy.copy_(kept)
            parameter.copy_(copy)
    return History(**state["history"])
