"""Medusa heads and their file formats. Knows no target, no text and no tree.

Head i reads the target's final, normalised state at token t and guesses token t + 2 + i (token t + 1 is the
target's own). x -> x + SiLU(W x + b), one or more times, then an LM head: its own (v1) or the target's (v2).
(Cai et al. 2401.10774.) Three layouts are read, see `load`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import silu

from sooner.errors import ModelError

Project = Callable[[Tensor], Tensor]
"""States [n, h] -> logits [n, V]."""

HEADS_ONLY, MERGED = "medusa_lm_head", "medusa_head."
_MAP = "token_map"
_MODEL, _INDEX = "model.safetensors", "model.safetensors.index.json"
_OFFICIAL = re.compile(r"(?P<head>\d+)\.(?P<block>\d+)\.(?:linear\.)?(?P<part>weight|bias)")
_BLOCKS = re.compile(r"blocks\.(?P<head>\d+)\.layers\.(?P<block>\d+)\.(?P<part>weight|bias)")
_OUT = re.compile(r"lm_heads\.(?P<head>\d+)\.weight")


@dataclass(frozen=True, slots=True)
class Block:
    """x + SiLU(weight x + bias). weight [h, h], bias [h] or None."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return x + silu(torch.nn.functional.linear(x, self.weight, self.bias))


@dataclass(frozen=True, slots=True)
class Head:
    """blocks, then `out` [V, h]; None = the target's own LM head."""

    blocks: tuple[Block, ...]
    out: Tensor | None

    def state(self, x: Tensor) -> Tensor:
        """[n, h] -> [n, h], what the LM head reads."""
        for block in self.blocks:
            x = block(x)
        return x


