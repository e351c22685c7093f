"""What one pass costs, by rows and context: ours, `hf`, transformers' own, and what no pass can be faster than.

    python benchmarks/pass_cost.py [--quick] [--model M] [--threads 2] [--repeat 9]

For the default model and a random Llama shape of 1.1 billion weights, bfloat16: milliseconds of our fastest
runtime, of `hf`, of transformers' eager forward with its cache, of the products alone (the same kernels), and of
reading the weights once at the bandwidth measured in the same run. All are interleaved; medians.
--quick: the default model and 256 tokens of context alone. Last line: JSON.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig

from sooner.core.step import Segment, Step, pack
from sooner.core.tree import chain
from sooner.model import hf, load, native
from sooner.model.fused import FusedModel
from sooner.model.protocol import Model
from sooner.native.decoder import Pass

ROWS = (1, 2, 4, 8, 16, 32)
BIG = LlamaConfig(
    num_hidden_layers=22, hidden_size=2048, num_attention_heads=32, num_key_value_heads=4,
    intermediate_size=5632, vocab_size=32000, max_position_embeddings=4096,
)  # fmt: skip


def median_ms(work: Callable[[], Any], seconds: list[float]) -> None:
    began = time.perf_counter()
    work()
    seconds.append((time.perf_counter() - began) * 1e3)


def made(name: str, attention: str) -> Any:
    """The module of a model, bfloat16; "1.1B" has random weights."""
    if name == "1.1B":
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(
                copy.deepcopy(BIG), attn_implementation=attention, dtype=torch.bfloat16
            )
        module = module.to_empty(device="cpu").eval()
        for parameter in module.parameters():
            parameter.data.normal_(std=0.02) if parameter.dim() > 1 else parameter.data.fill_(1.0)
        module.model.rotary_emb = type(module.model.rotary_emb)(BIG)
        return module
    source = load.resolve(name)
    return AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, attn_implementation=attention).eval()


def ours(name: str) -> Model:
    module = made(name, hf.NAME)
    return native.NativeModel(module) if native.serves(module) else FusedModel(module)


def text(count: int) -> list[int]:
    return [(i * 7919 + 13) % 31_000 for i in range(count)]


def on_lanes(model: Model, context: int, rows: int) -> Callable[[], Any]:
    """A pass of `rows` rows after `context` settled tokens."""
    words = text(context + rows)
    step: Step = pack([Segment(0, context, (words[context],), chain(words[context + 1 :]))])
    return lambda: model.forward(step, rows=step.law_rows)


def fill(model: Model, context: int) -> None:
    if not model.lanes.in_use:
        model.lanes.open()
    model.lanes.settle(0, [])
    for start in range(0, context, 512):
        step = pack([Segment(0, start, tuple(text(context)[start : start + 512]), law=False)])
        model.forward(step, rows=step.law_rows)
        model.lanes.settle(0, text(context)[: start + 512])


class Transformers:
    """transformers' eager forward with its own cache, cut back after every pass."""

    def __init__(self, name: str) -> None:
        self._module = made(name, "eager")
        self._cache: Any = None
        self._context = 0

    @torch.no_grad()
    def fill(self, context: int) -> None:
        out = self._module(torch.tensor([text(context)]), use_cache=True, logits_to_keep=1)
        self._cache, self._context = out.past_key_values, context

    @torch.no_grad()
    def run(self, rows: int) -> None:
        words = text(self._context + rows)[self._context :]
        self._module(torch.tensor([words]), past_key_values=self._cache, use_cache=True)
        self._cache.crop(-rows)


def products(model: Model, context: int, rows: int) -> Callable[[], Any] | None:
    """The products of such a pass alone, or None where there are no kernels of ours."""
    if not isinstance(model, native.NativeModel):
        return None
    logits = torch.empty((rows, model.vocab_size))
    now = Pass(rows=rows, segments=1, wanted=rows, threads=torch.get_num_threads(), logits=logits.data_ptr())
    now.capacity = model.lanes.capacity
    on_lanes(model, context, rows)()  # so that the scratch memory is there and holds numbers
    now.scratch = model._room.at(0)
    return lambda: (model._library.run_products(ctypes.byref(model._model), ctypes.byref(now)), logits)


