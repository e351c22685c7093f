"""Names of drafters and how to make them. Knows how to read a specification, not how drafters work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sooner.draft import join
from sooner.draft.eagle import EagleDrafter
from sooner.draft.lookup import LookupDrafter
from sooner.draft.medusa import MedusaDrafter
from sooner.draft.model import ModelDrafter
from sooner.draft.none import NoDrafter
from sooner.draft.prediction import PredictionDrafter
from sooner.draft.protocol import Drafter
from sooner.draft.translate import Foreign, TranslatingDrafter
from sooner.errors import ConfigError, DraftError, unknown
from sooner.heads import checkpoint as eagle_files
from sooner.heads import medusa as medusa_files
from sooner.model.linear import pack
from sooner.model.protocol import Ends, Model, WithEnds


@dataclass(frozen=True, slots=True)
class Spec:
    """A drafter as the user wrote it: `name` or `name:argument`. pickles: its files may be pickles.

    parts: those of a joined drafter, whose own name is "combine".
    """

    name: str
    argument: str | None = None
    pickles: bool = False
    parts: tuple[Spec, ...] = ()

    def __str__(self) -> str:
        if self.parts:
            return "+".join(str(part) for part in self.parts)
        return self.name if self.argument is None else f"{self.name}:{self.argument}"


LoadModel = Callable[[Spec], Model | Foreign]
"""The model a specification draws from. model:NAME: another one, Foreign if its tokenizer is not the target's;
self:KIND: the target's own weights at fewer bits; early-exit: its own first layers."""


def _none(spec: Spec, target: Model, load: LoadModel) -> Drafter:
    return NoDrafter()


def _lookup(spec: Spec, target: Model, load: LoadModel) -> Drafter:
    return LookupDrafter()


def _prediction(spec: Spec, target: Model, load: LoadModel) -> Drafter:
    return PredictionDrafter()


def _model(spec: Spec, target: Model, load: LoadModel) -> Drafter:
    found = load(spec)
    if isinstance(found, Foreign):
        return TranslatingDrafter(found, target.vocab_size, name=spec.name)
    return ModelDrafter(found, target.vocab_size, name=spec.name)


def _suffix(spec: Spec, target: Model, load: LoadModel) -> Drafter:
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


def _medusa(spec: Spec, target: Model, load: LoadModel) -> Drafter:
    ends = _ends(spec, target)
    heads = medusa_files.load(_folder(spec), pickles=spec.pickles)
    heads.check_target(ends.embedding.shape[1], target.vocab_size)
    few = heads.ids is not None and not heads.own_lm_heads
    return MedusaDrafter(
        heads.to(ends.embedding.device, ends.embedding.dtype),
        pack([ends.head()[heads.ids].to(ends.embedding.dtype)], [None]) if few else ends.project,
        layers=target.lanes.store.shape[0],
        hidden=ends.embedding.shape[1],
        vocab=target.vocab_size,
    )


def _eagle(spec: Spec, target: Model, load: LoadModel) -> Drafter:
    return EagleDrafter(
        eagle_files.load(_folder(spec), pickles=spec.pickles),
        _ends(spec, target),
        layers=target.lanes.store.shape[0],
        vocab=target.vocab_size,
        quantize="int8",
    )


def _folder(spec: Spec) -> str:
    if spec.argument is None:
        raise ConfigError(f"draft {spec.name!r} needs a folder here: write {spec.name}:FOLDER.")
    return spec.argument


def _ends(spec: Spec, target: Model) -> Ends:
    if not isinstance(target, WithEnds):
        raise DraftError(f"draft {spec.name!r} shares the target's LM head, and this target has none to share.")
    return target.ends()


def _combine(spec: Spec, target: Model, load: LoadModel) -> Drafter:
    parts = [(part.name, part.argument) for part in spec.parts]
    return join.join(str(spec), parts, target.vocab_size, lambda i: make(spec.parts[i], target, load))


def _recycle(spec: Spec, target: Model, load: LoadModel) -> Drafter:
    return join.join("recycle", [("recycle", spec.argument)], target.vocab_size, _nothing_else)


