"""Alone and in company: is the text the same, and does anything stay behind? Measures no speed.

    python benchmarks/load.py                        # the toy model: its logits show every mistake of the cache
    python benchmarks/load.py --model smollm2-135m --trials 5 --requests 200

Trials: requests with random prompts (some share beginnings), lengths, temperatures, seeds, priorities and wishes
for speculation join at random steps; some are preempted, some aborted; memory is short in two trials of three.
Every text is held to that of the same request served alone by plain decoding. Then many short requests go through
one engine: lanes in use when idle, `check()` of all invariants, and the slope of the memory Python holds. At last
the same prompt comes SAME times: how many of its rows were computed, and none of them for another `cache_salt`.
Last line: JSON with failed, trials, lanes, mib_per_1000, prompt_rows. Exit status 1 if a text differed, anything
stayed, or a shared prompt was computed more than 1.2 times.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from random import Random

from sooner import SamplingParams
from sooner.config import Budget, EngineConfig
from sooner.control.adaptive import AdaptiveController
from sooner.control.fixed import FixedController
from sooner.draft.lookup import LookupDrafter
from sooner.draft.none import NoDrafter
from sooner.engine.engine import Engine
from sooner.engine.request import Request
from sooner.model.load import load
from sooner.model.protocol import Model
from sooner.testing import ToyModel

TOY = "toy"
MOST = 1.0  # MiB for each 1,000 requests
SAME, LONG = 16, 1000  # times that the same prompt comes, and its tokens
AGAIN = 1.2  # times that its rows may be computed


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    model: Model = (
        ToyModel(17, order=3) if options.model == TOY else load(options.model, dtype=options.dtype).model
    )
    failed, seen = [], {"preempted": 0, "aborted": 0, "reused": 0, "accepted": 0}
    for seed in range(options.trials):
        if not _trial(model, Random(seed), seen):
            failed.append(seed)
    lanes, slope = soak(model, options.requests)
    rows, equal, elsewhere = shared_prompt(model)
    print(f"{options.trials} trials, {len(failed)} failed {failed[:10]}; {seen}")
    print(f"{options.requests} short requests: {lanes} lanes in use, {slope:.3f} MiB for each 1,000")
    print(
        f"the same {LONG}-token prompt {SAME} times: {rows} rows of it computed, texts equal: {equal}; "
        f"reused in another scope: {elsewhere}"
    )
    summary = {"trials": options.trials, "failed": len(failed), **seen, "requests": options.requests}
    summary |= {"lanes": lanes, "mib_per_1000": round(slope, 4), "prompt_rows": rows, "model": options.model}
    print(json.dumps(summary))
    shared = equal and elsewhere == 0 and rows < AGAIN * LONG
    return int(bool(failed) or lanes > 0 or slope > MOST or not shared)


def _trial(model: Model, random: Random, seen: dict[str, int]) -> bool:
    """Whether all texts of one random crowd were those of the same requests alone."""
    count = random.randint(2, 8)
    shared = _tokens(model, random, 80)
    wishes = [_wish(model, random, shared) for _ in range(count)]
    alone = [_alone(model, prompt, params) for prompt, params in wishes]
    per_token = model.lanes.bytes_for(1, 64) // 64
    memory = random.choice([None, random.choice([1, 2]), random.choice([3, 4])])
    limit = None if memory is None else memory * 384 * per_token
    config = EngineConfig(random.randint(1, 8), random.randint(60, 200), random.randint(8, 60), limit)
    model.lanes.trim()
    one = Engine(model, LookupDrafter(), AdaptiveController(Budget(8, 2, 16)), config=config)
    requests: list[Request] = []
    while len(requests) < count or one.busy:
        if len(requests) < count and (not one.busy or random.random() < 0.4):
            requests.append(one.add(*wishes[len(requests)]))
        if random.random() < 0.1:
            one.preempt(random.choice(requests))
        if random.random() < 0.03:
            one.abort(random.choice(requests))
        one.step()
        one.check()
    model.lanes.most_bytes = None
    for request in requests:
        record = request.tally.close()
        seen["preempted"] += record.preempted
        seen["reused"] += record.reused > 0
        seen["accepted"] += record.accepted
        seen["aborted"] += request.finish == "abort"
    texts = zip(requests, alone, strict=True)
    return model.lanes.in_use == 0 and all(_same(request, expected) for request, expected in texts)


def _same(request: Request, expected: list[int]) -> bool:
    text = request.tokens[len(request.prompt) :]
    return text == (expected[: len(text)] if request.finish == "abort" else expected)


def _alone(model: Model, prompt: list[int], params: SamplingParams) -> list[int]:
    config = EngineConfig(reuse_prefixes=False)
    one = Engine(model, NoDrafter(), FixedController(Budget.chain(0)), config=config)
    request = one.add(prompt, params)
    while one.busy:
        one.step()
    return request.tokens[len(prompt) :]


def _wish(model: Model, random: Random, shared: list[int]) -> tuple[list[int], SamplingParams]:
    begin = shared[: random.choice([0, 0, 40, 80])]
    params = SamplingParams(
        max_tokens=random.randint(1, 40),
        temperature=random.choice([0.0, 0.0, 0.8]),
        seed=random.randrange(1000),
        priority=random.choice([0, 0, 1]),
        speculation=random.choice(["auto", "auto", "auto", "off", 4]),
    )
    return begin + _tokens(model, random, random.randint(1, 60)), params


def _tokens(model: Model, random: Random, count: int) -> list[int]:
    """Words that come again, so that there is something to look up."""
    few = [random.randrange(model.vocab_size) for _ in range(12)]
    return [random.choice(few) for _ in range(count)]


def soak(model: Model, requests: int) -> tuple[int, float]:
    """Lanes in use at the end, and MiB of Python's memory for each 1,000 requests, the first tenth left out."""
    one = Engine(model, LookupDrafter(), AdaptiveController(Budget.chain(8)), config=EngineConfig(16, 256, 128))
    random, params = Random(0), SamplingParams(max_tokens=2)
    tracemalloc.start()
    base, at = 0, max(requests // 10, 16)
    for served in range(0, requests, 16):
        for _ in range(16):
            one.add(_tokens(model, random, random.randint(1, 40)), replace(params, seed=random.randrange(99)))
        while one.busy:
            one.step()
        one.check()
        if served <= at < served + 16:
            gc.collect()
            base = tracemalloc.get_traced_memory()[0]
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - base
    tracemalloc.stop()
    return model.lanes.in_use, grown / 2**20 / ((requests - at) / 1000)


def shared_prompt(model: Model) -> tuple[int, bool, int]:
    """Rows computed of a prompt that comes SAME times, whether the texts were right, rows another scope reused."""
    model.lanes.trim()
    prompt, params = _tokens(model, Random(5), LONG), SamplingParams(max_tokens=8, cache_salt="a")
    alone = _alone(model, prompt, params)
    one = Engine(model, NoDrafter(), FixedController(Budget.chain(0)), config=EngineConfig(SAME))
    first = one.add(prompt, params)
    while not first.written:
        one.step()
    requests = [first, *(one.add(prompt, params) for _ in range(SAME - 1))]
    while one.busy:
        one.step()
    other = one.add(prompt, replace(params, cache_salt="b"))
    while one.busy:
        one.step()
    reused = [request.tally.close().reused for request in requests]
    texts = [request.tokens[LONG:] for request in [*requests, other]]
    return LONG * SAME - sum(reused), all(text == alone for text in texts), other.tally.close().reused


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=TOY)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--trials", type=int, default=500)
    parser.add_argument("--requests", type=int, default=10_000)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
