"""How much memory the drop-in takes beside transformers' own generate, and whether calls leave any behind.

    python benchmarks/transformers_memory.py [--rows 8] [--prompt 200] [--tokens 16] [--quick]

Each way runs in a process of its own: the model is loaded, then a thread samples the process's own memory
(RssAnon) during one call; then come 1,000 short calls (--quick: 60), and growth is memory after the last less that
after a tenth of them. Held to: the peak of transformers' generate plus our lanes (its own keys and values are in
its peak), and growth of at most 1 % of the peak. Last line JSON; exit status 1 if a limit is not kept.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import sooner
from memory import Sampler, resident
from sooner.measure.report import machine
from sooner.model.lanes import LaneCache
from sooner.model.load import resolve

WAYS: dict[str, dict[str, Any]] = {
    "transformers": {},
    "none": {"custom_generate": sooner.generate, "draft": "none"},
    "lookup": {"custom_generate": sooner.generate, "draft": "lookup"},
    "auto": {"custom_generate": sooner.generate},
}
GROWTH = 0.01
MB = 2**20


def child(asked: argparse.Namespace) -> dict[str, float]:
    """One way, in this process; in MB."""
    torch.set_num_threads(1)
    dtype = getattr(torch, asked.dtype)
    model = AutoModelForCausalLM.from_pretrained(resolve(asked.model), dtype=dtype).eval()
    seeded = torch.Generator().manual_seed(0)

    def call(rows: int, prompt: int, tokens: int) -> None:
        ids = torch.randint(5, model.config.vocab_size - 100, (rows, prompt), generator=seeded)
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
            **WAYS[asked.way],
        )

    before = resident()
    with Sampler() as sampler:
        call(asked.rows, asked.prompt, asked.tokens)
    after = []
    for _ in range(asked.calls):
        call(1, 8, 2)
        after.append(resident())
    config = model.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    lanes = LaneCache(config.num_hidden_layers, config.num_key_value_heads, width, dtype)
    return {
        "loaded_mb": before,
        "peak_mb": sampler.peak,
        "lanes_mb": lanes.bytes_for(asked.rows, asked.prompt + asked.tokens) / MB,
        "growth_mb": after[-1] - after[len(after) // 10],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--calls", type=int, default=1_000)
    parser.add_argument("--quick", action="store_true", help="60 calls")
    parser.add_argument("--way", choices=WAYS, help="measure one way in this process")
    asked = parser.parse_args()
    if asked.quick:
        asked.calls = 60
    if asked.way is not None:
        print(json.dumps(child(asked)))
        return 0
    sizes = [
        f"--{name}={getattr(asked, name)}" for name in ("model", "dtype", "rows", "prompt", "tokens", "calls")
    ]
    found: dict[str, Any] = {}
    for way in WAYS:
        again = [sys.executable, __file__, *sizes, "--way", way]
        written = subprocess.run(again, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True, text=True)
        found[way] = json.loads(written.stdout.splitlines()[-1])
    limit = found["transformers"]["peak_mb"] + found["none"]["lanes_mb"]
    print(f"{'':14}{'loaded':>8}{'peak':>8}{'limit':>8}{'growth over ' + str(asked.calls) + ' calls':>26}   (MB)")
    for way, one in found.items():
        one["limit_mb"] = limit
        print(f"{way:14}{one['loaded_mb']:8.0f}{one['peak_mb']:8.0f}{limit:8.0f}{one['growth_mb']:26.1f}")
    ours = [one for way, one in found.items() if way != "transformers"]
    passed = {
        "peak": all(one["peak_mb"] <= limit for one in ours),
        "growth": all(one["growth_mb"] <= GROWTH * one["peak_mb"] for one in ours),
    }
    print(json.dumps({"passed": passed, "ways": found, "machine": machine()} | vars(asked)))
    return int(not all(passed.values()))


if __name__ == "__main__":
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    sys.exit(main())
