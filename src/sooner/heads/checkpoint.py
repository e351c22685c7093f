"""EAGLE checkpoints: the official and the `speculators` layout, read with every check that files allow.

Knows no target. A head that is read with one setting wrong still drafts, only badly; so whatever the files
say twice is compared, and whatever they leave open in two ways is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sooner.errors import ModelError
from sooner.heads.eagle import EagleConfig, EagleHead, Rope

WEIGHTS, PICKLES = "model.safetensors", ("pytorch_model.bin", "pytorch_model.pt", "model.pt")

# Ours -> theirs; EAGLE-3 files say midlayer. for layers.0.; q, k, v and gate, up are joined on reading.
_PLAIN = {
    "fc.weight": "fc.weight",
    "fc.bias": "fc.bias",
    "out.weight": "layers.0.self_attn.o_proj.weight",
    "down.weight": "layers.0.mlp.down_proj.weight",
    "before_mlp.weight": "layers.0.post_attention_layernorm.weight",
    "token_norm.weight": "layers.0.input_layernorm.weight",
    "feature_norm.weight": "layers.0.hidden_norm.weight",
    "input_norm.weight": "input_norm.weight",
    "norm.weight": "norm.weight",
    "head.weight": "lm_head.weight",
}
_JOINED = {
    "qkv.weight": tuple(f"layers.0.self_attn.{x}_proj.weight" for x in "qkv"),
    "qkv.bias": tuple(f"layers.0.self_attn.{x}_proj.bias" for x in "qkv"),
    "gate_up.weight": tuple(f"layers.0.mlp.{x}_proj.weight" for x in ("gate", "up")),
}


@dataclass(frozen=True)
class Checkpoint:
    """A head as it lies in a folder.

    ids: int64 [draft_vocab], the target's id of each draft id; None where they are the same.
    embedding: [vocab, h] if the files bring their own. taps: the target's streams it wants, by the layer
    each of them enters; None = the convention of its version, see `taps_for`.
    """

    head: EagleHead
    ids: Tensor | None
    embedding: Tensor | None
    taps: tuple[int, ...] | None
    settings: Mapping[str, Any]

    def taps_for(self, layers: int) -> tuple[int, ...]:
        """The streams it wants of a target of so many layers. Raises ModelError if there are none such."""
        config = self.head.config
        if config.version == 1:
            return (layers,)
        taps = self.taps if self.taps is not None else (2, layers // 2, layers - 3)
        if len(taps) != config.streams:
            raise ModelError(f"the head fuses {config.streams} streams, but its layer ids are {list(taps)}.")
        if list(taps) != sorted(set(taps)) or not 0 <= taps[0] <= taps[-1] < layers:
            raise ModelError(
                f"the head wants the streams entering layers {list(taps)}; ids must rise, and be from 0 to "
                f"{layers - 1} in a target of {layers} layers. Is it a head for another target?"
            )
        return taps


def load(folder: str | Path, *, pickles: bool = False) -> Checkpoint:
    """Read a head. pickles: also read .bin and .pt files (tensors only, weights_only=True).

    Raises ModelError for whatever is missing, left over, of the wrong shape, contradictory or ambiguous.
    """
    path = Path(folder)
    settings = _settings(path)
    tensors = _renamed(_tensors(path, pickles))
    config, ids, taps = _read(settings, tensors)
    head = EagleHead(config)
    state = _joined(tensors)
    embedding = state.pop("embed_tokens.weight", None)
    _check_names(head, state, settings)
    _check_shapes({name: tuple(t.shape) for name, t in head.state_dict().items()}, state)
    head.load_state_dict(state)
    if embedding is not None and embedding.shape != (config.vocab, config.hidden):
        raise ModelError(f"embed_tokens is {list(embedding.shape)}, not {[config.vocab, config.hidden]}.")
    if embedding is None and config.version == 3 and config.hidden != config.target_hidden:
        raise ModelError(
            f"the head is {config.hidden} wide and its target {config.target_hidden}, so it cannot use the "
            "target's embedding; embed_tokens.weight is missing."
        )
    return Checkpoint(head.eval(), ids, embedding, taps, settings)


def save(
    folder: str | Path,
    head: EagleHead,
    *,
    ids: Tensor | None,
    taps: tuple[int, ...],
    notes: Mapping[str, Any],
) -> None:
    """Write an EAGLE-3 head in the official layout. notes: goes into config.json under "sooner"."""
    c, path = head.config, Path(folder)
    wide, narrow = c.heads * c.head_dim, c.kv_heads * c.head_dim
    sizes = {"qkv.weight": [wide, narrow, narrow], "qkv.bias": [wide, narrow, narrow]}
    tensors: dict[str, Tensor] = {}
    for name, tensor in head.state_dict().items():
        if name in _JOINED:
            parts = torch.split(tensor, sizes.get(name, c.intermediate))
            tensors |= {their: part.clone() for their, part in zip(_JOINED[name], parts, strict=True)}
        else:
            tensors[_PLAIN.get(name, name.replace("fc_norms.", "fc_norm."))] = tensor.clone()
    tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    if ids is not None:
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(c.vocab, dtype=torch.bool).index_fill_(0, ids, True)
    settings = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": c.hidden,
        "intermediate_size": c.intermediate,
        "num_hidden_layers": 1,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": c.act,
        "rms_norm_eps": c.eps,
        "rope_theta": c.rope.base,
        "vocab_size": c.vocab,
        "draft_vocab_size": c.draft_vocab,
        "target_hidden_size": c.target_hidden,
        "attention_bias": c.attention_bias,
        "tie_word_embeddings": False,
        "fc_norm": c.fc_norm,
        "norm_before_residual": c.norm_before_residual,
        "eagle_aux_hidden_state_layer_ids": list(taps),
        "sooner": dict(notes),
    }
    path.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "part.safetensors")
    (path / "part.safetensors").replace(path / WEIGHTS)
    (path / "config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _settings(path: Path) -> dict[str, Any]:
    """config.json, the `speculators` one flattened. Raises ModelError."""
    try:
        settings = json.loads((path / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is no EAGLE head: config.json cannot be read ({error}).") from error
    if not isinstance(settings, dict):
        raise ModelError(f"{path}/config.json is not an object.")
    kind = settings.get("speculators_model_type")
    if kind is None:
        return settings
    if kind != "eagle3":
        raise ModelError(f"{path} is a speculators model of type {kind!r}; only eagle3 is supported.")
    if "norm_before_residual" not in settings:
        # Readers of this layout disagree on what its absence means.
        raise ModelError(f"{path}/config.json does not say norm_before_residual; put true or false there.")
    inner = settings.get("transformer_layer_config")
    if not isinstance(inner, dict):
        raise ModelError(f"{path}/config.json has no transformer_layer_config.")
    return {
        "num_hidden_layers": 1,
        **inner,
        **{k: v for k, v in settings.items() if k != "transformer_layer_config"},
    }


def _tensors(path: Path, pickles: bool) -> dict[str, Tensor]:
    if (path / WEIGHTS).is_file():
        return dict(load_file(path / WEIGHTS))
    found = next((path / name for name in PICKLES if (path / name).is_file()), None)
    if found is None:
        raise ModelError(f"{path} holds no {WEIGHTS} (nor {', '.join(PICKLES)}).")
    if not pickles:
        raise ModelError(
            f"{found} is a pickle, which may run code when it is read. Convert it to safetensors, or allow it "
            "with allow_pickles=True; only tensors are read from it."
        )
    try:
        loaded = torch.load(found, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling raises what it likes
        raise ModelError(f"{found} cannot be read as tensors alone: {str(error).splitlines()[0]}") from error
    if not isinstance(loaded, dict) or not all(isinstance(t, Tensor) for t in loaded.values()):
        raise ModelError(f"{found} does not hold tensors by name.")
    return loaded


def _renamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names of either layout in one: layers.0. and fc_norm.{k}."""
    streams = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}
    renamed = {}
    for name, tensor in tensors.items():
        first, dot, rest = name.partition(".")
        first = {"midlayer": "layers.0", **streams}.get(first, first)
        renamed[f"{first}{dot}{rest}"] = tensor
    if len(renamed) != len(tensors):
        raise ModelError("the head's tensors name the same weight twice (midlayer. and layers.0.).")
    return renamed