@dataclass(frozen=True, slots=True)
class MedusaHeads:
    """Heads of one checkpoint, all of one shape. ids: int64, the target's id of each row of `out`; None = same.

    With ids and no `out` the heads are read by those rows of the target's LM head alone.

    Raises ModelError for heads that differ in shape, or an LM head with the wrong number of rows.
    """

    heads: tuple[Head, ...]
    ids: Tensor | None = None

    def __post_init__(self) -> None:
        if not self.heads:
            raise ModelError("the checkpoint holds no Medusa head.")
        if len({len(head.blocks) for head in self.heads}) > 1:
            raise ModelError(f"heads with different numbers of blocks: {[len(h.blocks) for h in self.heads]}.")
        if len({head.out is None for head in self.heads}) > 1:
            raise ModelError("some heads have an LM head of their own and some have none.")
        for i, head in enumerate(self.heads):
            for j, block in enumerate(head.blocks):
                _expect(f"block {j} of head {i}", block.weight, (self.hidden, self.hidden))
                if block.bias is not None:
                    _expect(f"the bias of block {j} of head {i}", block.bias, (self.hidden,))
            if head.out is not None:
                first = self.heads[0].out if self.ids is None else self.ids
                rows = 0 if first is None else len(first)  # not None: all heads have one, or none has
                _expect(f"the LM head of head {i}", head.out, (rows, self.hidden))

    @property
    def hidden(self) -> int:
        """Width of the states the heads read."""
        first = self.heads[0]
        sized = first.blocks[0].weight if first.blocks else first.out
        if sized is None:
            raise ModelError("a Medusa head needs a block or an LM head.")
        return int(sized.shape[-1])

    @property
    def own_lm_heads(self) -> bool:
        return self.heads[0].out is not None

    def check_target(self, hidden: int, vocab: int) -> None:
        """Raise ModelError unless the heads fit a target of this width and vocabulary."""
        if self.hidden != hidden:
            raise ModelError(f"the heads read states of width {self.hidden}, the target's have {hidden}.")
        out = self.heads[0].out
        if self.ids is not None and int(self.ids.max()) >= vocab:
            raise ModelError(
                f"the token map names id {int(self.ids.max())}; the target has ids up to {vocab - 1}."
            )
        if out is not None and self.ids is None and len(out) > vocab:
            raise ModelError(f"the heads guess among {len(out)} ids, the target has {vocab}.")

    def to(self, device: torch.device, dtype: torch.dtype) -> MedusaHeads:
        def moved(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.to(device=device, dtype=dtype)

        heads = tuple(
            Head(tuple(Block(_known(moved(b.weight)), moved(b.bias)) for b in head.blocks), moved(head.out))
            for head in self.heads
        )
        return MedusaHeads(heads, None if self.ids is None else self.ids.to(device))


def load(folder: str | Path, *, pickles: bool = False) -> MedusaHeads:
    """Read the heads in a folder.

    medusa_lm_head.safetensors: `{i}.{j}.linear.weight`, `.bias`, and in v1 heads `{i}.{blocks}.weight`. Ours may
    have a `token_map` too, the ids that matter; whoever does not know it reads heads over all ids.
    a merged model: the same under `medusa_head.` in model.safetensors or its shards; the target's weights stay.
    model.safetensors with `blocks.{i}.layers.{j}.weight`, `lm_heads.{i}.weight` and perhaps `token_map`.
    pickles: also read .pt and .bin files, tensors only (weights_only=True).
    The number of heads and blocks is that of the tensors: published configs are wrong about it.
    Raises ModelError for whatever is missing, left over, or of the wrong shape.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ModelError(f"{path} is no folder with Medusa heads.")
    tensors = _tensors(path, pickles)
    settings = _settings(path)
    listed = {_stripped(name): tensor for name, tensor in tensors.items()}
    foreign = any(name.startswith(("blocks.", "lm_heads.")) for name in listed)
    return _blocks_layout(listed, settings) if foreign else _official_layout(listed, settings)


def save(folder: str | Path, heads: MedusaHeads, *, notes: Mapping[str, Any]) -> None:
    """Write heads without an LM head of their own in the official layout (v2). notes: go into config.json under
    "sooner"."""
    path = Path(folder)
    tensors: dict[str, Tensor] = {} if heads.ids is None else {_MAP: heads.ids.to(torch.int32).cpu()}
    for i, head in enumerate(heads.heads):
        assert head.out is None
        for j, block in enumerate(head.blocks):
            tensors[f"{i}.{j}.linear.weight"] = block.weight.cpu().contiguous()
            tensors[f"{i}.{j}.linear.bias"] = _known(block.bias).cpu().contiguous()
    settings = {
        "medusa_num_heads": len(heads.heads),
        "medusa_num_layers": len(heads.heads[0].blocks),
        "version": "2",
        "base_model_name_or_path": notes.get("target", ""),
        "sooner": dict(notes),
    }
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "part.safetensors")
    (path / "part.safetensors").replace(path / f"{HEADS_ONLY}.safetensors")
    (path / "config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _official_layout(tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> MedusaHeads:
    """`{i}.{j}.linear.*` are blocks; `{i}.{j}.weight` without `linear` is the LM head, behind the last block."""
    blocks: dict[int, dict[int, dict[str, Tensor]]] = {}
    outs: dict[int, tuple[int, Tensor]] = {}
    tensors = dict(tensors)
    ids = tensors.pop(_MAP, None)
    for name, tensor in tensors.items():
        found = _OFFICIAL.fullmatch(name)
        if found is None:
            raise ModelError(f"tensor {name!r} is none that Medusa heads have.")
        i, j, part = int(found["head"]), int(found["block"]), found["part"]
        if ".linear." in name:
            blocks.setdefault(i, {}).setdefault(j, {})[part] = tensor
        elif part == "bias" or i in outs:
            raise ModelError(f"tensor {name!r} is none that Medusa heads have.")
        else:
            outs[i] = (j, tensor)
    heads = []
    for i in _counted("head", blocks.keys() | outs.keys()):
        mine = blocks.get(i, {})
        count = len(_counted(f"block of head {i}", mine))
        if i in outs and outs[i][0] != count:
            raise ModelError(
                f"head {i} has {count} blocks, so its LM head is {i}.{count}.weight, not {i}.{outs[i][0]}."
            )
        lacking = [f"{i}.{j}.linear.{part}" for j in mine for part in ("weight", "bias") if part not in mine[j]]
        if lacking:
            raise ModelError(f"the heads lack {', '.join(lacking)}.")
        parts = tuple(Block(mine[j]["weight"], mine[j]["bias"]) for j in range(count))
        heads.append(Head(parts, outs[i][1] if i in outs else None))
    _same("medusa_num_layers", settings, len(heads[0].blocks) if heads else 0)
    return MedusaHeads(tuple(heads), _distinct(ids))


def _blocks_layout(tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> MedusaHeads:
    """`blocks.{i}.layers.{j}` with a bias only if the config says so; LM heads may be one for all."""
    blocks: dict[int, dict[int, dict[str, Tensor]]] = {}
    outs: dict[int, Tensor] = {}
    ids = None
    for name, tensor in tensors.items():
        block, out = _BLOCKS.fullmatch(name), _OUT.fullmatch(name)
        if block:
            blocks.setdefault(int(block["head"]), {}).setdefault(int(block["block"]), {})[block["part"]] = tensor
        elif out:
            outs[int(out["head"])] = tensor
        elif name == _MAP:
            ids = _distinct(tensor)
        else:
            raise ModelError(f"tensor {name!r} is none that Medusa heads have.")
    biased = bool(settings.get("medusa_fc_bias", False))
    heads = []
    for i in _counted("head", blocks):
        mine = blocks[i]
        for j in _counted(f"block of head {i}", mine):
            if "weight" not in mine[j] or ("bias" in mine[j]) != biased:
                has = "a bias" if "bias" in mine[j] else "no bias"
                raise ModelError(f"block {j} of head {i} has {has}, but medusa_fc_bias is {str(biased).lower()}.")
        parts = tuple(Block(mine[j]["weight"], mine[j].get("bias")) for j in range(len(mine)))
        heads.append(Head(parts, outs.get(0 if settings.get("original_lm_head") else i)))
    _same("num_hidden_layers", settings, len(heads[0].blocks) if heads else 0)
    _same("num_heads", settings, len(heads))
    if (ids is not None) and not outs:
        raise ModelError("a token map needs LM heads of its own.")
    return MedusaHeads(tuple(heads), ids)


def _tensors(path: Path, pickles: bool) -> dict[str, Tensor]:
    """The heads' tensors by name; those of a merged model's target are not even read."""
    if (path / f"{HEADS_ONLY}.safetensors").is_file():
        return _read(path / f"{HEADS_ONLY}.safetensors", "")
    if (path / _INDEX).is_file():
        index: dict[str, str] = json.loads((path / _INDEX).read_text())["weight_map"]
        files = sorted({file for name, file in index.items() if name.startswith(MERGED)})
        if any(Path(file).name != file for file in files):
            raise ModelError(f"{_INDEX} names files outside its folder.")
        return {name: tensor for file in files for name, tensor in _read(path / file, MERGED).items()}
    if (path / _MODEL).is_file():
        with safe_open(path / _MODEL, framework="pt") as file:
            merged = any(name.startswith(MERGED) for name in file.keys())  # noqa: SIM118  # no mapping
        return _read(path / _MODEL, MERGED if merged else "")
    pickled = [file for file in sorted(path.iterdir()) if file.suffix in (".pt", ".bin")]
    if not pickled:
        raise ModelError(f"{path} holds no Medusa heads: no {HEADS_ONLY}.safetensors, no {_MODEL}.")
    if not pickles:
        raise ModelError(
            f"{pickled[0].name} is a pickle, which can run code; it is read only with allow_pickles=True "
            "(--allow-pickles). "
            "Better: convert it to safetensors."
        )
    named = [file for file in pickled if file.stem == HEADS_ONLY] or pickled
    try:
        return dict(torch.load(named[0], map_location="cpu", weights_only=True))
    except Exception as error:  # whatever the file makes torch raise
        raise ModelError(f"{named[0].name} cannot be read, or holds more than tensors: {error}") from error


def _read(file: Path, prefix: str) -> dict[str, Tensor]:
    with safe_open(file, framework="pt") as tensors:
        return {name: tensors.get_tensor(name) for name in tensors.keys() if name.startswith(prefix)}  # noqa: SIM118  # no mapping


def _settings(path: Path) -> Mapping[str, Any]:
    if not (path / "config.json").is_file():
        return {}
    read: Mapping[str, Any] = json.loads((path / "config.json").read_text())
    return read


def _distinct(ids: Tensor | None) -> Tensor | None:
    """The token map as int64. Raises ModelError where it cannot be one."""
    if ids is None:
        return None
    if ids.dim() != 1 or ids.is_floating_point() or not len(ids) or int(ids.min()) < 0:
        raise ModelError("the token map must be a list of ids, whole numbers from 0 on.")
    if len(set(ids.tolist())) != len(ids):
        raise ModelError("the token map names an id twice.")
    return ids.to(torch.int64)


def _stripped(name: str) -> str:
    return name.removeprefix("medusa_heads.").removeprefix(MERGED)


def _counted(what: str, numbers: Any) -> range:
    """0, 1, 2, ... as many as there are. Raises ModelError where one is missing."""
    if sorted(numbers) != list(range(len(numbers))):
        raise ModelError(f"the numbers of the {what}s are {sorted(numbers)}: one is missing.")
    return range(len(numbers))


def _same(name: str, settings: Mapping[str, Any], found: int) -> None:
    if settings.get(name, found) != found:
        raise ModelError(f"config.json says {name} {settings[name]}, the tensors say {found}.")


def _expect(what: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ModelError(f"{what} is {list(tensor.shape)}, expected {list(shape)}.")


def _known(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor
