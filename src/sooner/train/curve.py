"""The learning curve as a picture. Knows only the entries of a run's history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from sooner.errors import ConfigError


def check() -> None:
    """Raise ConfigError, before hours of training, if pictures cannot be drawn."""
    try:
        import matplotlib  # noqa: F401  # only whether it is there
    except ImportError as error:
        raise ConfigError(
            "training draws its curve with matplotlib; install it: pip install 'sooner[train]'."
        ) from error


def draw(path: Path, entries: Sequence[Mapping[str, float]]) -> None:
    """A PNG with every figure but step, tokens and seconds over the tokens trained on."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = [name for name in (entries[-1] if entries else ()) if name not in ("step", "tokens", "seconds")]
    losses = [name for name in names if "loss" in name]
    panels = [panel for panel in (losses, [name for name in names if name not in losses]) if panel]
    figure = Figure(figsize=(5 * max(len(panels), 1), 4), layout="constrained")
    FigureCanvasAgg(figure)
    for place, panel in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), place + 1)
        for name in panel:
            axes.plot([e["tokens"] / 1e6 for e in entries], [e[name] for e in entries], label=name)
        axes.set_xlabel("million tokens trained on")
        axes.grid(alpha=0.3)
        axes.legend()
    part = path.with_suffix(".part.png")
    figure.savefig(part, dpi=100)
    part.replace(path)
