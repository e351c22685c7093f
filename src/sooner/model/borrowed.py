"""A caller's own transformers model behind the Model protocol, untouched. Knows nothing of requests or drafts.

The modules are mirrored: new module objects around the *same* parameters and buffers, with copies of the
configuration that name our attention. The caller's objects are only read, so there is nothing to put back
after an exception or Ctrl-C, and the caller may use the model between (and during) our passes.
"""

from __future__ import annotations

import copy
import types
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from sooner.errors import ConfigError, ModelError, unknown
from sooner.model import decoder, hf, native
from sooner.model.fused import FusedModel
from sooner.model.hf import HFModel
from sooner.model.native import NativeModel

RUNTIMES = ("auto", "native", "hf", "packed", "fused")
_PLAIN = ("transformers.models.", "transformers.activations", "torch.nn.modules.activation")
_TORCH = (nn.Linear, nn.Embedding, nn.ModuleList, nn.Dropout)


def borrow(module: Any, runtime: str = "auto") -> HFModel | FusedModel | NativeModel:
    """A Model on the weights of `module`, whatever attention that was loaded with. Raises ModelError.

    runtime: "native" runs our own decoder in C on the weights where they lie, "hf" the modules, "auto" the first
    of these that serves here. "packed" and "fused" run our own decoders on a copy of the weights, packed for the
    device.
    """
    if runtime not in RUNTIMES:
        raise ConfigError(unknown("runtime", runtime, RUNTIMES))
    check_model(module)
    obstacle = None if runtime == "hf" else _obstacle(module, runtime)
    if obstacle is not None and runtime != "auto":
        raise ModelError(f"runtime {runtime} {obstacle}")
    hf.register()
    model = _made(module, "hf" if obstacle is not None else runtime)
    model.context_limit = _limit(module.config)
    return model


def _made(module: Any, runtime: str) -> HFModel | FusedModel | NativeModel:
    if runtime == "hf":
        return HFModel(mirror(module))
    if runtime == "fused":
        return FusedModel(mirror(module))
    return NativeModel(mirror(module)) if runtime == "packed" else NativeModel(module, borrow=True)


def mirror(module: Any) -> Any:
    """The same tree of modules around the same tensors, set to our attention."""
    configs: dict[int, Any] = {}
    made: dict[int, nn.Module] = {}
    for part in module.modules():
        made[id(part)] = _shell(part, configs)
    for part in module.modules():
        twin = made[id(part)]
        twin.__dict__["_modules"] = {
            name: None if child is None else made[id(child)] for name, child in part._modules.items()
        }
    return made[id(module)]


def check_model(module: Any) -> None:
    """Raise ModelError for a family, a placement or a state that is not supported."""
    hf.check_family(module.config)
    devices = sorted({str(tensor.device) for tensor in module.parameters()})
    if len(devices) > 1 or "meta" in devices:
        raise ModelError(
            f"the model's weights lie on {', '.join(devices)}; they must all be on one device. "
            'Load it with device_map="cuda:0" (or "cpu"), without offloading.'
        )
    active = (p for p in module.modules() if isinstance(p, nn.Dropout) and p.training and p.p > 0)
    if next(active, None) is not None:
        raise ModelError("the model is in training mode and has dropout: its text is random. Call model.eval().")


