"""sooner: the same text, sooner. Speculative decoding that is exact by construction.

>>> import sooner
>>> llm = sooner.LLM("smollm2-135m")  # doctest: +SKIP
>>> print(llm.chat("What is a key-value cache?").text)  # doctest: +SKIP
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sooner.config import Budget, EngineConfig
    from sooner.core.tree import Draft
    from sooner.draft.protocol import Context, Drafter, Outcome
    from sooner.engine.logprobs import TokenLogprob
    from sooner.engine.stats import Acceptance
    from sooner.errors import ConfigError, DraftError, ModelError, RequestError, SoonerError
    from sooner.integrations.transformers import generate, generate_batch
    from sooner.llm import LLM, Chunk, Result
    from sooner.params import SamplingParams
    from sooner.structured import StructuredOutputs

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "Acceptance",
    "Budget",
    "Chunk",
    "ConfigError",
    "Context",
    "Draft",
    "DraftError",
    "Drafter",
    "EngineConfig",
    "ModelError",
    "Outcome",
    "RequestError",
    "Result",
    "SamplingParams",
    "SoonerError",
    "StructuredOutputs",
    "TokenLogprob",
    "generate",
    "generate_batch",
]

# A name is imported when it is first used: importing torch takes seconds, and `sooner --help` needs none of it.
_HOMES = {
    "sooner.config": ("Budget", "EngineConfig"),
    "sooner.core.tree": ("Draft",),
    "sooner.draft.protocol": ("Context", "Drafter", "Outcome"),
    "sooner.engine.logprobs": ("TokenLogprob",),
    "sooner.engine.stats": ("Acceptance",),
    "sooner.errors": ("ConfigError", "DraftError", "ModelError", "RequestError", "SoonerError"),
    "sooner.integrations.transformers": ("generate", "generate_batch"),
    "sooner.llm": ("LLM", "Chunk", "Result"),
    "sooner.params": ("SamplingParams",),
    "sooner.structured": ("StructuredOutputs",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'sooner' has no attribute {name!r}")
    value: object = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
