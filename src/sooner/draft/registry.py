"""Names of drafters and how to make them. Knows how to read a specification, not how drafters work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sooner.draft.lookup import LookupDrafter
from sooner.draft.model import ModelDrafter
from sooner.draft.none import NoDrafter
from sooner.draft.protocol import Drafter
from sooner.errors import ConfigError, unknown
from sooner.model.protocol import Model


@dataclass(frozen=True, slots=True)
class Spec:
    """A drafter as the user wrote it: `name` or `name:argument`."""

    name: str
    argument: str | None = None

    def __str__(self) -> str:
        return self.name if self.argument is None else f"{self.name}:{self.argument}"


LoadModel = Callable[[str], Model]
"""Loads a draft model by name or folder, and refuses one whose tokenizer is not the target's."""


def _none(spec: Spec, vocab: int, load: LoadModel) -> Drafter:
    return NoDrafter()


def _lookup(spec: Spec, vocab: int, load: LoadModel) -> Drafter:
    return LookupDrafter()


def _model(spec: Spec, vocab: int, load: LoadModel) -> Drafter:
    return ModelDrafter(load(spec.argument or ""), vocab)  # parse has seen that there is one


def _suffix(spec: Spec, vocab: int, load: LoadModel) -> Drafter:
    try:
        from sooner.draft.suffix import SuffixDrafter
    except ImportError as error:
        raise ConfigError("draft 'suffix' needs numba: pip install \"sooner[suffix]\".") from error
    shared = spec.argument or "0"
    if spec.argument == "" or not shared.isdecimal():
        raise ConfigError(
            f"write suffix or suffix:TOKENS (how many tokens of earlier outputs to keep), not {spec}."
        )
    return SuffixDrafter(int(shared))


_MAKERS: Mapping[str, Callable[[Spec, int, LoadModel], Drafter]] = {
    "none": _none,
    "lookup": _lookup,
    "suffix": _suffix,
    "model": _model,
}
_ARGUED = ("suffix", "model")  # those that take an argument
NAMES = tuple(_MAKERS)


def parse(text: str) -> Spec:
    """Read `none`, `lookup`, `suffix`, `suffix:TOKENS` or `model:PATH`. Raises ConfigError for anything else."""
    name, colon, argument = text.partition(":")
    if name not in _MAKERS:
        raise ConfigError(unknown("draft", name, ("none", "lookup", "suffix", "suffix:TOKENS", "model:PATH")))
    if colon and name not in _ARGUED:
        raise ConfigError(f"draft {name!r} takes no argument, got {argument!r}.")
    if name == "model" and not argument:
        raise ConfigError("draft 'model' needs a model: write model:FOLDER or model:NAME.")
    return Spec(name, argument if colon else None)


def make(spec: Spec, vocab: int, load: LoadModel) -> Drafter:
    """The drafter of a specification, for a target with `vocab` logits."""
    return _MAKERS[spec.name](spec, vocab, load)