def _auto(spec: Spec, target: Model, load: LoadModel) -> Drafter:
    """lookup+recycle. The argument is the warm table that comes with the package for this target."""
    parts = [("lookup", None), ("recycle", spec.argument)]
    return join.join("auto", parts, target.vocab_size, _nothing_else)


def _nothing_else(i: int) -> Drafter:
    raise AssertionError(f"part {i} is a source by itself")


_MAKERS: Mapping[str, Callable[[Spec, Model, LoadModel], Drafter]] = {
    "none": _none,
    "lookup": _lookup,
    "suffix": _suffix,
    "prediction": _prediction,
    "model": _model,
    "self": _model,
    "early-exit": _model,
    "medusa": _medusa,
    "eagle": _eagle,
    "recycle": _recycle,
    "auto": _auto,
    "combine": _combine,
}
_ARGUED = ("suffix", "model", "self", "early-exit", "medusa", "eagle", "recycle")  # those that take an argument
NAMES = tuple(name for name in _MAKERS if name != "combine")  # which is written A+B
FORMS = (
    "auto",
    "none",
    "lookup",
    "suffix",
    "suffix:TOKENS",
    "prediction",
    "recycle[:TABLE]",
    "model:PATH",
    "self:int8",
    "self:int4",
    "early-exit[:N]",
    "medusa[:FOLDER]",
    "eagle[:FOLDER]",
    "A+B",
)
BITS = ("int8", "int4")


def parse(text: str, *, pickles: bool = False) -> Spec:
    """Read one of FORMS. pickles: whether heads may be read from pickles. Raises ConfigError for anything else."""
    parts = tuple(_one(part, pickles) for part in join.split(text, NAMES))
    if len(parts) == 1:
        return parts[0]
    join.check([part.name for part in parts])
    return Spec("combine", pickles=pickles, parts=parts)


def _one(text: str, pickles: bool) -> Spec:
    name, colon, argument = text.partition(":")
    if name not in NAMES:
        raise ConfigError(unknown("draft", name, FORMS))
    if colon and name not in _ARGUED:
        raise ConfigError(f"draft {name!r} takes no argument, got {argument!r}.")
    if name in _CHECKS:
        _CHECKS[name](argument, bool(colon))
    return Spec(name, argument if colon else None, pickles)


def _model_argument(argument: str, given: bool) -> None:
    if not argument:
        raise ConfigError("draft 'model' needs a model: write model:FOLDER or model:NAME.")


def _recycle_argument(argument: str, given: bool) -> None:
    if given and not argument:
        raise ConfigError("draft 'recycle' takes a warm table: write recycle or recycle:TABLE.")


def _medusa_argument(argument: str, given: bool) -> None:
    if given and not argument:
        raise ConfigError("draft 'medusa' takes heads: write medusa:FOLDER, or medusa for those that come along.")


def _eagle_argument(argument: str, given: bool) -> None:
    if given and not argument:
        raise ConfigError("draft 'eagle' takes a head: write eagle:FOLDER, or eagle for the one that comes along.")


def _self_argument(argument: str, given: bool) -> None:
    if argument not in BITS:
        allowed = " or ".join(f"self:{kind}" for kind in BITS)
        raise ConfigError(f"draft 'self' needs the bits of its copy of the target: write {allowed}.")


def _early_exit_argument(argument: str, given: bool) -> None:
    if given and not (argument.isascii() and argument.isdigit() and int(argument) > 0):
        raise ConfigError(f"draft 'early-exit' takes a number of layers, as in early-exit:8, got {argument!r}.")


_CHECKS: Mapping[str, Callable[[str, bool], None]] = {
    "model": _model_argument,
    "recycle": _recycle_argument,
    "self": _self_argument,
    "early-exit": _early_exit_argument,
    "medusa": _medusa_argument,
    "eagle": _eagle_argument,
}


def make(spec: Spec, target: Model, load: LoadModel) -> Drafter:
    """The drafter of a specification, for a target."""
    return _MAKERS[spec.name](spec, target, load)
