"""What the law and the verification of 16 rows cost beside the target's pass, on real logits.

    python benchmarks/law.py [--model M] [--rows 16] [--repeat 15]

A row is a node of a chain over the model's own text. Each setting is timed on the logits of a pass that has just
run, as in the engine; medians. The wide vocabulary repeats the real logits, shifted down, to 262,144 ids.
Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from sooner import LLM, SamplingParams
from sooner.core.edit import Edit, LawParams, apply
from sooner.core.law import law
from sooner.core.step import Segment, Step, pack
from sooner.core.tree import Draft, chain
from sooner.core.verify import Rule, Trial, verify
from sooner.engine.history import History
from sooner.engine.judge import paths

PROMPT = "Explain in a few paragraphs how a lighthouse works, and what its keeper does on a stormy night."
WIDE = 262_144
SETTINGS: dict[str, LawParams] = {
    "greedy": LawParams(),
    "temperature 0.8, top-p 0.95": LawParams(0.8, top_p=0.95),
    "temperature 0.8, top-k 50": LawParams(0.8, top_k=50),
    "temperature 1, no filter": LawParams(1.0),
    "top-p 0.95, all penalties": LawParams(
        0.8,
        top_p=0.95,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.2,
        bias=((11, 1.5), (17, -2.0)),
        bad_words=((42,), (17, 23)),
        until=10_000,
        forbidden=(2,),
    ),
}


def median_ms(seconds: list[float]) -> float:
    return statistics.median(seconds) * 1e3


def timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def judge(logits: torch.Tensor, params: LawParams, history: History, draft: Draft, root: int, rule: Rule) -> None:
    """What the engine does with the logits of one request's segment."""
    if params.edits:  # in place, as the engine does where nobody wants raw log-probabilities
        apply(logits, Edit(0, params, history.past(), paths(draft)))
    verify(law(logits, [params] * len(logits)), [Trial(0, draft, root, 7, rule)])


def real_pass(llm: LLM, rows: int) -> tuple[list[int], Draft, Step, Callable[[], torch.Tensor]]:
    """A text of the model, a chain of rows - 1 nodes over its end, and the pass that runs them."""
    model = llm.target.model
    written = llm.chat(PROMPT, SamplingParams(max_tokens=128 + rows, ignore_eos=True))
    tokens = [*written.prompt_token_ids, *written.token_ids]
    cut = len(tokens) - rows
    lane = model.lanes.open()
    head = pack([Segment(lane, 0, tuple(tokens[:cut]), law=False)])
    model.forward(head, rows=head.law_rows)
    model.lanes.settle(lane, tokens[:cut])
    draft = chain(tokens[cut + 1 :])
    step = pack([Segment(lane, cut, (tokens[cut],), draft)])
    return tokens[: cut + 1], draft, step, lambda: model.forward(step, rows=step.law_rows).logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=15)
    args = parser.parse_args()
    tokens, draft, _, run = real_pass(LLM(args.model, draft="none"), args.rows)
    logits = run()
    wide = torch.cat([logits - i for i in range(0, 100, 5)], dim=-1)[:, :WIDE]
    history, root = History(tokens, len(tokens) // 2), len(tokens) - 1
    history.past()
    passes: list[float] = []
    cost: dict[str, list[float]] = {}
    rules: tuple[Rule, ...] = ("match", "traversal")
    for turn in range(args.repeat + 2):  # the first two turns warm up
        for name, params in SETTINGS.items():
            for rule in rules:
                fresh: list[torch.Tensor] = []
                whole_pass = timed(lambda: fresh.append(run()))  # noqa: B023  # called at once
                own = timed(partial(judge, fresh[0], params, history, draft, root, rule))
                big = timed(partial(judge, wide.clone(), params, history, draft, root, rule))
                if turn > 1:
                    passes.append(whole_pass)
                    cost.setdefault(f"{name} / {rule} / own", []).append(own)
                    cost.setdefault(f"{name} / {rule} / wide", []).append(big)
    whole = median_ms(passes)
    print(f"pass of {args.rows} rows: {whole:.2f} ms")
    print(f"vocabulary: {logits.shape[1]:,} (own), {wide.shape[1]:,} (wide)\n")
    print(f"{'law and verification of all rows':<52} {'ms':>8} {'of the pass':>12}")
    for name, seconds in cost.items():
        share = f"{100 * median_ms(seconds) / whole:.1f} %" if name.endswith("own") else "-"
        print(f"{name:<52} {median_ms(seconds):>8.2f} {share:>12}")
    shares = {name: round(median_ms(s) / whole, 4) for name, s in cost.items() if name.endswith("own")}
    print(json.dumps({"pass_ms": round(whole, 2), "rows": args.rows, "share_of_pass": shares}))


if __name__ == "__main__":
    main()