def _read(
    settings: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[EagleConfig, Tensor | None, tuple[int, ...] | None]:
    """What the files say together: shapes from the tensors, switches from the settings."""
    if "fc.weight" not in tensors:
        raise ModelError("the head has no fc.weight: it is no EAGLE head, or one without fusion (not supported).")
    if settings.get("num_hidden_layers", 1) != 1:
        raise ModelError(f"an EAGLE head has 1 layer here, config.json says {settings['num_hidden_layers']}.")
    third = "layers.0.hidden_norm.weight" in tensors or "d2t" in tensors or "draft_vocab_size" in settings
    hidden, fused = tensors["fc.weight"].shape
    _same("hidden_size", settings, hidden, "fc.weight")
    target_hidden = int(settings.get("target_hidden_size") or hidden)
    streams, rest = divmod(fused if third else fused - hidden, target_hidden)
    if rest or not streams or (not third and streams != 1):
        raise ModelError(
            f"fc.weight reads {fused} numbers; with streams of {target_hidden} (target_hidden_size) "
            f"{'that is no whole number of streams' if third else f'EAGLE-1 reads {hidden + target_hidden}'}."
        )
    shape = _attention_shape(settings, tensors, hidden)
    ids = _draft_ids(settings, tensors) if third else None
    vocab = _number(settings, "vocab_size")
    config = EagleConfig(
        version=3 if third else 1,
        hidden=hidden,
        intermediate=int(_tensor(tensors, "layers.0.mlp.down_proj.weight").shape[1]),
        vocab=vocab,
        draft_vocab=vocab if ids is None else len(ids),
        target_hidden=target_hidden,
        streams=streams,
        rope=_rope(settings),
        eps=float(settings.get("rms_norm_eps", 1e-6)),
        act=str(settings.get("hidden_act", "silu")),
        bias=_switch(settings, "bias", "fc.bias" in tensors, default=not third),
        attention_bias=_switch(settings, "attention_bias", "layers.0.self_attn.q_proj.bias" in tensors),
        fc_norm=_switch(settings, "fc_norm", "fc_norm.0.weight" in tensors, default=None),
        norm_before_fc=_switch(settings, "norm_before_fc", "input_norm.weight" in tensors, default=None),
        norm_before_residual=bool(settings.get("norm_before_residual", False)) and third,
        norm_output=_norm_output(settings),
        **shape,
    )
    _same("intermediate_size", settings, config.intermediate, "down_proj")
    return config, ids, _taps(settings)


def _attention_shape(settings: Mapping[str, Any], tensors: Mapping[str, Tensor], hidden: int) -> dict[str, int]:
    heads = _number(settings, "num_attention_heads")
    kv_heads = int(settings.get("num_key_value_heads") or heads)
    wide = _tensor(tensors, "layers.0.self_attn.q_proj.weight").shape[0]
    narrow = _tensor(tensors, "layers.0.self_attn.k_proj.weight").shape[0]
    dim = wide // heads
    # The official trainer ignores head_dim, so the tensors decide; but they must be one or the other.
    if dim not in (settings.get("head_dim"), hidden // heads) or (dim * heads, dim * kv_heads) != (wide, narrow):
        raise ModelError(
            f"q_proj has {wide} rows and k_proj {narrow}, which does not fit {heads} heads, {kv_heads} key heads "
            f"and head_dim {settings.get('head_dim', hidden // heads)} of config.json."
        )
    return {"heads": heads, "kv_heads": kv_heads, "head_dim": dim}


def _draft_ids(settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Tensor | None:
    """The target's id of each draft id. `d2t` holds offsets: id = d + d2t[d]."""
    vocab = _number(settings, "vocab_size")
    rows = int(_tensor(tensors, "lm_head.weight").shape[0])
    _same("draft_vocab_size", settings, rows, "lm_head.weight")
    offsets, marks = tensors.get("d2t"), tensors.get("t2d")
    if offsets is None:
        if rows != vocab:
            raise ModelError(f"lm_head.weight has {rows} rows for a vocabulary of {vocab}, but d2t is missing.")
        return None
    if offsets.shape != (rows,) or offsets.is_floating_point():
        raise ModelError(f"d2t must be {rows} whole numbers, one a row of lm_head.weight.")
    offsets = offsets.long()
    ids = offsets + torch.arange(rows)
    if bool((offsets < 0).any()) or bool((offsets.diff() < 0).any()) or int(ids[-1]) >= vocab:
        raise ModelError(
            f"d2t must hold offsets (target id minus draft id) that never fall, with ids below {vocab}; "
            "it does not. Are they ids instead of offsets?"
        )
    if marks is not None:
        if marks.shape != (vocab,) or int(marks.bool().sum()) != rows:
            raise ModelError(f"t2d must mark {rows} of {vocab} ids; it marks {int(marks.bool().sum())}.")
        if not torch.equal(marks.bool().nonzero()[:, 0], ids):
            raise ModelError("t2d marks other ids than d2t leads to.")
    return ids


def _rope(settings: Mapping[str, Any]) -> Rope:
    """The head's own rotary base: 10000 where it names none, whatever the target's is."""
    given = settings.get("rope_parameters") or {}
    scaling = given or settings.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    base = given.get("rope_theta") or settings.get("rope_theta") or 10000.0
    if kind == "default":
        return Rope(float(base))
    plain = Rope(float(base), kind, float(scaling.get("factor", 1.0)))
    if kind != "llama3":
        return plain
    low, high = (float(scaling.get(f"{x}_freq_factor", y)) for x, y in (("low", 1.0), ("high", 4.0)))
    return replace(plain, low=low, high=high, original=int(scaling.get("original_max_position_embeddings", 8192)))


def _taps(settings: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Layers whose entering stream is wanted. Nested in eagle_config the ids are of layers *left*, one less."""
    plain = settings.get("eagle_aux_hidden_state_layer_ids")
    nested = (settings.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if plain is not None and nested is not None and list(plain) != [i + 1 for i in nested]:
        raise ModelError(
            f"config.json lists layer ids {plain} (streams entering) and, in eagle_config, {nested} (streams "
            "leaving, one less each); they do not agree."
        )
    if plain is not None:
        return tuple(int(i) for i in plain)
    return None if nested is None else tuple(int(i) + 1 for i in nested)


def _norm_output(settings: Mapping[str, Any]) -> bool:
    if settings.get("norm_output") and "speculators_model_type" not in settings:
        # One program means "feed back the normed state" by it, another "norm before the LM head", which is always.
        raise ModelError(
            "norm_output in an official config is ambiguous; remove it, or use the speculators layout."
        )
    return bool(settings.get("norm_output", False))


def _switch(settings: Mapping[str, Any], name: str, present: bool, default: bool | None = False) -> bool:
    """A switch whose tensors are there or not; both must say the same. default None: the tensors decide."""
    said = settings.get(name, default)
    if said is not None and bool(said) != present:
        whose = "says" if name in settings else "leaves out"
        raise ModelError(
            f"config.json {whose} {name} ({bool(said)}), but its tensors are {'there' if present else 'missing'}; "
            f"put {name}: {str(present).lower()} there if the file is whole."
        )
    return present


def _same(name: str, settings: Mapping[str, Any], shape: int, tensor: str) -> None:
    if settings.get(name) is not None and settings[name] != shape:
        raise ModelError(f"config.json says {name} {settings[name]}, but {tensor} says {shape}.")


def _number(settings: Mapping[str, Any], name: str) -> int:
    value = settings.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json of the head needs {name}, a whole number above 0; it has {value!r}.")
    return value


def _tensor(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise ModelError(f"the head lacks {name}.")
    return tensors[name]


def _joined(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by our names; what is not known keeps its own."""
    left = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    state: dict[str, Tensor] = {}
    for ours, theirs in _JOINED.items():
        if all(name in left for name in theirs):
            state[ours] = torch.cat([left.pop(name) for name in theirs])
    for ours, their in _PLAIN.items():
        if their in left:
            state[ours] = left.pop(their)
    return state | {name.replace("fc_norm.", "fc_norms."): tensor for name, tensor in left.items()}


def _check_names(head: EagleHead, state: Mapping[str, Tensor], settings: Mapping[str, Any]) -> None:
    wanted = set(head.state_dict())
    missing = sorted(_theirs(name) for name in wanted - set(state))
    unused = sorted(_theirs(name) for name in set(state) - wanted)
    if missing or unused:
        what = [f"missing: {', '.join(missing)}"] * bool(missing) + [f"not used: {', '.join(unused)}"] * bool(
            unused
        )
        raise ModelError(f"the tensors do not fit an EAGLE-{head.config.version} head; {'; '.join(what)}.")


def _check_shapes(wanted: Mapping[str, tuple[int, ...]], state: Mapping[str, Tensor]) -> None:
    for name, tensor in state.items():
        if tuple(tensor.shape) != wanted[name]:
            raise ModelError(f"{_theirs(name)} is {list(tensor.shape)}, not {list(wanted[name])}.")


def _theirs(name: str) -> str:
    if name in _JOINED:
        return " / ".join(_JOINED[name])
    return _PLAIN.get(name, name.replace("fc_norms.", "fc_norm."))
