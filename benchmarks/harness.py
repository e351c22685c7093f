"""lm-evaluation-harness on sooner: do small local tasks score the same with and without speculation?

    pip install lm_eval                       # 0.4.13 was used
    python benchmarks/harness.py [--model smollm2-135m] [--dtype float32] [--batch 4]

The tasks lie in harness_tasks/ beside this file: one writes texts, one compares log-likelihoods. They run with the
harness's own transformers model and with ours, for each draft. Last line JSON; exit status 1 if a score or a text
differs from draft "none", or, in float32, from transformers'. (In narrower types its kernels round otherwise.)
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from sooner.integrations.lm_eval import SoonerLM
from sooner.measure.report import machine
from sooner.model.load import resolve

TASKS = {"sooner_copy": "exact_match,strip", "sooner_choose": "acc,none"}
FOLDER = Path(__file__).parent / "harness_tasks"


def evaluate(model: HFLM) -> dict[str, Any]:
    """The score of every task, and what was answered to each question."""
    manager = TaskManager(include_path=str(FOLDER), include_defaults=False)
    found = lm_eval.simple_evaluate(
        model=model, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0, log_samples=True
    )
    scores = {task: float(found["results"][task][metric]) for task, metric in TASKS.items()}
    answers = {task: [sample["resps"] for sample in found["samples"][task]] for task in TASKS}
    return {"scores": scores, "answers": answers}


def tokens_per_step(model: SoonerLM) -> float:
    """Emitted / steps over all texts; 1 says that no guess was accepted."""
    totals = [one.total for one in model.stats]
    return sum(total.emitted for total in totals) / max(sum(total.steps for total in totals), 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--drafts", nargs="*", default=["lookup", "auto"])
    asked = parser.parse_args()
    options = {
        "pretrained": str(Path(resolve(asked.model)).absolute()),
        "dtype": asked.dtype,
        "batch_size": asked.batch,
        "device": "cpu",
    }
    os.chdir(FOLDER)  # a task names its data beside itself
    runs = {"transformers": evaluate(HFLM(**options))}
    rates: dict[str, float] = {}
    for draft in ("none", *asked.drafts):
        model = SoonerLM(**options, draft=draft)
        runs[draft] = evaluate(model)
        rates[draft] = tokens_per_step(model)
    held = [name for name in runs if name != "transformers" or asked.dtype == "float32"]
    report: dict[str, Any] = {}
    for name, run in runs.items():
        same = {
            task: sum(a == b for a, b in zip(run["answers"][task], runs["none"]["answers"][task], strict=True))
            for task in TASKS
        }
        report[name] = {task: {"score": run["scores"][task], "same": same[task]} for task in TASKS}
        for task in TASKS:
            count = len(run["answers"][task])
            print(f"{name:14} {task:14} {run['scores'][task]:.4f}  {same[task]} of {count} answers as with none")
    for draft, rate in rates.items():
        print(f"{draft:14} {rate:.2f} tokens per step")
    passed = all(runs[name] == runs["none"] for name in held)
    settings = {"model": asked.model, "dtype": asked.dtype, "batch": asked.batch, "lm_eval": lm_eval.__version__}
    print(
        json.dumps({"passed": passed, "runs": report, "tokens_per_step": rates, **settings, "machine": machine()})
    )
    return int(not passed)


if __name__ == "__main__":
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    sys.exit(main())
