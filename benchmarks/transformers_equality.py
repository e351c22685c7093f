"""Does the drop-in write the tokens of transformers' own greedy generate, in a batch? Measures no speed.

    python benchmarks/transformers_equality.py DATA.jsonl [--tokens 32] [--dtype float32]

DATA: rows with "turns". Eight prompts of 1 to 500 tokens, cut from the rows and padded on the left. Every drafter
is told to guess in every step. For each row that parts from transformers' the margin of the logits there is shown.
The last line is JSON; exit status 1 if a row differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import sooner
from sooner.model.load import load_tokenizer, resolve

LENGTHS = (1, 500, 37, 260, 4, 128, 411, 9)


def prompts(path: Path, tokenizer: Any) -> dict[str, torch.Tensor]:
    """One batch, padded on the left."""
    rows = [json.loads(line)["turns"][0] for line in path.read_text().splitlines()]
    texts = [" ".join(rows[i :: len(LENGTHS)]) for i in range(len(LENGTHS))]
    ids = torch.full((len(LENGTHS), max(LENGTHS)), tokenizer.eos_token_id)
    mask = torch.zeros_like(ids)
    for r, (text, length) in enumerate(zip(texts, LENGTHS, strict=True)):
        ids[r, -length:] = torch.tensor(tokenizer(text)["input_ids"][:length])
        mask[r, -length:] = 1
    return {"input_ids": ids, "attention_mask": mask}


def parting(
    model: Any, inputs: dict[str, torch.Tensor], r: int, plain: list[int], ours: list[int]
) -> dict[str, Any]:
    """Where a row parts, and how far transformers' own logits of the two tokens are apart there."""
    at = next(i for i, (a, b) in enumerate(zip(plain, ours, strict=True)) if a != b)
    kept = inputs["input_ids"][r][inputs["attention_mask"][r].bool()].tolist()
    with torch.no_grad():
        logits = model(torch.tensor([[*kept, *plain[:at]]])).logits[0, -1].float()
    return {"row": r, "position": at, "margin": float(logits[plain[at]] - logits[ours[at]])}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--dtype", default="float32")
    asked = parser.parse_args()
    tokenizer = load_tokenizer(asked.model)
    model = AutoModelForCausalLM.from_pretrained(resolve(asked.model), dtype=getattr(torch, asked.dtype)).eval()
    inputs = prompts(asked.data, tokenizer)
    width = max(LENGTHS)
    keywords = {"max_new_tokens": asked.tokens, "do_sample": False, "pad_token_id": tokenizer.eos_token_id}
    ways: dict[str, dict[str, Any]] = {
        "none": {"draft": "none"},
        "auto": {"k": 8},
        "lookup": {"draft": "lookup", "k": 8},
        "recycle": {"draft": "recycle", "k": 8},
        "model": {"assistant_model": model, "num_assistant_tokens": 4},
        "auto, its modules": {"k": 8, "runtime": "hf"},
    }
    plain = model.generate(**inputs, **keywords)[:, width:].tolist()
    report = {}
    for name, way in ways.items():
        out = sooner.generate(model, **inputs, **keywords, **way)
        rows = out[:, width:].tolist()
        parted = [
            parting(model, inputs, r, a, b) for r, (a, b) in enumerate(zip(plain, rows, strict=True)) if a != b
        ]
        same, passes = len(rows) - len(parted), out.sooner_stats.passes
        report[name] = {"equal": same, "parted": parted, "passes": passes}
        print(f"{name:20} {same} of {len(rows)} rows, {passes} passes {parted or ''}")
    print(json.dumps({"model": asked.model, "dtype": asked.dtype, "tokens": asked.tokens, "ways": report}))
    return int(any(one["parted"] for one in report.values()))


if __name__ == "__main__":
    sys.exit(main())
