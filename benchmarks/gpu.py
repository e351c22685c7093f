"""What a GPU has to show: the CPU's results, the same bits for a row in any company, and speed near its limit.

    python benchmarks/gpu.py                              # an 8-billion-weight Llama shape, bfloat16, some minutes
    python benchmarks/gpu.py --device cpu --tiny          # the script itself, tried without a GPU

1. Equality: passes (chunks, chains, trees, several texts) and a greedy text of a small float32 model, the device
   against the CPU.
2. Rows of the big model alone, in chains and in trees, to the bit.
3. Passes: milliseconds by rows and context, recorded as CUDA graphs and launched one by one, beside the time to
   read weights, keys and values at the bandwidth of a copy in this run.
4. Texts: tokens a second of transformers' generate, of plain decoding, and with a drafter that is right with a
   set chance, beside the limit.
Weights are random, but for the LM head: it is the embedding turned by one id, so every text counts upwards by wide
margins, and a script can guess it. Last line JSON; exit status 1 where 1. fails or a text is wrong.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import math
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from gpu_model import SMALL, TINY, Shape, counting, guesser, random_module, walk, write  # beside this file
from sooner.config import Budget
from sooner.core.step import Segment, pack
from sooner.core.tree import Draft, chain
from sooner.draft.none import NoDrafter
from sooner.draft.protocol import Context
from sooner.measure.rows import probe
from sooner.model.fused import COARSE, FusedModel
from sooner.model.graphs import Graphs
from sooner.testing import ScriptedDrafter

ROWS = (1, 8, 16, 32, 64)
TOLERANCE = 2e-4  # of the largest logit: float32 sums of some hundred terms in another order
PREFIX = 64  # tokens of a prompt


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit status."""
    options = _options(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print(
            f"error: torch {torch.__version__} sees no GPU here; --device cpu --tiny tries the script.",
            file=sys.stderr,
        )
        return 2
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    run = Run(options, device, Console(width=100))
    run.console.print(f"torch {torch.__version__}, {name}; {run.shape}")
    found: dict[str, Any] = {"device": name, "torch": torch.__version__, "layers": run.shape.layers}
    found |= equality(run)
    found["bandwidth_gb_s"] = round(bandwidth(run) / 1e9, 1)
    module = counting(run.shape, device, options.dtype)
    found["texts"] = {}
    for batch in options.batches:
        found["texts"][f"transformers_{batch}"] = transformers_speed(run, module, batch)
    model = FusedModel(module, tiles=COARSE)
    found["rows"] = rows(run, model)
    found["passes"] = passes(run, model, found["bandwidth_gb_s"] * 1e9)
    found["texts"] |= texts(run, model)
    _print_texts(run, found)
    right = all(cell["right"] for cell in found["texts"].values())
    found |= {"right": right, "skipped": run.skipped, "seconds": round(run.seconds, 1)}
    print(json.dumps(found))
    return 0 if right and found["equal"] else 1


class Run:
    """Options, and the time that is left."""

    def __init__(self, options: argparse.Namespace, device: torch.device, console: Console) -> None:
        self.options, self.device, self.console = options, device, console
        self.shape: Shape = dataclasses.replace(TINY if options.tiny else Shape(), **options.sizes)
        self.skipped: list[str] = []
        self._began = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began

    def late(self, what: str) -> bool:
        """Whether the time is over; what is left out then is said."""
        if self.seconds > 60 * self.options.minutes:
            self.skipped.append(what)
        return what in self.skipped

    def timed(self, work: Callable[[], Any], times: int) -> float:
        """Seconds of the fastest of some runs, to the end of the device's work."""
        best = math.inf
        for _ in range(times):
            self.wait()
            began = time.perf_counter()
            work()
            self.wait()
            best = min(best, time.perf_counter() - began)
        return best

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def equality(run: Run) -> dict[str, Any]:
    """Passes and a text of a small model in float32, on the device and on the CPU."""
    module = random_module(SMALL, torch.device("cpu"), torch.float32)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.1)
    there = FusedModel(copy.deepcopy(module).to(run.device), tiles=COARSE)
    here = FusedModel(module)
    worst = scale = 0.0
    for one, other in zip(walk(here), walk(there), strict=True):
        worst = max(worst, float((one - other.cpu()).abs().max()))
        scale = max(scale, float(one.abs().max()))
    prompt = [5, 9, 13, 40, 22, 7]
    plain = write(here, [prompt], 48, NoDrafter(), 0)[0]
    known = plain.tokens

    def script(context: Context, budget: Budget) -> Draft:
        at = len(context.tokens)
        guesses = known[at : at + budget.depth]
        wrong = at % 3  # now and then a guess that is not taken
        return chain([(t + (i == 2 and wrong == 0)) % SMALL.vocab for i, t in enumerate(guesses)])

    drafted = write(there, [prompt], 48, ScriptedDrafter(script), 7)[0]
    same = drafted.tokens == known and drafted.tally.close().accepted > 0
    equal = worst <= TOLERANCE * scale
    run.console.print(
        f"equality, float32: logits differ by {worst:.2g} at most, the largest is {scale:.3g} "
        f"({'within' if equal else 'ABOVE'} {TOLERANCE:g} of it); text {'equal' if same else 'NOT EQUAL'}"
    )
    return {"equal": equal and same, "worst": worst, "scale": scale}


