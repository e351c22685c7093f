"""lm-evaluation-harness on sooner: a model type, and a small local task scored with and without speculation.

    pip install lm-eval                     # 0.4.13 was used
    python examples/lm_eval_sooner.py [MODEL]

In your own code import this file and ask for `--model sooner --model_args pretrained=MODEL,draft=lookup`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

import sooner
from sooner.model.load import resolve


@register_model("sooner")
class SoonerLM(HFLM):
    """The harness's own transformers model; only the writing of texts goes through sooner.generate."""

    def __init__(self, *, draft: str = "auto", runtime: str = "hf", **options: Any) -> None:
        super().__init__(**options)
        self._ours = {"custom_generate": sooner.generate, "draft": draft, "runtime": runtime}

    def _model_generate(self, context: Any, max_length: int, stop: list[str], **asked: Any) -> Any:
        if not asked.get("temperature"):
            asked.pop("temperature", None)
            asked.setdefault("do_sample", False)
        # The harness's stop criterion counts on seeing the whole batch; transformers' own is asked row by row.
        return self.model.generate(
            context,
            max_length=max_length,
            stop_strings=stop or None,
            tokenizer=self.tokenizer,
            pad_token_id=self.tokenizer.pad_token_id,
            **self._ours,
            **asked,
        )


def task(folder: Path) -> dict[str, Any]:
    """Copying a word out of a sentence: easy enough for a small model to get some right and some wrong."""
    words = ["river", "lantern", "orange", "copper", "window", "garden", "violin", "anchor"]
    rows = [
        {"question": f"Word: {word}\nThe word again: {word}\nWord: {other}\nThe word again:", "answer": other}
        for word, other in zip(words, reversed(words), strict=True)
    ]
    (folder / "copy.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {
        "task": "copy",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "copy.jsonl")}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 24, "do_sample": False},
        "filter_list": [
            {"name": "strip", "filter": [{"function": "remove_whitespace"}, {"function": "take_first"}]}
        ],
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }


def score(model: HFLM, config: dict[str, Any]) -> tuple[float, list[Any]]:
    found = lm_eval.simple_evaluate(model=model, tasks=[config], bootstrap_iters=0, log_samples=True)
    results = found["results"]["copy"]
    value = next(v for k, v in results.items() if k.startswith("exact_match,"))
    return float(value), [sample["resps"] for sample in found["samples"]["copy"]]


def main() -> None:
    name = resolve(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m")
    options = {"pretrained": name, "dtype": "float32", "batch_size": 4, "device": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        config = task(Path(folder))
        plain = score(HFLM(**options), config)
        for draft in ("none", "lookup"):
            ours = score(SoonerLM(**options, draft=draft), config)
            print(f"draft {draft}: exact match {ours[0]:.4f}, transformers {plain[0]:.4f}")
            same = sum(a == b for a, b in zip(ours[1], plain[1], strict=True))
            print(f"  {same} of {len(plain[1])} texts equal")


if __name__ == "__main__":
    main()
