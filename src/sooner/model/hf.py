"""Any supported transformers causal LM behind the Model protocol. Knows nothing of requests or drafts.

The modelling code of transformers runs unmodified: its attention is replaced through the public
AttentionInterface / AttentionMaskInterface registries, and the plan of the pass travels as a keyword
of the forward call, down to our attention function. Nothing is stored on modules.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sooner.core.host import moved
from sooner.core.step import Step
from sooner.errors import ModelError, unknown
from sooner.model import attention
from sooner.model.frame import Tiles
from sooner.model.lanes import LaneCache, staged_parents
from sooner.model.protocol import Ends, Output

NAME = "sooner"

# Families whose attention goes through the registry and whose every row-to-row influence is in it.
# Each one is held to transformers' own eager passes by tests/model/test_hf.py.
FAMILIES = frozenset(
    {
        "arcee",
        "cohere",
        "cohere2",
        "ernie4_5",
        "exaone4",
        "gemma",
        "gemma2",
        "gemma3_text",
        "glm4",
        "gpt2",
        "gpt_neox",
        "granite",
        "helium",
        "hunyuan_v1_dense",
        "llama",
        "ministral",
        "mistral",
        "mixtral",
        "olmo",
        "olmo2",
        "olmo3",
        "opt",
        "phi",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "seed_oss",
        "smollm3",
        "starcoder2",
    }
)

# oneDNN multiplies a single bfloat16 row with another kernel than two or more, and rounds it otherwise
# (measured: K = 1536). A pass is padded to two rows, so that a row is the same alone and in company.
_TILES = Tiles(least=2)

# Keywords that reach an attention function and do not change what it has to compute.
_HARMLESS = frozenset(
    {
        "cache_position",
        "is_causal",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sooner_plan: attention.Plan | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Our attention as transformers calls it: query [1, H, N, D] -> ([1, N, H, D], None)."""
    asked = sorted(k for k, v in others.items() if v is not None and k not in _HARMLESS)
    if asked or attention_mask is not None or dropout:
        asked += ["attention_mask"] * (attention_mask is not None) + ["dropout"] * bool(dropout)
        raise ModelError(f"{type(module).__name__} asks attention for {', '.join(asked)}, which is not supported.")
    if sooner_plan is None:
        raise ModelError(
            f"{type(module).__name__} was run without the plan of a pass: attention 'sooner' runs through "
            "HFModel.forward only, and some families (gpt2, opt) hand the plan on from transformers 5.3 only."
        )
    layer = module.layer_idx
    if not isinstance(layer, int):
        raise ModelError(f"{type(module).__name__} does not say which layer it is.")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = attention.attend(
        sooner_plan, layer, query[0], key[0], value[0], scale=scale, window=sliding_window, softcap=softcap
    )
    return out[None], None


def _no_mask(*_args: Any, **_kwargs: Any) -> None:
    """The plan carries the mask."""


def register() -> None:
    """Make `attn_implementation="sooner"` known to transformers, whose modelling code is read in for it."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _no_mask)


def check_family(config: Any) -> None:
    """Raise ModelError, naming the family, if a model of this transformers config is not supported."""
    kind = str(config.model_type)
    if kind not in FAMILIES:
        raise ModelError("the target's " + unknown("model type", kind, FAMILIES))
    if getattr(config, "use_bidirectional_attention", False):
        raise ModelError(f"this {kind} model attends in both directions; only causal models can be served.")


def context_limit(config: Any) -> int | None:
    """Most positions the model is good for.

    Rotary embeddings that change with the longest text of the batch (dynamic, longrope) would make one
    request depend on another; below the original length they do not change, so that is the limit.
    """
    limit = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    for part in [rope, *(v for v in rope.values() if isinstance(v, dict))]:
        if part.get("rope_type") in ("dynamic", "longrope"):
            original = part.get("original_max_position_embeddings") or limit
            limit = min(limit, original) if limit else original
    return None if limit is None else int(limit)


class HFModel:
    """A loaded transformers causal LM. It must have been loaded with attn_implementation="sooner".

    Raises ModelError for a family or configuration that is not supported.
    """

    def __init__(self, module: Any) -> None:
        config = module.config
        check_family(config)
        self._module = module
        self._layers = int(config.num_hidden_layers)
        heads = int(config.num_attention_heads)
        self.vocab_size = int(module.get_output_embeddings().weight.shape[0])
        self.context_limit = context_limit(config)
        self.device = module.get_input_embeddings().weight.device
        self.lanes = LaneCache(
            self._layers,
            int(getattr(config, "num_key_value_heads", None) or heads),
            int(getattr(config, "head_dim", None) or config.hidden_size // heads),
            module.dtype,
            self.device,
        )

    def first_layers(self, count: int) -> HFModel:
        """The first `count` layers, the final norm and the head, on the same weights, with lanes of its own."""
        return HFModel(_first_layers(self._module, count))

    @torch.no_grad()
    def forward(self, step: Step, *, rows: Tensor, taps: Sequence[int] = ()) -> Output:
        """One pass; see Model.forward."""
        now = attention.plan(step, self.lanes, (), _TILES)
        count = len(step.tokens)
        result = self._module(
            input_ids=now.tokens[None],
            position_ids=now.positions[None],
            use_cache=False,
            logits_to_keep=moved(rows, self.device),
            output_hidden_states=bool(taps),
            sooner_plan=now,
        )
        for segment in step.segments:
            tokens = segment.certain + segment.draft.tokens
            self.lanes.stage(segment.lane, tokens, staged_parents(len(segment.certain), segment.draft.parents))
        features = torch.stack([result.hidden_states[tap][0, :count] for tap in taps], dim=1) if taps else None
        return Output(result.logits[0], features)

    def ends(self) -> Ends:
        """What draft heads share with this model."""
        head = self._module.get_output_embeddings()
        norm = getattr(getattr(self._module, "model", None), "norm", None)
        weight = None if norm is None else norm.weight.detach()
        if weight is not None and type(norm).__name__.startswith("Gemma"):
            weight = weight + 1
        embedding = self._module.get_input_embeddings().weight.detach()
        return Ends(embedding, weight, head, lambda: head.weight.detach())


def _first_layers(module: Any, count: int) -> Any:
    """A copy of `module` that shares its weights and has only the first `count` of its layers."""
    total = int(module.config.num_hidden_layers)
    lists = [n for n, m in module.named_modules() if isinstance(m, nn.ModuleList) and len(m) == total]
    config = copy.deepcopy(module.config)
    config.num_hidden_layers = count
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:count]
    *above, name = min(lists, key=len).split(".")
    top = inner = _shallow(module, config)
    for part in above:
        inner._modules[part] = _shallow(inner._modules[part], config)
        inner = inner._modules[part]
    inner._modules[name] = inner._modules[name][:count]
    return top


def _shallow(module: Any, config: Any) -> Any:
    """The same parameters and children in a module of its own, so that a child can be replaced in it alone."""
    new = copy.copy(module)
    new._modules = dict(module._modules)
    new.config = config
    return new
