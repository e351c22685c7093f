"""The decoder of model/decoder.py as one call of C a pass: sooner/native/pass.c. Knows no requests.

Bits of a row do not depend on what shares the pass, nor on the shape of its tree: nothing is padded, and sums have
one order. Used on CPU where there is a C compiler; held to `HFModel` by tests/model/test_native.py.
"""

from __future__ import annotations

import copy
import ctypes
from array import array
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from sooner.core.step import Step
from sooner.core.tree import ROOT
from sooner.errors import ModelError
from sooner.model import families
from sooner.model import quantize as fewer
from sooner.model.decoder import Modules, Norm, Parts, Source, Weights
from sooner.model.hf import context_limit
from sooner.model.lanes import LaneCache, staged_parents
from sooner.model.linear import pack
from sooner.model.protocol import Ends, Output
from sooner.native import build
from sooner.native.decoder import LANES, Layer, Linear, Model, Packer, Pass, Room, in_turn, whole_panels

_GELU = ("GELUTanh", "PytorchGELUTanh", "NewGELUActivation")
_SILU = ("SiLU", "SiLUActivation")
_ANGLES = 1024  # positions that rotary tables grow by


def serves(source: nn.Module | Source) -> bool:
    """Whether NativeModel can run this model: its sizes, dtype and activation, and a compiler on this machine."""
    shape = _opened(source).shape
    unit = 2 if shape.dtype == torch.bfloat16 else 1
    return (
        shape.device.type == "cpu"
        and shape.dtype in (torch.bfloat16, torch.float32)
        and not any(size % LANES for size in (shape.hidden, shape.inner))
        and shape.dim % (LANES * unit) == 0
        and type(shape.act).__name__ in (*_GELU, *_SILU)
        and _library(shape.dtype) is not None
    )


