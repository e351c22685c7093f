"""lm-evaluation-harness on sooner: the model type "sooner". Knows no tasks and no scores.

    pip install lm_eval
    python -m sooner.integrations.lm_eval run --model sooner --model_args pretrained=MODEL,draft=auto --tasks TASK

is the harness's own command line with this type beside its own; in Python, import this file and ask for "sooner".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor

from sooner.integrations.output import CallStats
from sooner.integrations.transformers import generate

_OURS = ("k", "rule", "seed")


class Stops:
    """Ends each row by itself, once its new text holds a stop string; the harness cuts the text there.

    Its own criterion answers for the batch as a whole and counts on seeing all of it; ours is asked row by row.
    transformers' stop strings would also match what began in the prompt, which the harness does not.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str], prompt: int) -> None:
        self._tokenizer, self._stop, self._prompt = tokenizer, tuple(stop), prompt
        self._tail = 2 + max(len(one.encode()) for one in stop)  # a token is a byte at least

    def __call__(self, ids: Tensor, _scores: Any, **_: Any) -> Tensor:
        texts = self._tokenizer.batch_decode(ids[:, self._prompt :][:, -self._tail :])
        return torch.tensor([any(one in text for one in self._stop) for text in texts], device=ids.device)


@register_model("sooner")
class SoonerLM(HFLM):  # type: ignore[misc]  # the harness has no types
    """The harness's own transformers model; only the writing of texts goes through sooner.generate.

    draft, runtime, k, rule, seed: as there. Log-likelihoods are passes of the model itself, as before.
    stats: what each call did.
    """

    def __init__(self, *, draft: str = "auto", runtime: str = "auto", **options: Any) -> None:
        said = {name: options.pop(name) for name in _OURS if name in options}
        self._ours = {"custom_generate": generate, "draft": draft, "runtime": runtime, **said}
        self.stats: list[CallStats] = []
        super().__init__(**options)

    def _model_generate(self, context: Tensor, max_length: int, stop: Sequence[str], **asked: Any) -> Tensor:
        if not asked.get("temperature"):
            asked.pop("temperature", None)
            asked.setdefault("do_sample", False)
        kept = self.mixed_precision_dtype
        with torch.autocast(device_type=self.device.type, dtype=kept, enabled=kept is not None):
            written: Tensor = self.model.generate(
                context,
                max_length=max_length,
                stopping_criteria=[Stops(self.tokenizer, stop, context.shape[1])] if stop else None,
                pad_token_id=self.tokenizer.pad_token_id,
                **self._ours,
                **asked,
            )
        self.stats.append(written.sooner_stats)  # type: ignore[attr-defined]  # ours puts it there
        return written


if __name__ == "__main__":
    cli_evaluate()
