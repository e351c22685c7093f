"""From runs to figures: a table for people, plain values for JSON. Knows no model and measures nothing."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table

from sooner.measure.bench import BASELINE, Comparison, Measured, Run
from sooner.measure.profile import Split

FORMULAS = (
    "tok/s = tokens after the prompt's pass / seconds after it (all prompts together); ratio = tok/s over that of "
    "none, same prompts; tokens per step = tokens / passes of the target; acceptance = accepted / drafted tokens; "
    "equal = texts whose tokens are those of none"
)

PROFILE = (
    "share of the wall time of all texts, and ms a step; text = appending tokens, stop rules, detokenising; "
    "streaming = between steps; c = a level of drafting / a pass of none"
)


@dataclass(frozen=True, slots=True)
class Total:
    """Sums over runs. Each figure is a ratio of sums, never a mean of ratios."""

    tokens: int
    first: int
    steps: int
    drafted: int | None
    accepted: int | None
    prompt_s: float
    decode_s: float

    @property
    def tok_s(self) -> float | None:
        """(tokens - first) / decode_s: what the prompt's pass brought has no decode time."""
        return (self.tokens - self.first) / self.decode_s if self.decode_s > 0 else None

    @property
    def tokens_per_step(self) -> float:
        """tokens / steps; 1.00 is plain decoding."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def acceptance(self) -> float | None:
        """accepted / drafted; None where nothing was drafted or nobody counted."""
        return self.accepted / self.drafted if self.drafted and self.accepted is not None else None


def total(runs: Sequence[Run]) -> Total:
    """The sums over `runs`."""
    drafted = [run.drafted for run in runs if run.drafted is not None]
    accepted = [run.accepted for run in runs if run.accepted is not None]
    return Total(
        sum(len(run.tokens) for run in runs),
        sum(run.first for run in runs),
        sum(run.steps for run in runs),
        sum(drafted) if len(drafted) == len(runs) else None,
        sum(accepted) if len(accepted) == len(runs) else None,
        sum(run.prompt_s for run in runs),
        sum(run.decode_s for run in runs),
    )


@dataclass(frozen=True, slots=True)
class Figures:
    """One contender on some prompts, beside the baseline on the same ones.

    equal: how many texts have the baseline's tokens; None where that is not to be expected.
    """

    own: Total
    base: Total
    prompts: int
    equal: int | None

    @property
    def ratio(self) -> float | None:
        """tok_s over that of the baseline."""
        return self.own.tok_s / self.base.tok_s if self.own.tok_s is not None and self.base.tok_s else None

    def as_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return {
            "tok_s": _round(self.own.tok_s, 2),
            "ratio": _round(self.ratio, 3),
            "tokens_per_step": _round(self.own.tokens_per_step, 3),
            "acceptance": _round(self.own.acceptance, 4),
            "prompts": self.prompts,
            "equal": self.equal,
            "tokens": self.own.tokens,
            "prompt_s": _round(self.own.prompt_s, 3),
            "decode_s": _round(self.own.decode_s, 3),
        }


@dataclass(frozen=True, slots=True)
class Row:
    """One contender: over all prompts, and category by category."""

    whole: Figures
    by_category: Mapping[str, Figures]

    def as_dict(self) -> dict[str, object]:
        parts = {category: part.as_dict() for category, part in self.by_category.items()}
        return {**self.whole.as_dict(), "by_category": parts}


def rows(comparison: Comparison) -> dict[str, Row]:
    """The figures of every contender."""
    groups: dict[str, list[int]] = {}
    for i, question in enumerate(comparison.questions):
        groups.setdefault(question.group, []).append(i)
    base = comparison.runs[BASELINE]

    def some(measured: Sequence[Measured], chosen: Sequence[int]) -> Figures:
        equal = [measured[i].equal for i in chosen]
        return Figures(
            total([measured[i].run for i in chosen]),
            total([base[i].run for i in chosen]),
            len(chosen),
            None if None in equal else equal.count(True),
        )

    return {
        name: Row(
            some(measured, range(len(measured))),
            {group: some(measured, chosen) for group, chosen in groups.items()},
        )
        for name, measured in comparison.runs.items()
    }


def machine() -> dict[str, object]:
    """What the figures depend on besides the code."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": _cpu(),
        "cores": cores,
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
    }


def tables(drafts: Mapping[str, Row]) -> Iterator[Table]:
    """The figures for people: all prompts, then by category."""
    whole = Table(caption=FORMULAS, caption_justify="left")
    whole.add_column("draft", overflow="fold")
    for column in ("tok/s", "ratio", "tokens per step", "acceptance", "equal"):
        whole.add_column(column, justify="right")
    for name, row in drafts.items():
        f = row.whole
        own = (_show(f.own.tok_s, ".1f"), _show(f.ratio, ".2f"), _show(f.own.tokens_per_step, ".2f"))
        equal = "-" if f.equal is None else f"{f.equal} of {f.prompts}"
        whole.add_row(name, *own, _show(f.own.acceptance, ".0%"), equal)
    yield whole
    parts = Table(caption="ratio, tokens per step", caption_justify="left")
    parts.add_column("category")
    parts.add_column("prompts", justify="right")
    for name in drafts:
        parts.add_column(name, justify="right", overflow="fold")
    for group, base in drafts[BASELINE].by_category.items():
        each = [row.by_category[group] for row in drafts.values()]
        shown = [f"{_show(f.ratio, '.2f')}, {_show(f.own.tokens_per_step, '.2f')}" for f in each]
        parts.add_row(group, str(base.prompts), *shown)
    yield parts


def splits(comparison: Comparison) -> dict[str, Split]:
    """Where the time of every contender went; transformers does not say."""
    found = {}
    for name, measured in comparison.runs.items():
        parts = [one.run.split for one in measured if one.run.split is not None]
        if len(parts) == len(measured):
            found[name] = sum(parts, Split())
    return found


def profile(parts: Mapping[str, Split]) -> Table:
    """Share of the wall time, and milliseconds a step, of everything a text takes."""
    table = Table(title="where the time goes", title_justify="left", caption=PROFILE, caption_justify="left")
    table.add_column("")
    for name in parts:
        table.add_column(name, justify="right", overflow="fold")
    for part in Split().parts():
        table.add_row(part, *(_part(one.parts()[part], one) for one in parts.values()))
    table.add_section()
    table.add_row("outside the pass", *(_part(one.wall_s - one.pass_s, one) for one in parts.values()))
    plain = parts.get(BASELINE, Split())
    table.add_row("c", *(_show(one.cost(plain), ".3f") for one in parts.values()))
    return table


def _part(seconds: float, whole: Split) -> str:
    share = seconds / whole.wall_s if whole.wall_s else 0.0
    return f"{share:.1%} {1000 * seconds / max(whole.steps, 1):7.3f} ms"


def _round(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _show(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _cpu() -> str | None:
    """The processor's name, where the system tells it."""
    listing = Path("/proc/cpuinfo")
    if listing.is_file():
        for line in listing.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or None