class NativeModel:
    """A Model for the families in decoder.FAMILIES. `source`: a transformers module, which is emptied: its weights
    move here, layer by layer; or another Source.

    quantize: "int8", or "int4" for all but the LM head, which int4 would cost most and stays at int8.
    borrow: the module is left as it is and its weights are read where they lie; the bits are the same.
    """

    even_trees = True  # rows of a tree have the bits of rows of a chain

    def __init__(self, source: nn.Module | Source, quantize: str | None = None, *, borrow: bool = False) -> None:
        source = _opened(source)
        shape = source.shape
        library = _library(shape.dtype)
        if library is None:
            raise RuntimeError("there is no C compiler here")
        self._library, self._shape = library, shape
        self.vocab_size = shape.vocab
        self.context_limit = context_limit(shape.config)
        self.device = shape.device
        self._quantize, self._borrow = quantize, borrow
        self._packer = Packer()
        self._angles = torch.empty((2, 0, 0, 0))
        types = getattr(shape.rotary, "rope_type", "default")
        kinds = types.values() if isinstance(types, dict) else [types]
        self._static = all(kind in families.STATIC_ROPE for kind in kinds)
        count = shape.layers
        self._layers = (Layer * count)()
        self._tables = sorted({kind for kind in map(source.rotary, range(count)) if kind is not None})
        for i in range(count):
            self._layers[i] = self._layer(source.parts(i))
            if not borrow:
                source.drop(i)  # each layer's weights go as soon as they are packed
        # Where the head's panels hold the embedding, nothing else may keep it alive.
        self._embedding = None if source.tied and not borrow else source.embedding()
        self._model = Model(
            layers=count, hidden=shape.hidden, heads=shape.heads, kv_heads=shape.kv_heads, dim=shape.dim,
            inner=shape.inner, vocab=shape.vocab, gelu=type(shape.act).__name__ in _GELU,
            rotary=self._rotary_width(), eps=shape.norm.eps, embed_scale=shape.embed_scale,
            embed=None if self._embedding is None else self._packer.keep(self._embedding.detach()),
            norm=self._norm(shape.norm), head=self._linear(source.head, quantize and "int8"), layer=self._layers,
        )  # fmt: skip
        self._head = source.head.weights[0].detach() if borrow else None
        if not borrow:
            source.drop_ends()
        self._room = Room()
        self.lanes = LaneCache(count, shape.kv_heads, shape.dim, shape.dtype, self.device)

    def forward(self, step: Step, *, rows: Tensor, taps: Sequence[int] = ()) -> Output:
        """One pass; see Model.forward."""
        for segment in step.segments:
            self.lanes.reserve(segment.lane, segment.start, segment.rows)
        count, wanted, store = step.offsets[-1], rows.shape[0], self.lanes.store
        logits = torch.empty((wanted, self.vocab_size))
        features = torch.empty((count, len(taps), self._shape.hidden), dtype=self._shape.dtype) if taps else None
        cos_sin, angle = self._rotary(step)
        told = array("q", [*_parents(step), *step.offsets, *taps, *angle])
        parent = told.buffer_info()[0]
        offset = parent + 8 * count
        tap = offset + 8 * len(step.offsets)
        cos = cos_sin.data_ptr()
        now = Pass(
            rows=count, segments=len(step.segments), wanted=wanted, taps=len(taps), angles=cos_sin.shape[2],
            threads=torch.get_num_threads(), token=step.tokens.data_ptr(), position=step.positions.data_ptr(),
            column=step.columns.data_ptr(), lane=step.lanes.data_ptr(), parent=parent, offset=offset,
            row=rows.data_ptr(), tap=tap, angle=tap + 8 * len(taps) if angle else step.positions.data_ptr(),
            cos=cos, sin=cos + 2 * cos_sin.numel(),
            store=store.data_ptr(), lanes=store.shape[2], capacity=store.shape[4], logits=logits.data_ptr(),
            features=None if features is None else features.data_ptr(),
        )  # fmt: skip
        now.scratch = self._room.at(self._library.scratch_bytes(ctypes.byref(self._model), ctypes.byref(now)))
        self._library.run_pass(ctypes.byref(self._model), ctypes.byref(now))
        if self._shape.softcap is not None:
            logits = torch.tanh(logits / self._shape.softcap) * self._shape.softcap
        for segment in step.segments:
            tokens = segment.certain + segment.draft.tokens
            self.lanes.stage(segment.lane, tokens, staged_parents(len(segment.certain), segment.draft.parents))
        return Output(logits, features)

    def ends(self) -> Ends:
        """What draft heads share with this model: copies, unpacked for whoever asks."""
        if self._quantize is not None:
            raise ModelError("the target's weights are quantised; draft heads need them as they are.")
        own = self._embedding
        if self._head is not None:
            whole = self._head
            return Ends(
                whole if own is None else own, self._shape.norm.weight, pack([whole], [None]), lambda: whole
            )
        units = self._model.head.units
        count = -(-self.vocab_size // LANES) * units * LANES
        panels = next(t for t in self._packer.kept if t.data_ptr() == self._model.head.w)
        rows = panels.view(-1, units, LANES).transpose(1, 2).reshape(count // units, units)
        head = rows.view(self._shape.dtype)[: self.vocab_size]
        return Ends(head if own is None else own, self._shape.norm.weight, pack([head], [None]), lambda: head)

    def first_layers(self, count: int) -> NativeModel:
        """The first `count` layers, the final norm and the head, on the same weights, with lanes of its own."""
        early, shape = copy.copy(self), self._shape
        early._model = Model.from_buffer_copy(self._model)
        early._model.layers = count
        early._room = Room()
        early.lanes = LaneCache(count, shape.kv_heads, shape.dim, self._shape.dtype, self.device)
        return early

    def _layer(self, parts: Parts[Weights]) -> Any:
        return Layer(
            qkv=self._linear(parts.qkv, self._quantize),
            o=self._linear(parts.out, self._quantize),
            gate_up=self._linear(parts.gate_up, self._quantize, gated=self._shape.inner),
            down=self._linear(parts.down, self._quantize),
            before_attention=self._norm(parts.before_attention),
            after_attention=self._norm(parts.after_attention),
            before_mlp=self._norm(parts.before_mlp),
            after_mlp=self._norm(parts.after_mlp),
            q_norm=self._norm(parts.q_norm),
            k_norm=self._norm(parts.k_norm),
            norm_all=parts.q_norm is not None and len(parts.q_norm.weight) != self._shape.dim,
            table=-1 if parts.rotary is None else self._tables.index(parts.rotary),
            window=parts.window or 0,
            scale=parts.scale,
            softcap=parts.softcap or 0.0,
        )

    def _norm(self, norm: Norm | None) -> int | None:
        return None if norm is None else self._packer.keep(norm.weight)

    def _linear(self, maps: Weights, quantize: str | None, gated: int = 0) -> Any:
        """Weights [out, in] in panels of 16 outputs, units of 32 bits: [out / 16, units, 16]; or at fewer bits.

        gated: outputs of gate and of up, which take turns, panel by panel; 0 = another map.
        """
        if self._borrow:
            return self._plain(maps, gated)
        dtype = self._shape.dtype
        weight, bias = maps.stacked(dtype)
        if gated:
            weight, bias = in_turn(weight.to(dtype), gated), None if bias is None else in_turn(bias, gated)
        if quantize is not None:
            out, inputs = weight.shape
            small = fewer.panels(quantize, whole_panels(weight.to(dtype)))
            return self._packer.fewer(small, bias, (out, inputs), dtype)
        return self._packer.linear(weight, bias, dtype)

    def _plain(self, maps: Weights, gated: int) -> Any:
        """Weights where they lie."""
        found = [w.detach().contiguous() for w in maps.weights]
        if gated and len(found) == 1:
            found = [found[0][:gated], found[0][gated:]]
        self._packer.kept += found
        _, bias = Weights(found[:1], maps.biases).stacked(self._shape.dtype)
        if gated and bias is not None:
            bias = in_turn(bias, gated)
        ends = list(accumulate(len(w) for w in found))
        units = found[0].shape[1] * found[0].element_size() // 4
        bias_at = None if bias is None else self._packer.keep(bias.float())
        spare = 3 - len(found)
        part = (c_void_p * 3)(*(w.data_ptr() for w in found), *[None] * spare)
        until = (c_int64 * 3)(*ends, *[0] * spare)
        return Linear(None, bias_at, None, units, ends[-1], 0, 0.0, part, until)

    def _rotary_width(self) -> int:
        if not self._tables:
            return 0
        return self._make_angles(self._tables[:1], torch.zeros(1, dtype=torch.int64)).shape[-1]

    def _rotary(self, step: Step) -> tuple[Tensor, Sequence[int]]:
        """Cosines and sines [2, tables, angles, D'], float32, and the angle of every row; () = its position.

        Where they never change, a table of all positions so far is kept."""
        if not self._static:
            return self._make_angles(self._tables, step.positions), range(len(step.positions))
        need = 1 + max(segment.start + segment.rows for segment in step.segments)
        if self._angles.shape[2] < need:
            self._angles = self._make_angles(self._tables, torch.arange(-(-need // _ANGLES) * _ANGLES))
        return self._angles, ()

    @torch.no_grad()
    def _make_angles(self, kinds: Sequence[str], positions: Tensor) -> Tensor:
        if not kinds:
            return torch.empty((2, 0, len(positions), 0))
        made = self._shape.tables(torch.zeros((len(positions), 1)), positions, set(kinds))
        return torch.stack([torch.stack([made[kind][part] for kind in kinds]) for part in (0, 1)]).contiguous()


def _parents(step: Step) -> list[int]:
    """For each row the row of its parent node; -1 for certain tokens, root for the first nodes."""
    parents: list[int] = []
    for segment, offset in zip(step.segments, step.offsets, strict=False):
        root = offset + len(segment.certain) - 1
        parents += [-1] * len(segment.certain)
        parents += [root if parent == ROOT else root + 1 + parent for parent in segment.draft.parents]
    return parents


def _opened(source: nn.Module | Source) -> Source:
    return Modules(source) if isinstance(source, nn.Module) else source


def _library(dtype: torch.dtype) -> Any:
    """The compiled pass for a dtype, its signatures told, or None."""
    made = build.library("pass.c", f"BF16={int(dtype == torch.bfloat16)}")
    if made is None:
        return None
    made.scratch_bytes.restype = c_int64
    made.run_pass.restype = None
    for structure, which in ((Linear, 0), (Layer, 1), (Model, 2), (Pass, 3)):
        made.struct_bytes.restype = c_int64
        if made.struct_bytes(c_int64(which)) != ctypes.sizeof(structure):
            raise RuntimeError(f"{structure.__name__} is laid out otherwise in C")
    return made