def bandwidth(run: Run) -> float:
    """Bytes a second that a copy moves, read and written."""
    size = (1 << 32) if run.device.type == "cuda" else (1 << 26)
    source = torch.ones(size, dtype=torch.uint8, device=run.device)
    target = torch.empty_like(source)
    return 2 * size / run.timed(lambda: target.copy_(source), 6)


def rows(run: Run, model: FusedModel) -> dict[str, float]:
    """By how much a margin moves at most when a row is not alone; 0 = the same bits."""
    text = [[(start + i) % run.shape.vocab for i in range(100)] for start in (3, 200)]
    found = {}
    for height in (8, 16, 32):
        noise = probe(model, model, text, height, trees=True)
        found |= {f"chain_{height}": noise.chain, f"tree_{height}": noise.tree or 0.0, "bound": noise.most}
    said = ", ".join(f"{k} {v:.3g}" for k, v in found.items())
    run.console.print(f"rows, {run.options.dtype}: margins move by at most (0 = the same bits): {said}")
    return found


def passes(run: Run, model: FusedModel, speed: float) -> dict[str, float]:
    """Milliseconds by rows and context."""
    launched = copy.copy(model)
    launched._passes = Graphs(None)
    size = model.lanes.store.element_size()
    table = Table(title="ms a pass")
    for column in ("context", "rows", "recorded", "one by one", "limit"):
        table.add_column(column, justify="right")
    found: dict[str, float] = {}
    lane = model.lanes.open()
    for context in run.options.contexts:
        if run.late(f"passes at {context}"):
            continue
        words = [i % run.shape.vocab for i in range(context + max(ROWS))]
        for start in range(len(model.lanes.held(lane)), context, 512):
            step = pack([Segment(lane, start, tuple(words[start : min(start + 512, context)]), law=False)])
            model.forward(step, rows=step.law_rows)
            model.lanes.settle(lane, words[:context])
        limit = 1e3 * size * (run.shape.read + context * run.shape.kept) / speed
        for count in ROWS:
            step = pack([Segment(lane, context, (words[context],), chain(words[context + 1 : context + count]))])
            cells = []
            for kind, runner in (("recorded", model), ("launched", launched)):
                for _ in range(3):  # seen, recorded, replayed
                    runner.forward(step, rows=step.law_rows)
                cells.append(1e3 * run.timed(lambda r=runner, s=step: r.forward(s, rows=s.law_rows), 20))
                found[f"{context}_{kind}_{count}"] = round(cells[-1], 3)
            table.add_row(str(context), str(count), *(f"{cell:.2f}" for cell in (*cells, limit)))
        found[f"{context}_limit"] = round(limit, 3)
    model.lanes.close(lane)
    run.console.print(table)
    return found


def prompts(run: Run, batch: int) -> list[list[int]]:
    return [[(100 * b + i) % run.shape.vocab for i in range(PREFIX)] for b in range(batch)]


