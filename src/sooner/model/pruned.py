"""A copy of a model with some of its layers left out, trainable, and saved as an ordinary transformers folder.

Knows transformers' names of layers; knows nothing of text and of training.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from sooner.errors import ConfigError, ModelError
from sooner.model.load import load_tokenizer, resolve

_LAYER = re.compile(r"(?P<before>.*\b(?:layers|h|blocks)\.)(?P<layer>\d+)(?P<after>\..*)")
# Settings with one entry a layer, and those that say from which layer on something holds.
_LISTS = ("layer_types", "no_rope_layers", "mlp_only_layers")


def spread(total: int, count: int) -> list[int]:
    """`count` of `total` layers at even distances, the first and the last among them."""
    if not 1 <= count < total:
        raise ConfigError(f"layers must be from 1 to {total - 1}, got {count}: the target has {total}.")
    return [0] if count == 1 else [round(i * (total - 1) / (count - 1)) for i in range(count)]


class Pruned:
    """Some layers of the model `name`, in the type of `place` and where it is.

    Embedding and LM head stay as they are; the layers and the final norm are what is trained.
    Raises ModelError for models whose layers cannot be told apart.
    """

    def __init__(self, name: str, count: int, place: Tensor) -> None:
        source = resolve(name)
        self._name = name
        config: Any = AutoConfig.from_pretrained(source)
        kept = spread(int(config.num_hidden_layers), count)
        read: Any = AutoModelForCausalLM.from_pretrained(source, dtype=place.dtype)
        whole, self._generation = read.state_dict(), read.generation_config
        for listed in _LISTS:
            values = getattr(config, listed, None)
            if isinstance(values, list) and len(values) == config.num_hidden_layers:
                setattr(config, listed, [values[layer] for layer in kept])
        config.num_hidden_layers = count
        self.layers = tuple(kept)
        self.module: nn.Module = AutoModelForCausalLM.from_config(
            config, dtype=place.dtype, attn_implementation="sdpa"
        )
        missing = self.module.load_state_dict(_chosen(whole, kept), strict=False)
        if missing.unexpected_keys or [n for n in missing.missing_keys if "lm_head" not in n]:
            raise ModelError(f"{name} cannot be pruned: its layers are named in a way that is not known.")
        self.module.to(place.device)
        self._freeze()

    def states(self, tokens: Tensor) -> Tensor:
        """What the LM head reads after each token: [B, T] -> [B, T, H]."""
        body: Any = self.module.get_submodule(str(getattr(self.module, "base_model_prefix", "model")))
        found: Tensor = body(input_ids=tokens, use_cache=False).last_hidden_state
        return found

    def save(self, folder: Path, notes: Mapping[str, Any]) -> None:
        """Weights, config (notes under "sooner") and tokenizer."""
        module: Any = self.module
        tensors: dict[str, Tensor] = {}
        for key, tensor in module.state_dict().items():
            if tensor.data_ptr() not in {t.data_ptr() for t in tensors.values()}:  # a tied weight is written once
                tensors[key] = tensor
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "part.safetensors", metadata={"format": "pt"})
        (folder / "part.safetensors").replace(folder / "model.safetensors")
        module.config.sooner = dict(notes) | {"layers": list(self.layers)}
        module.config.save_pretrained(folder)
        if self._generation is not None:
            self._generation.save_pretrained(folder)
        load_tokenizer(self._name).save_pretrained(folder)

    def _freeze(self) -> None:
        module: Any = self.module
        for part in (module.get_input_embeddings(), module.get_output_embeddings()):
            for parameter in part.parameters():
                parameter.requires_grad_(False)


def _chosen(whole: Mapping[str, Tensor], kept: Sequence[int]) -> dict[str, Tensor]:
    """Tensors of the layers that stay, numbered anew, and all that belong to no layer."""
    places = {layer: place for place, layer in enumerate(kept)}
    chosen: dict[str, Tensor] = {}
    for name, tensor in whole.items():
        found = _LAYER.fullmatch(name)
        if found is None:
            chosen[name] = tensor
        elif int(found["layer"]) in places:
            chosen[f"{found['before']}{places[int(found['layer'])]}{found['after']}"] = tensor
    return chosen
