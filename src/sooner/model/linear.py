"""A linear map ready for the device: weights packed once where a kernel wants that. Knows no model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from sooner.model import quantize as fewer

_PACKED_FOR = 16  # rows the packing is tuned for; any number of rows runs


class Linear(Protocol):
    """x [N, in] -> x @ weight.T + bias, [N, out]; a row's bits do not depend on N where the dtype allows it."""

    def __call__(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Dense:
    """Weights as they are. `packed`: the weight is in oneDNN's own layout."""

    weight: Tensor
    bias: Tensor | None
    packed: bool

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed:
            # A single row goes through another kernel than several and rounds otherwise (measured: in = 1536).
            rows = x.repeat(2, 1) if len(x) == 1 else x
            out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.weight, self.bias, "none", [], "")
            return out[: len(x)]
        return linear(x, self.weight, self.bias)


def pack(weights: list[Tensor], biases: list[Tensor | None], quantize: str | None = None) -> Linear:
    """One linear map of several with the same input, stacked by output. weights: [out, in] each.

    bfloat16 on CPU is packed where oneDNN has kernels for this processor (AVX-512 at least): plain weights are
    laid out anew on every call. quantize: a kind of quantize.KINDS.
    """
    weight = torch.cat([w.detach() for w in weights]) if len(weights) > 1 else weights[0].detach()
    given = [b.detach() for b in biases if b is not None]
    bias = torch.cat(given) if given else None
    if quantize is not None:
        return fewer.linear(quantize, weight, bias)
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not _packs():
        return Dense(weight, bias, packed=False)
    return Dense(torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR), bias, packed=True)


def _packs() -> bool:
    """Whether oneDNN multiplies bfloat16 on this processor; it packs nothing for others, but raises."""
    return torch._C._has_mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
