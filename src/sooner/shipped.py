"""What comes with the package for a target: a warm table, draft heads. Knows no model and reads no weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from sooner.draft.registry import Spec
from sooner.errors import ConfigError

DATA = Path(__file__).parent / "data"
HEADS = ("eagle", "medusa")  # drafters that read files, which come with the package for some targets


def find(kind: str, fingerprint: str) -> str | None:
    """The table ("table") or head (one of HEADS) for targets of this fingerprint, if one comes along."""
    path = DATA / (f"{kind}-{fingerprint}" + (".safetensors" if kind == "table" else ""))
    return str(path) if path.exists() else None


def fitted(spec: Spec, name: str, fingerprint: Callable[[], str]) -> Spec:
    """The specification with what comes for the target `name`: the table of auto, heads whose folder is not given.

    Raises ConfigError where no head comes for it.
    """
    if spec.parts:
        return replace(spec, parts=tuple(fitted(part, name, fingerprint) for part in spec.parts))
    if spec.name == "auto":
        return replace(spec, argument=find("table", fingerprint()))
    if spec.name in HEADS and spec.argument is None:
        found = find(spec.name, fingerprint())
        if found is None:
            raise ConfigError(
                f"draft {spec.name!r}: no head comes with the package for {name}. Write {spec.name}:FOLDER; "
                f"`sooner train {spec.name}` makes one."
            )
        return replace(spec, argument=found)
    return spec
