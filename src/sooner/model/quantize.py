"""Weights of a linear map at fewer bits, and torch's CPU kernels for them. Knows no model.

int8: one scale an output, weight = code * scale. int4: for every 32 inputs of an output a scale and a middle,
weight = (code - 8) * scale + middle; a file in GGUF's Q4_1 comes out as it went in. Scales are bfloat16
numbers whatever the kernel, so that every kernel multiplies the same weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sooner.errors import ConfigError, unknown

KINDS = ("int4", "int8")
GROUP = 32  # inputs that share a scale in int4
_PANEL = 16  # outputs the int4 kernel takes at a time
_TOP = 2**15 - 1
_SLICE = 1024  # outputs quantised at a time: bounds what the search needs beside the weights
# int4 tries the whole range of a group, and narrower ones that clip its ends: what errs least is kept.
_RANGES = (1.0, 0.95, 0.9, 0.85, 0.8)


@dataclass(frozen=True, slots=True)
class Int8:
    """codes: int8 [out, in]. scale: float32 [out]."""

    codes: Tensor
    scale: Tensor

    def dense(self) -> Tensor:
        """The weights these stand for, float32 [out, in]."""
        return self.codes * self.scale[:, None]


@dataclass(frozen=True, slots=True)
class Int4:
    """codes: uint8 [out, in], 0 to 15. scale, middle: float32 [out, in / GROUP]."""

    codes: Tensor
    scale: Tensor
    middle: Tensor

    def dense(self) -> Tensor:
        """The weights these stand for, float32 [out, in]."""
        grouped = self.codes.view(len(self.codes), -1, GROUP).float() - 8
        return (grouped * self.scale[..., None] + self.middle[..., None]).view(self.codes.shape)


@dataclass(frozen=True, slots=True)
class Int8Linear:
    """x [N, in] -> [N, out], weights int8. A row's bits do not depend on N (tests/model/test_quantize.py)."""

    codes: Tensor
    scale: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.aten._weight_int8pack_mm(x.contiguous(), self.codes, self.scale)
        return out if self.bias is None else out + self.bias


@dataclass(frozen=True, slots=True)
class Int4Linear:
    """x [N, in] -> [N, out], weights int4. A row's bits do not depend on N (tests/model/test_quantize.py)."""

    packed: Tensor
    scale_and_middle: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x.contiguous(), self.packed, GROUP, self.scale_and_middle
        )
        return out if self.bias is None else out + self.bias


def check(kind: str, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ConfigError, saying what is allowed, unless weights can be quantised so on this device."""
    if kind not in KINDS:
        raise ConfigError(unknown("quantize", kind, KINDS))
    if device.type != "cpu":
        raise ConfigError(
            f"quantize {kind} runs on the CPU only, not on {device}; use device cpu, or leave it out."
        )
    if dtype not in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        raise ConfigError(f"quantize {kind} works with dtype float32 and bfloat16, not {name}.")


def to_int8(weight: Tensor) -> Int8:
    """Round [out, in] to 255 steps an output."""
    scale = _rounded(weight.float().abs().amax(1) / 127)
    codes = torch.empty(weight.shape, dtype=torch.int8)
    for start in range(0, len(weight), _SLICE):
        part = slice(start, start + _SLICE)
        codes[part] = (weight[part].float() / scale[part, None]).round_().clamp_(-127, 127)
    return Int8(codes, scale)


def to_int4(weight: Tensor) -> Int4:
    """Round [out, in], `in` a multiple of GROUP, to 16 steps a group."""
    rows, inputs = weight.shape
    codes = torch.empty((rows, inputs), dtype=torch.uint8)
    scale, middle = (torch.empty((rows, inputs // GROUP)) for _ in range(2))
    for start in range(0, rows, _SLICE):
        part = slice(start, start + _SLICE)
        found = _best(weight[part].float().view(-1, inputs // GROUP, GROUP))
        codes[part] = found[0].view(-1, inputs)
        scale[part], middle[part] = found[1], found[2]
    return Int4(codes, scale, middle)


def fits_int4(out: int, inputs: int) -> bool:
    """Whether int4 can hold a weight of this shape."""
    return out % _PANEL == 0 and inputs % GROUP == 0


def linear(kind: str, weight: Tensor, bias: Tensor | None) -> Int8Linear | Int4Linear:
    """A linear map at fewer bits; shapes that int4 cannot hold are kept in int8."""
    if kind == "int4" and fits_int4(*weight.shape):
        small = to_int4(weight)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(small.codes.int(), 1)
        pairs = torch.stack([small.scale.t(), small.middle.t()], dim=-1).to(weight.dtype)
        return Int4Linear(packed, pairs.contiguous(), bias)
    eight = to_int8(weight)
    return Int8Linear(eight.codes, eight.scale.to(weight.dtype), bias)


def _rounded(scale: Tensor) -> Tensor:
    """As a bfloat16 number, and never 0: a row of zeros needs some scale. What is not finite stays so."""
    rounded = scale.bfloat16().float()
    return torch.where(rounded == 0, torch.ones_like(rounded), rounded)


def _best(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and middles of float32 [rows, groups, GROUP]: of all ranges the one that errs least."""
    low, high = groups.amin(-1), groups.amax(-1)
    tried = []
    for part in _RANGES:
        step = ((high - low) * (part / 15)).bfloat16().float()
        middle = ((low + high + step) / 2).bfloat16().float()  # codes reach 8 steps down and 7 up
        scale = _rounded(step)
        off = (_codes(groups, scale, middle) - 8) * scale[..., None] + middle[..., None] - groups
        tried.append(torch.stack([off.square().sum(-1), scale, middle]))
    found = torch.stack(tried)  # [ranges, (error, scale, middle), rows, groups]
    chosen = found[:, 0].argmin(0)[None, None].expand(1, 3, *low.shape)
    _, scale, middle = found.gather(0, chosen)[0]
    return _codes(groups, scale, middle), scale, middle


def _codes(groups: Tensor, scale: Tensor, middle: Tensor) -> Tensor:
    return ((groups - middle[..., None]) / scale[..., None]).round_().add_(8).clamp_(0, 15)


@dataclass(frozen=True, slots=True)
class Panels:
    """Weights as native/quantized.h reads them. top: the largest whole number a row may be rounded to there."""

    codes: Tensor
    scale: Tensor | None
    bits: int
    top: float


def panels(kind: str, weight: Tensor) -> Panels:
    """Pack [out, in], `out` a multiple of 16, for the C kernels; shapes that int4 cannot hold are kept in int8."""
    out, inputs = weight.shape
    if kind == "int4" and fits_int4(out, inputs):
        four = to_int4(weight)
        split = four.codes.view(out // _PANEL, _PANEL, -1, GROUP // 8, 2, 4).permute(0, 2, 3, 4, 1, 5)
        both = (split[:, :, :, 0] | split[:, :, :, 1] << 4).reshape(out // _PANEL, inputs // GROUP, -1)
        pairs = torch.stack([four.scale, four.middle], dim=-1).bfloat16().view(out // _PANEL, _PANEL, -1, 2)
        scales = pairs.transpose(1, 2).reshape(out // _PANEL, inputs // GROUP, -1).view(torch.uint8)
        return Panels(torch.cat([both, scales], dim=-1), None, 4, float(_TOP))
    eight = to_int8(weight)
    codes = eight.codes.view(out // _PANEL, _PANEL, inputs // 2, 2).transpose(1, 2).contiguous()
    largest = int(eight.codes.abs().sum(1, dtype=torch.int64).max())
    return Panels(codes, eight.scale, 8, float(min(_TOP, (2**31 - 1) // max(largest, 1))))
