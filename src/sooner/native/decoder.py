"""Python's side of decoder.h: its structures, weights in panels, memory for a call. Knows no model and no head."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from sooner.native.arena import Arena
from sooner.native.pages import Pages

LANES = 16  # outputs in a panel; every inner size is a multiple of it
_SLICE = 4096  # outputs that are laid out at a time: bounds what packing takes beside the panels


class Linear(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("w", "bias", "scale")),
        *((name, c_int64) for name in ("units", "out")),
        ("bits", c_int32),
        ("top", c_float),
        ("part", c_void_p * 3),
        ("until", c_int64 * 3),
    ]


class Layer(Structure):
    _fields_ = [
        *((name, Linear) for name in ("qkv", "o", "gate_up", "down")),
        *((name, c_void_p) for name in ("before_attention", "after_attention", "before_mlp", "after_mlp")),
        *((name, c_void_p) for name in ("q_norm", "k_norm")),
        *((name, c_int64) for name in ("norm_all", "table", "window")),
        *((name, c_float) for name in ("scale", "softcap")),
    ]


class Model(Structure):
    _fields_ = [
        *(
            (n, c_int64)
            for n in ("layers", "hidden", "heads", "kv_heads", "dim", "inner", "vocab", "gelu", "rotary")
        ),
        *((name, c_float) for name in ("eps", "embed_scale")),
        *((name, c_void_p) for name in ("embed", "norm")),
        ("head", Linear),
        ("layer", POINTER(Layer)),
    ]


class Pass(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("rows", "segments", "wanted", "taps", "angles", "threads")),
        *((name, c_void_p) for name in ("token", "position", "column", "lane", "parent")),
        *((name, c_void_p) for name in ("offset", "row", "tap", "angle", "cos", "sin", "store")),
        *((name, c_int64) for name in ("lanes", "capacity")),
        *((name, c_void_p) for name in ("logits", "features", "scratch")),
    ]


class Panels(Protocol):
    """Weights at fewer bits, as quantized.h reads them. scale: float32 of each output, or None where it lies with
    the codes; top: the largest whole number that rows may be rounded to."""

    @property
    def codes(self) -> Tensor: ...
    @property
    def scale(self) -> Tensor | None: ...
    @property
    def bits(self) -> int: ...
    @property
    def top(self) -> float: ...


class Packer:
    """Lays weights out as the C code reads them, and keeps alive what its structures point to."""

    def __init__(self) -> None:
        self.arena = Arena()
        self.kept: list[Tensor] = []

    def keep(self, tensor: Tensor) -> int:
        """The address of the tensor's numbers, one after another."""
        self.kept.append(tensor.contiguous())
        return self.kept[-1].data_ptr()

    def linear(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Linear:
        """Weights [out, in] in panels of 16 outputs, units of 32 bits: [out / 16, units, 16]."""
        out, inputs = weight.shape
        units = inputs * dtype.itemsize // 4
        panels = self.arena.take(-(-out // LANES) * LANES * units).view(-1, units, LANES)
        for start in range(0, out, _SLICE):
            rows = whole_panels(weight[start : start + _SLICE].to(dtype)).view(torch.int32)
            first = start // LANES
            panels[first : first + len(rows) // LANES] = rows.view(-1, LANES, units).transpose(1, 2)
        return Linear(self.keep(panels), None if bias is None else self.keep(bias.float()), None, units, out)

    def fewer(self, panels: Panels, bias: Tensor | None, shape: tuple[int, int], dtype: torch.dtype) -> Linear:
        """The same of weights at fewer bits. shape: [out, in]; dtype: of the rows."""
        codes = self.arena.take(panels.codes.numel() // 4)
        codes.copy_(panels.codes.view(-1).view(torch.int32))
        scale = None if panels.scale is None else self.keep(panels.scale)
        units = shape[1] * dtype.itemsize // 4
        bias_at = None if bias is None else self.keep(bias.float())
        return Linear(self.keep(codes), bias_at, scale, units, shape[0], panels.bits, panels.top)


class Room:
    """Scratch memory that grows, in pages of its own: an allocator keeps what a large buffer leaves behind."""

    def __init__(self) -> None:
        self._pages = torch.zeros(0, dtype=torch.uint8)

    def at(self, size: int) -> int:
        """The address of `size` bytes, 64-byte aligned, that hold anything."""
        if size + 64 > len(self._pages):
            self._pages = Pages((2 * (size + 64),), torch.uint8).tensor
        return -(-self._pages.data_ptr() // 64) * 64


def whole_panels(weight: Tensor) -> Tensor:
    """[out, in] in one piece, `out` filled up to whole panels."""
    missing = -len(weight) % LANES
    return (pad(weight, (0, 0, 0, missing)) if missing else weight).contiguous()


def in_turn(stacked: Tensor, inner: int) -> Tensor:
    """Gate rows then up rows -> 16 of gate, 16 of up, 16 of gate, ..."""
    return stacked.view(2, inner // LANES, LANES, *stacked.shape[1:]).transpose(0, 1).reshape(stacked.shape)
