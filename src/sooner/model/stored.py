"""A Llama-shaped model as it lies on disk: configuration and safetensors, no transformers modules.

Knows no runtime. What is not exactly as the family has it is left to transformers: `read` says None.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import cached_file

from sooner.model import families
from sooner.model.decoder import Norm, Parts, Shape, Weights, placed
from sooner.model.safetensors_map import MappedTensors, NotPlainError

_WHOLE, _INDEX, _ADAPTER = "model.safetensors", "model.safetensors.index.json", "adapter_config.json"


def read(source: str, config: Any, dtype: torch.dtype) -> Stored | None:
    """The model of a folder or a hub id in the cache, or None where only transformers can say what it is."""
    if not _plain(config) or _file(source, _ADAPTER) is not None:
        return None
    try:
        files = _files(source)
        tensors = None if files is None else MappedTensors(files)
    except (NotPlainError, OSError):
        return None
    if tensors is None or tensors.shapes() != families.tensors(config):
        return None
    return Stored(config, tensors, dtype)


class Stored:
    """The Source that files are."""

    def __init__(self, config: Any, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        self._config, self._tensors, self._dtype = config, tensors, dtype
        self._family = families.TABLE[str(config.model_type)]
        scale = config.hidden_size**0.5 if self._family.gemma else 1.0
        self.shape = Shape(
            config=config,
            dtype=dtype,
            device=torch.device("cpu"),
            vocab=int(config.vocab_size),
            act=ACT2FN[getattr(config, self._family.act)],
            norm=self._norm(families.NORM),
            rotary=Rotary(config),
            embed_scale=float(torch.tensor(scale).to(dtype)),
        )
        self.tied = bool(config.tie_word_embeddings)
        self.head = Weights([tensors[families.EMBEDDING if self.tied else families.HEAD]], [None])

    def embedding(self) -> Tensor:
        """The embedding [V, H], a copy in memory."""
        return self._tensors[families.EMBEDDING].to(self._dtype, copy=True)

    def rotary(self, layer: int) -> str | None:
        """Which rotary table a layer uses, None for no rotation."""
        turned = self._family.turned
        return self.shape.table(layer) if turned is None or getattr(self._config, turned)[layer] else None

    def parts(self, layer: int) -> Parts[Weights]:
        """The parts of one layer, views of the files."""
        family, config = self._family, self._config
        qkv = (families.QKV,) if family.fused else (families.Q, families.K, families.V)
        gate_up = (families.GATE_UP,) if family.fused else (families.GATE, families.UP)
        named = (families.INPUT, families.ATTENTION, families.BEFORE_MLP, families.AFTER_MLP)
        norms = [self._norm(self._name(layer, name)) if name in family.norms else None for name in named]
        heads = [
            self._norm(self._name(layer, name)) if family.head_norms else None
            for name in (families.Q_NORM, families.K_NORM)
        ]
        scalar = config.query_pre_attn_scalar if family.query_scalar else self.shape.dim
        return Parts(
            qkv=self._maps(layer, *qkv),
            out=self._maps(layer, families.O),
            gate_up=self._maps(layer, *gate_up),
            down=self._maps(layer, families.DOWN),
            **placed(*norms),
            q_norm=heads[0],
            k_norm=heads[1],
            rotary=self.rotary(layer),
            window=self._window(layer),
            scale=float(scalar**-0.5),
            softcap=config.attn_logit_softcapping if family.query_scalar else None,
        )

    def drop(self, layer: int) -> None:
        """Give back the pages of a layer."""
        self._give_back(families.layer_name(layer, ""))

    def drop_ends(self) -> None:
        """Give back the pages of embedding and head, and let go of the files."""
        self._give_back("")
        self._tensors = {}
        self.head = Weights([], [])

    def _give_back(self, prefix: str) -> None:
        if isinstance(self._tensors, MappedTensors):
            self._tensors.give_back(name for name in self._tensors if name.startswith(prefix))

    def _name(self, layer: int, part: str) -> str:
        return families.layer_name(layer, part) + "weight"

    def _norm(self, name: str) -> Norm:
        weight = self._tensors[name].to(self._dtype).float()
        weight = weight + 1 if self._family.gemma else weight.clone()
        return Norm(weight, float(self._config.rms_norm_eps))

    def _maps(self, layer: int, *names: str) -> Weights:
        places = [families.layer_name(layer, name) for name in names]
        return Weights(
            [self._tensors[place + "weight"] for place in places],
            [self._tensors.get(place + "bias") for place in places],
        )

    def _window(self, layer: int) -> int | None:
        sees, sliding = self._family.window, self.shape.kinds[layer] == "sliding_attention"
        if sees == "asked":
            sliding = sliding and self._config.use_sliding_window
        found: int | None = (
            self._config.sliding_window if sees == "all" or (sees != "nobody" and sliding) else None
        )
        return found


class Rotary:
    """Rotary tables by a configuration, as transformers' modules make them, of kinds that no text changes.

    rope_type: one, or one for each kind of layer.
    """

    def __init__(self, config: Any) -> None:
        told = config.rope_parameters
        per_kind = "rope_type" not in told
        self.rope_type: Any = {k: part["rope_type"] for k, part in told.items()} if per_kind else told["rope_type"]
        self._made = {kind: _frequencies(config, kind) for kind in (told if per_kind else [None])}

    def __call__(self, x: Tensor, positions: Tensor, kind: str | None = None) -> tuple[Tensor, Tensor]:
        """Cosines and sines [..., D'] at `positions`, in the dtype of x."""
        frequencies, scale = self._made[kind]
        half = positions[..., None].float() * frequencies
        angles = torch.cat((half, half), dim=-1)
        return (angles.cos() * scale).to(x.dtype), (angles.sin() * scale).to(x.dtype)


def _frequencies(config: Any, kind: str | None) -> tuple[Tensor, float]:
    """Angle per position of every pair, float32, and what cosines and sines are multiplied by."""
    told = config.rope_parameters if kind is None else config.rope_parameters[kind]
    if told["rope_type"] != "default":
        which = {} if kind is None else {"layer_type": kind}
        made: tuple[Tensor, float] = ROPE_INIT_FUNCTIONS[told["rope_type"]](config, None, **which)
        return made
    width = int(families.head_width(config) * told.get("partial_rotary_factor", 1.0))
    return 1.0 / (told["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float) / width)), 1.0


def _plain(config: Any) -> bool:
    """Whether a configuration holds nothing beyond what is read here."""
    family = families.TABLE.get(str(config.model_type))
    told = config.rope_parameters
    if family is None or not told or getattr(config, "quantization_config", None) is not None:
        return False
    per_kind = "rope_type" not in told
    parts = list(told.values()) if per_kind else [told]
    if per_kind != family.per_kind or not all(
        part and part.get("rope_type") in families.STATIC_ROPE for part in parts
    ):
        return False
    # A part of the head that turns is phi3's; the others ignore the setting or read it otherwise.
    turned = family.fused or all(part.get("partial_rotary_factor", 1.0) == 1.0 for part in parts)
    return turned and getattr(config, family.act) in ACT2FN


def _files(source: str) -> list[Path] | None:
    """The safetensors files of a model, or None where it has none; of shards, those that the index names."""
    whole = _file(source, _WHOLE)
    if whole is not None:
        return [whole]
    index = _file(source, _INDEX)
    if index is None:
        return None
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise NotPlainError(f"{index.name}: {error}") from error
    found = [_file(source, name) for name in names]
    return [file for file in found if file is not None] if all(found) else None


def _file(source: str, name: str) -> Path | None:
    """A file of a folder, or of a hub id as far as it lies in the cache."""
    if Path(source).is_dir():
        path = Path(source) / name
        return path if path.is_file() else None
    found = cached_file(
        source, name, local_files_only=True, _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False, _raise_exceptions_for_gated_repo=False,
    )  # fmt: skip
    return None if found is None else Path(found)