def _obstacle(module: Any, runtime: str) -> str | None:
    """Why our own decoders cannot take the place of the modules, or None. They read weights, so every module must
    be what its family has, its weights plain and of one dtype, and nothing may hook into it."""
    kind = str(module.config.model_type)
    if kind not in decoder.FAMILIES:
        return "is for other families: " + unknown("model type", kind, decoder.FAMILIES)
    if decoder.scaled_elsewhere(module):
        return (
            "does not see where this version of transformers scales embeddings; use runtime hf, or 5.4 and later."
        )
    for name, part in module.named_modules():
        changed = _changed(part)
        if changed is not None:
            return f"cannot follow {changed}{type(part).__name__} ({name}); use runtime hf."
    if len({eps for part in module.modules() if (eps := _eps(part)) is not None}) > 1:
        return "needs norms that add the same epsilon; use runtime hf."
    if torch.is_autocast_enabled(next(module.parameters()).device.type):
        return "computes in the weights' own dtype, but autocast is on; use runtime hf."
    weights = {(type(weight), weight.dtype) for weight in module.parameters()}
    if len(weights) != 1 or {kind for kind, _ in weights} != {nn.Parameter}:
        return "needs weights of one dtype, plain ones; use runtime hf."
    if runtime != "fused" and not native.serves(module):
        return "cannot run this model on this machine; use runtime hf."
    return None


def _changed(part: nn.Module) -> str | None:
    """In what way a module is not what its family has, or None: the word before its name."""
    if part._forward_hooks or part._forward_pre_hooks or _own_forward(part) is not None:
        return "a hooked "
    forward = type(part).forward.__module__
    if type(part) in _TORCH:
        return None if forward.startswith("torch.nn.modules.") else "a patched "
    if not type(part).__module__.startswith(_PLAIN):
        return ""
    return None if forward.startswith(_PLAIN) else "a patched "


def _own_forward(part: nn.Module) -> Any:
    """What stands on a module in place of its class's forward, or None; a compiled one is what it was made of."""
    forward = part.__dict__.get("forward")
    forward = getattr(forward, "_torchdynamo_orig_callable", forward)
    if isinstance(forward, types.MethodType) and forward.__self__ is part:
        return None if forward.__func__ is type(part).forward else forward
    return forward


def _eps(part: nn.Module) -> float | None:
    return getattr(part, "variance_epsilon", getattr(part, "eps", None))


def _shell(part: nn.Module, configs: dict[int, Any]) -> nn.Module:
    """A module of the same class with the same attributes, its own dictionaries and our configuration."""
    twin = type(part).__new__(type(part))
    own = dict(part.__dict__)
    own["_parameters"], own["_buffers"] = dict(part._parameters), dict(part._buffers)
    for name, value in part.__dict__.items():
        if isinstance(value, PreTrainedConfig):
            if id(value) not in configs:
                configs[id(value)] = _ours(value)
            own[name] = configs[id(value)]
    if "forward" in own:
        _rebind(part, twin, own)
    twin.__dict__.update(own)
    return twin


def _ours(config: Any) -> Any:
    """A copy of a configuration that names our attention."""
    clone = copy.copy(config)
    clone.__dict__["_attn_implementation_internal"] = hf.NAME
    if clone._attn_implementation != hf.NAME:
        raise ModelError("this version of transformers keeps the attention of a model in another place.")
    return clone


def _rebind(part: nn.Module, twin: nn.Module, own: dict[str, Any]) -> None:
    """A forward that was put on the module itself must run on the twin, or it would run the caller's attention."""
    forward = _own_forward(part)
    if forward is None:
        del own["forward"]
        return
    if "_hf_hook" in own and "_old_forward" in own:  # accelerate's: it only moves inputs, and all is on one device
        forward = own.pop("_old_forward")
        own.pop("_hf_hook")
    if isinstance(forward, types.MethodType) and forward.__self__ is part:
        own["forward"] = types.MethodType(forward.__func__, twin)
        return
    raise ModelError(
        f"the forward of a {type(part).__name__} was replaced by {type(forward).__name__} "
        f"{getattr(forward, '__name__', forward)!r}, which cannot be followed. Undo that, or patch the class."
    )


def _limit(config: Any) -> int | None:
    """Rotations go on beyond the trained length, as in transformers' generate; learned positions do not, and
    neither may rotations that change with the length of the text."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {part.get("rope_type", "default") for part in [rope, *rope.values()] if isinstance(part, dict)}
    fixed = bool(rope) and not kinds & {"dynamic", "longrope"}
    return None if fixed else hf.context_limit(config)
