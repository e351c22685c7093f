"""How much memory decoding takes, and whether it grows; measures no speed.

    python benchmarks/memory.py             # 20,000 tokens, some minutes
    python benchmarks/memory.py --quick     # 2,000 tokens

Texts of several requests at a time are written, one batch after the other, while a thread samples the memory
that is the process's own (RssAnon: what cannot be given back to files). From the first token on its peak is held
to 1.15 x the weights + the lanes of keys and values + 300 MB for interpreter, libraries and working memory.
Resident memory with the files of libraries that are mapped in (VmHWM) is reported beside it: other processes
share those, and the system drops them at need. Growth is the memory at the end without what lanes take of it,
less that after a quarter of the tokens. Last line JSON; exit status 1 if the peak is above its limit or memory
grows by more than 1 % of that.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from sooner import LLM, SamplingParams
from sooner.errors import SoonerError
from sooner.measure.prompts import PROMPTS
from sooner.measure.report import machine
from sooner.model.load import load, resolve
from sooner.model.pull import DEFAULT_MODEL

MB = 2**20
FACTOR, REST_MB = 1.15, 300
GROWTH = 0.01  # of the limit; what allocators keep back moves by as much
TEXT = 125  # tokens of one text
PAGE = mmap.PAGESIZE
STATUS, PAGES = Path("/proc/self/status"), Path("/proc/self/pagemap")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit status."""
    options = _options(arguments)
    try:
        return _run(options)
    except SoonerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    imported = resident()
    target = load(options.model, dtype=options.dtype, threads=options.threads)
    llm = LLM(target, options.draft)
    loaded = resident()
    forget_peak()
    with Sampler() as sampler:
        after = [decode(llm, options.batch, start) for start in range(0, options.tokens, options.batch * TEXT)]
    store = target.model.lanes.store
    lanes = lanes_mb(llm)
    weights = weights_mb(options.model, store.element_size())
    limit = FACTOR * weights + lanes + REST_MB
    found = {
        "imported_mb": imported,
        "loaded_mb": loaded,
        "peak_mb": sampler.peak,
        "limit_mb": limit,
        "weights_mb": weights,
        "lanes_mb": lanes,
        "growth_mb": after[-1] - after[len(after) // 4],
        "growth_limit_mb": GROWTH * limit,
        "peak_with_files_mb": resident("VmHWM"),
    }
    passed = {"peak": sampler.peak <= limit, "growth": found["growth_mb"] <= GROWTH * limit}
    _print_table(found, passed)
    settings = {"model": options.model, "draft": options.draft, "batch": options.batch}
    rounded = {name: round(value, 1) for name, value in found.items()}
    tokens = len(after) * options.batch * TEXT
    summary = {**rounded, "tokens": tokens, "passed": passed, "dtype": str(store.dtype)[6:], **settings}
    print(json.dumps({**summary, "machine": machine()}))
    return int(not all(passed.values()))


class Sampler:
    """The largest RssAnon seen between entering and leaving, in MB: the system keeps no peak of it."""

    def __init__(self) -> None:
        self.peak = 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._done.wait(0.005):
            self.peak = max(self.peak, resident())


def decode(llm: LLM, batch: int, start: int) -> float:
    """Write one batch of texts, each after a prompt of its own; memory afterwards without the lanes, in MB."""
    prompts = [
        llm.encode_chat(f"{start + i}. {PROMPTS[(start + i) % len(PROMPTS)].turns[0]}") for i in range(batch)
    ]
    llm.generate(prompts, SamplingParams(max_tokens=TEXT, ignore_eos=True))
    return resident() - touched_mb(llm)


def touched_mb(llm: LLM) -> float:
    """What of the lanes is resident: pages that were never written take no memory."""
    store = llm.target.model.lanes.store
    first = store.data_ptr() // PAGE
    end = -(-(store.data_ptr() + store.numel() * store.element_size()) // PAGE)
    with PAGES.open("rb") as entries:
        entries.seek(first * 8)
        pages = entries.read((end - first) * 8)
    return sum(byte >> 7 for byte in pages[7::8]) * PAGE / MB  # the top bit of an entry: the page is present


def lanes_mb(llm: LLM) -> float:
    """What keys and values have room for; it follows the longest text and the most requests at once."""
    store = llm.target.model.lanes.store
    return store.numel() * store.element_size() / MB


def weights_mb(model: str, width: int) -> float:
    """The parameters of a model in MB, each `width` bytes wide; shared ones count once."""
    from transformers import AutoConfig, AutoModelForCausalLM  # only now: decoding does without this code

    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(resolve(model)))
    return sum(parameter.numel() for parameter in module.parameters()) * width / MB


def resident(field: str = "RssAnon") -> float:
    """The process's own memory now, or VmHWM: the peak of all that was resident since `forget_peak`. In MB."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) / 1024


def forget_peak() -> None:
    """Begin a new peak at what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def _print_table(found: dict[str, float], passed: dict[str, bool]) -> None:
    table = Table(caption="limit = 1.15 x weights + lanes + 300 MB", caption_justify="left")
    table.add_column("")
    table.add_column("MB", justify="right")
    for name, value in found.items():
        table.add_row(name.removesuffix("_mb").replace("_", " "), f"{value:.1f}")
    console = Console(width=80)
    console.print(table)
    for name, well in passed.items():
        console.print(f"{name}: {'within' if well else 'ABOVE'} its limit")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the memory of decoding, and its growth.")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--draft", default="lookup")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--batch", type=int, default=8, help="texts at a time")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--quick", action="store_true", help="2,000 tokens")
    options = parser.parse_args(arguments)
    if options.quick:
        options.tokens = 2_000
    return options


if __name__ == "__main__":
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    sys.exit(main())
