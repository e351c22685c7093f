"""Throughput and latency against concurrency, and heat maps, as PNG files. Measures nothing.

Needs matplotlib (the extra "plots").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sooner.errors import ConfigError


def curves(found: Mapping[str, Mapping[int, Mapping[str, Any]]], path: Path) -> None:
    """found[setting][concurrency] = figures by vLLM's names. One PNG with throughput, TTFT and ITL."""
    plt = _pyplot()
    shown = (
        ("output_throughput", "tokens a second"),
        ("median_ttft_ms", "time to first token, median, ms"),
        ("mean_itl_ms", "time between tokens, mean, ms"),
    )
    figure, axes = plt.subplots(1, len(shown), figsize=(5 * len(shown), 4), layout="constrained")
    for axis, (key, label) in zip(axes, shown, strict=True):
        for setting, cells in found.items():
            axis.plot(list(cells), [cell[key] for cell in cells.values()], marker="o", label=setting)
        axis.set(xlabel="requests at once", ylabel=label, xscale="log")
        axis.set_xticks(sorted({c for cells in found.values() for c in cells}))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter("")
        axis.set_ylim(bottom=0)
    axes[0].legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def heat_map(
    ratios: Mapping[str, Mapping[int, float]], path: Path, *, title: str, low: float = 0.5, high: float = 2.0
) -> None:
    """ratios[workload][concurrency], 1.00 in the middle of the colours; one PNG."""
    plt = _pyplot()
    columns = sorted({c for row in ratios.values() for c in row})
    figure, axis = plt.subplots(figsize=(1.2 * len(columns) + 3, 0.6 * len(ratios) + 1.5), layout="constrained")
    table = [[row.get(c, float("nan")) for c in columns] for row in ratios.values()]
    axis.imshow(table, cmap="RdYlGn", vmin=low, vmax=high, aspect="auto")
    axis.set_xticks(range(len(columns)), [str(c) for c in columns])
    axis.set_yticks(range(len(ratios)), list(ratios))
    axis.set(xlabel="requests at once", title=title)
    for y, row in enumerate(table):
        for x, value in enumerate(row):
            axis.text(x, y, _shown(value), ha="center", va="center")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _shown(value: float) -> str:
    return "" if value != value else f"{value:.2f}"  # NaN


def writable(paths: Sequence[Path]) -> None:
    """Raises ConfigError for the first that cannot be written, before anything is measured."""
    for path in paths:
        if not path.parent.is_dir():
            raise ConfigError(f"plot {path} cannot be written: there is no folder {path.parent}.")


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ConfigError('plots need matplotlib: pip install "sooner[plots]".') from None
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    return plt