def transformers_speed(run: Run, module: Any, batch: int) -> dict[str, Any]:
    ids = torch.tensor(prompts(run, batch), device=run.device)
    asked = {"do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}

    def write_one(count: int) -> Any:
        return module.generate(ids, max_new_tokens=count, min_new_tokens=count, **asked)

    write_one(4)
    first = run.timed(lambda: write_one(1), 1)  # the prompt is not decoding
    got: list[Any] = []
    spent = run.timed(lambda: got.append(write_one(run.options.tokens)), 1) - first
    right = bool((got[0][:, PREFIX:] == _counted(run, batch).to(run.device)).all())
    return _cell(batch, (run.options.tokens - 1) * batch / spent, 1.0, right)


def _counted(run: Run, batch: int) -> torch.Tensor:
    last = torch.tensor([prompt[-1] for prompt in prompts(run, batch)])
    return (last[:, None] + 1 + torch.arange(run.options.tokens)) % run.shape.vocab


def texts(run: Run, model: FusedModel) -> dict[str, Any]:
    """Plain decoding, and drafters that are right with a set chance, greedy and sampled."""
    found: dict[str, Any] = {}
    for batch in run.options.batches:
        for chance in (None, *run.options.acceptance):
            for temperature in (0.0, 0.7):
                name = f"{'plain' if chance is None else chance}_{batch}" + ("_sampled" if temperature else "")
                if run.late(name):
                    continue
                drafter = NoDrafter() if chance is None else guesser(run.shape.vocab, chance)
                depth = 0 if chance is None else run.options.k
                write(model, prompts(run, batch), 8 * (depth + 1), drafter, depth, temperature)
                with Waits(run.device) as waits:
                    written = write(model, prompts(run, batch), run.options.tokens, drafter, depth, temperature)
                want = _counted(run, batch).tolist()
                right = all(r.tokens[PREFIX:] == line for r, line in zip(written, want, strict=True))
                record = [request.tally.close() for request in written]
                steps = max(one.steps for one in record)
                a_step = sum(one.emitted for one in record) / sum(one.steps for one in record)
                found[name] = _cell(batch, sum(one.tokens_per_second for one in record), a_step, right)
                if waits.count is not None:
                    found[name]["waits_a_step"] = round(waits.count / steps, 2)
    return found


class Waits:
    """Counts how often the host waited for the device; None on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.count: int | None = None
        self._cuda = device.type == "cuda"
        self._caught = warnings.catch_warnings(record=True)

    def __enter__(self) -> Waits:
        self._list = self._caught.__enter__()
        if self._cuda:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
        return self

    def __exit__(self, *_: object) -> None:
        if self._cuda:
            torch.cuda.set_sync_debug_mode("default")
            self.count = sum("synchroniz" in str(one.message) for one in self._list or ())
        self._caught.__exit__(None, None, None)


def _cell(batch: int, speed: float, a_step: float, right: bool) -> dict[str, Any]:
    return {"batch": batch, "tokens_s": round(speed, 1), "tokens_a_step": round(a_step, 2), "right": right}


def _print_texts(run: Run, found: dict[str, Any]) -> None:
    """Beside the limit: weights read once a step, whatever the batch."""
    size = torch.empty(0, dtype=run.options.dtype).element_size()
    a_second = found["bandwidth_gb_s"] * 1e9 / (size * run.shape.read)
    title = f"decoding, {run.options.tokens} tokens a text, chains of {run.options.k}; what_texts"
    table = Table(title=title)
    for column in (
        "what",
        "tok/s",
        "of transformers",
        "tokens a step",
        "of the limit",
        "waits a step",
        "text",
    ):
        table.add_column(column, justify="right", no_wrap=column == "what")
    for name, cell in found["texts"].items():
        theirs = found["texts"][f"transformers_{cell['batch']}"]["tokens_s"]
        cell["of_limit"] = round(cell["tokens_s"] / (cell["batch"] * cell["tokens_a_step"] * a_second), 3)
        cell["of_transformers"] = round(cell["tokens_s"] / theirs, 2)
        waits = str(cell.get("waits_a_step", "-"))
        table.add_row(
            name, f"{cell['tokens_s']:.1f}", f"{cell['of_transformers']:.2f}",
            f"{cell['tokens_a_step']:.2f}", f"{cell['of_limit']:.2f}", waits, "right" if cell["right"] else "NO",
        )  # fmt: skip
    run.console.print(table)


def _numbers(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [kind(part) for part in text.split(",")]


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Check and measure a GPU.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape, for trying the script")
    for field in dataclasses.fields(Shape):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, help=f"{field.default} by default")
    parser.add_argument("--tokens", type=int, default=192, help="of one text")
    parser.add_argument("--batches", type=_numbers(int), default=[1, 8], help="texts at a time: 1,8")
    parser.add_argument("--acceptance", type=_numbers(float), default=[0.6, 0.8], help="chances: 0.6,0.8")
    parser.add_argument("--contexts", type=_numbers(int), default=[256, 2048], help="of the passes: 256,2048")
    parser.add_argument("--k", type=int, default=7, help="guesses of a chain")
    parser.add_argument("--minutes", type=float, default=8.0, help="after these nothing new is begun")
    options = parser.parse_args(arguments)
    options.dtype = getattr(torch, options.dtype)
    given = ((field.name, getattr(options, field.name)) for field in dataclasses.fields(Shape))
    options.sizes = {name: value for name, value in given if value is not None}
    return options


if __name__ == "__main__":
    sys.exit(main())
