"""A pretended GPU: tensors that say they are on one, so that waits for it are counted without having it.

Whatever a GPU's host would have to wait for is counted: numbers read back, indices and tables sent from memory
that is not pinned. An operation on tensors of both sides raises, as it would there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_any, tree_map

CUDA = torch.device("cuda")
_READ = {
    "tolist",
    "item",
    "cpu",
    "numpy",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__contains__",
    "equal",
}
_SIZED = {"nonzero", "masked_select", "unique", "argwhere"}  # their shape depends on numbers
_MAKES = {"tensor", "as_tensor", "new_tensor"}
_MIXES = {"__getitem__", "__setitem__", "copy_", "to", "empty_like"}  # take both sides, or say where to
_PLACES = {  # what a tensor says of where it lies: on the host, on the device
    Tensor.device.__get__: (torch.device("cpu"), CUDA),  # type: ignore[attr-defined]  # a descriptor
    Tensor.is_cpu.__get__: (True, False),  # type: ignore[attr-defined]  # a descriptor
    Tensor.is_cuda.__get__: (False, True),  # type: ignore[attr-defined]  # a descriptor
}


class OnDevice(torch.Tensor):
    """Numbers that lie on the pretended GPU."""


class Pinned(torch.Tensor):
    """Numbers of the host that a GPU can fetch by itself."""


def on_device(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(OnDevice)


class PretendedGpu(TorchFunctionMode):
    """Counts waits, by what caused them."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        first = args[0] if args else None
        for place, answer in _PLACES.items():
            if func == place:
                return answer[isinstance(first, OnDevice)]
        if name == "pin_memory":
            return _plain(first).as_subclass(Pinned)
        there = tree_any(lambda x: isinstance(x, OnDevice), (args, kwargs))
        if name == "to":
            return self._moved(first, args[1:], kwargs)
        if there and name in _READ:
            self.waits.append(name)
            return func(*tree_map(_plain, args), **tree_map(_plain, kwargs))
        self._check(name, first, args, kwargs, there)
        if kwargs.get("device") == CUDA:
            there = True
            kwargs["device"] = torch.device("cpu")
            self.waits += [name] * (name in _MAKES)
        pinned = kwargs.pop("pin_memory", False)
        bare = tree_map(_plain, args)
        result = func(*bare, **tree_map(_plain, kwargs))
        if bare and result is bare[0]:  # as x.float() of float32 is x, or an operation in place
            return first
        kind = OnDevice if there else Pinned if pinned else None
        return tree_map(lambda x: x.as_subclass(kind) if type(x) is Tensor else x, result) if kind else result

    def _check(self, name: str, first: Any, args: Any, kwargs: Any, there: bool) -> None:
        if not there:
            return
        if name in _SIZED or (name == "new_tensor"):
            self.waits.append(name)
        here = tree_any(
            lambda x: isinstance(x, Tensor) and not isinstance(x, OnDevice) and x.dim(), (args, kwargs)
        )
        if name in ("__getitem__", "__setitem__"):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            listed = any(
                isinstance(i, list) or (isinstance(i, Tensor) and not isinstance(i, OnDevice)) for i in index
            )
            masked = any(isinstance(i, Tensor) and i.dtype == torch.bool for i in index)
            self.waits += [name] * (listed or masked)
        elif name == "copy_":
            from_host = not isinstance(args[1], OnDevice)
            free = kwargs.get("non_blocking") and isinstance(args[1] if from_host else first, Pinned)
            self.waits += [name] * (here and not free)
        elif here and name not in _MIXES:
            raise RuntimeError(f"{name} of tensors on two devices")

    def _moved(self, first: Any, places: Any, kwargs: Any) -> Tensor:
        """tensor.to(...)"""
        targets = [*places, *kwargs.values()]
        goal = CUDA if isinstance(first, OnDevice) else torch.device("cpu")
        for target in targets:
            if isinstance(target, torch.device | str):
                goal = torch.device(target)
            elif isinstance(target, Tensor):
                goal = CUDA if isinstance(target, OnDevice) else torch.device("cpu")
        crosses = (goal.type == "cuda") != isinstance(first, OnDevice)
        free = kwargs.get("non_blocking") and isinstance(first, Pinned)
        self.waits += ["to"] * (crosses and not free)
        dtypes = [t.dtype if isinstance(t, Tensor) else t for t in targets if isinstance(t, torch.dtype | Tensor)]
        moved = _plain(first).to(dtypes[0]) if dtypes else _plain(first)
        if crosses or kwargs.get("copy"):
            moved = moved.clone()
        return moved.as_subclass(OnDevice) if goal.type == "cuda" else moved


def _plain(x: Any) -> Any:
    return x.as_subclass(torch.Tensor) if isinstance(x, Tensor) else x


@contextmanager
def pretended_gpu(patch: pytest.MonkeyPatch) -> Iterator[PretendedGpu]:
    """Inside, tensors made by `on_device` or for the device "cuda" lie on a GPU."""
    event = SimpleNamespace(record=lambda stream: None, synchronize=lambda: None)
    patch.setattr(torch.cuda, "Event", lambda: event)
    patch.setattr(torch.cuda, "current_stream", lambda device: None)
    with PretendedGpu() as gpu:
        yield gpu
