"""sooner: the same text, sooner. Speculative decoding that is exact by construction.

>>> import sooner
>>> llm = sooner.LLM("smollm2-135m")  # doctest: +SKIP
>>> print(llm.chat("What is a key-value cache?").text)  # doctest: +SKIP
"""

from sooner.config import Budget, EngineConfig
from sooner.core.tree import Draft
from sooner.draft.protocol import Context, Drafter, Outcome
from sooner.engine.logprobs import TokenLogprob
from sooner.engine.stats import Acceptance
from sooner.errors import ConfigError, DraftError, ModelError, RequestError, SoonerError
from sooner.llm import LLM, Chunk, Result
from sooner.params import SamplingParams

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
    "TokenLogprob",
]
