"""Numbers between the host and the device, so that the host waits for the device as seldom as can be.

Knows no law and no model. On a CPU nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def moved(numbers: Tensor, device: torch.device) -> Tensor:
    """Numbers of the host on the device. A GPU fetches them by itself, after what it was told before; torch gives
    their memory to nobody else until then."""
    if device.type == "cpu" or not numbers.is_cpu:
        return numbers.to(device)
    return numbers.pin_memory().to(device, non_blocking=True)


def sent(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The same of a list."""
    return moved(torch.tensor(values, dtype=dtype), device)


def fetched(*tensors: Tensor) -> list[Tensor]:
    """The same tensors on the host, in one copy that waits for the device once.

    They travel as float64: whole numbers below 2**53, narrower floats and truth values come through unchanged.
    """
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return list(tensors)
    return _parted(_joined(tensors).cpu(), tensors)


def coming(*tensors: Tensor) -> Callable[[], list[Tensor]]:
    """As fetched, but on its way at once: whoever calls after a later wait for the device does not wait."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return lambda: list(tensors)
    flat = _joined(tensors)
    there = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
    there.copy_(flat, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch
    arrived.record(torch.cuda.current_stream(flat.device))

    def read() -> list[Tensor]:
        arrived.synchronize()
        return _parted(there, tensors)

    return read


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten().double() for tensor in tensors])


def _parted(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape).to(tensor.dtype) for part, tensor in zip(parts, tensors, strict=True)]