def reader(size: int) -> Callable[[], Any] | None:
    """Reads `size` bytes once, as fast as this machine can with these threads."""
    library = native._library(torch.bfloat16)
    if library is None:
        return None
    library.read_all.restype = ctypes.c_float
    data = torch.ones(size // 128 * 32)
    address, count, threads = data.data_ptr(), size // 128 * 128, torch.get_num_threads()
    return lambda: (
        library.read_all(ctypes.c_void_p(address), ctypes.c_int64(count), ctypes.c_int64(threads)), data
    )  # fmt: skip


def weights(name: str) -> int:
    """Bytes a pass reads: every parameter once, tied embeddings once, no embedding table besides."""
    module = made(name, "eager")
    tied = module.get_output_embeddings().weight is module.model.embed_tokens.weight
    table = 0 if tied else module.model.embed_tokens.weight.numel()
    return 2 * (sum(p.numel() for p in module.parameters()) - table)


def measure(name: str, contexts: list[int], repeat: int, figures: dict[str, float], console: Console) -> None:
    size = weights(name)
    mine, plain = ours(name), Transformers(name)
    theirs = hf.HFModel(made(name, hf.NAME))
    read = reader(size)
    for context in contexts:
        fill(mine, context)
        fill(theirs, context)
        plain.fill(context)
        table = Table(title=f"{name}, {size / 1e6:.0f} MB of weights, {context} tokens of context: ms a pass")
        columns = ("ours", "products", "reading", "hf", "transformers")
        for column in ("rows", *columns):
            table.add_column(column, justify="right")
        for rows in ROWS:
            works: dict[str, Callable[[], Any] | None] = {
                "ours": on_lanes(mine, context, rows), "products": products(mine, context, rows), "reading": read,
                "hf": on_lanes(theirs, context, rows), "transformers": partial(plain.run, rows),
            }  # fmt: skip
            times: dict[str, list[float]] = {column: [] for column in columns}
            for _ in range(repeat + 2):
                for column, work in works.items():
                    if work is not None:
                        median_ms(work, times[column])
            median = {c: statistics.median(t[2:]) for c, t in times.items() if t}
            table.add_row(str(rows), *(f"{median[c]:.2f}" if c in median else "-" for c in columns))
            for column, value in median.items():
                figures[f"{name}_{context}_{column}_{rows}"] = round(value, 3)
        console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    hf.register()
    figures: dict[str, float] = {}
    console = Console(width=100)
    repeat = min(args.repeat, 5) if args.quick else args.repeat
    measure(args.model, [256] if args.quick else [256, 2048], repeat, figures, console)
    if not args.quick:
        measure("1.1B", [256, 2048], max(repeat // 2, 3), figures, console)

    def ratio(above: str, below: str, name: str = args.model) -> float | None:
        over, under = figures.get(f"{name}_256_{above}"), figures.get(f"{name}_256_{below}")
        return None if over is None or under is None else round(over / under, 3)

    summary = {
        "ratio_fused_to_transformers_1": ratio("ours_1", "transformers_1"),
        "ratio_fused_to_transformers_8": ratio("ours_8", "transformers_8"),
        "ratio_fused_to_products_1": ratio("ours_1", "products_1"),
        "ratio_fused_to_products_8": ratio("ours_8", "products_8"),
        "ratio_16_rows_to_1": ratio("ours_16", "ours_1"),
        "ratio_32_rows_to_1": ratio("ours_32", "ours_1"),
        "ratio_1_row_to_reading": ratio("ours_1", "reading_1"),
        "big_ratio_1_row_to_reading": ratio("ours_1", "reading_1", "1.1B"),
        "big_ratio_8_rows_to_1": ratio("ours_8", "ours_1", "1.1B"),
    }
    print(json.dumps({**summary, "threads": args.threads, "ms": figures}))


if __name__ == "__main__":
    main()
