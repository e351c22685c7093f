"""Every sampling parameter x drafter x rule x batch on tiny random models, against a loop written twice.

    python benchmarks/exactness.py [--quick] [--seed 0]

Greedy and seeded cases: the tokens must equal those of a plain loop in plain Python (tests/engine/plain.py) over
transformers' eager passes. Unseeded cases: chi-square of the first two tokens against the exact joint law,
Bonferroni-corrected p > 0.001, and no token of probability 0 ever. Four biased rules must be caught by the
same chi-square. Last line: JSON with `cases` and `failed`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tests.core import biased
from tests.core.goodness import chi_square
from tests.engine.plain import edited, law_of, plain_text
from tests.engine.sampling import PROMPT, VOCAB, Twin, counts, drawn_tree, guessed_tree, twin, written
from torch import Tensor

from sooner.config import Budget, EngineConfig
from sooner.control.fixed import FixedController
from sooner.draft.lookup import LookupDrafter
from sooner.draft.model import ModelDrafter
from sooner.draft.none import NoDrafter
from sooner.draft.protocol import Drafter
from sooner.engine.engine import Engine
from sooner.params import SamplingParams

EOS = (7,)
RULES = ("match", "reject", "block", "traversal")
NEIGHBOURS = (SamplingParams(temperature=1.1, seed=901, max_tokens=9), SamplingParams(max_tokens=5))


def favour(tokens: Sequence[int], row: Tensor) -> Tensor:
    """A caller's own processor: the id after the last token gains."""
    changed = row.clone()
    changed[(tokens[-1] + 1) % VOCAB] += 1.5
    return changed


def no_one_two(tokens: Sequence[int], row: Tensor) -> Tensor:
    """What bad_words=("6", "1 2") mean, written as a processor for the plain loop."""
    changed = row.clone()
    changed[6] = -torch.inf
    if tokens[-1] == 1:
        changed[2] = -torch.inf
    return changed


BASE = SamplingParams(temperature=1.0, max_tokens=12)
PARAMETERS: dict[str, tuple[SamplingParams, SamplingParams]] = {
    name: (replace(BASE, **change), replace(BASE, **change))
    for name, change in {
        "temperature 1": {},
        "temperature 0.3": {"temperature": 0.3},
        "temperature 1.7": {"temperature": 1.7},
        "top_k": {"top_k": 3},
        "top_p": {"top_p": 0.6},
        "min_p": {"min_p": 0.2},
        "typical_p": {"typical_p": 0.7},
        "repetition_penalty": {"repetition_penalty": 1.5},
        "repetition_penalty < 1": {"repetition_penalty": 0.7},
        "presence_penalty": {"presence_penalty": 1.2},
        "frequency_penalty": {"frequency_penalty": 0.8},
        "frequency_penalty < 0": {"frequency_penalty": -1.0},
        "logit_bias": {"logit_bias": {2: 1.5, 5: -3.0}},
        "allowed_token_ids": {"allowed_token_ids": (1, 2, 4, 5)},
        "min_tokens": {"min_tokens": 6},
        "stop_token_ids": {"stop_token_ids": (3,)},
        "ignore_eos": {"ignore_eos": True},
        "logits_processors": {"logits_processors": (favour,)},
        "filters together": {"temperature": 0.8, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
        "everything": {
            "temperature": 0.9,
            "top_p": 0.9,
            "repetition_penalty": 1.2,
            "presence_penalty": 0.4,
            "frequency_penalty": 0.3,
            "logit_bias": {1: 0.7},
            "min_tokens": 4,
            "logits_processors": (favour,),
        },
    }.items()
} | {"bad_words": (replace(BASE, bad_words=("6", "1 2")), replace(BASE, logits_processors=(no_one_two,)))}


@dataclass(frozen=True)
class World:
    """The target with its plain twin, and a smaller model to draft with."""

    target: Twin
    draft: Twin

    def drafter(self, name: str) -> tuple[Drafter, Budget]:
        made: dict[str, Callable[[], tuple[Drafter, Budget]]] = {
            "none": lambda: (NoDrafter(), Budget.chain(0)),
            "lookup": lambda: (LookupDrafter(), Budget(4, 2, 8)),
            "model": lambda: (ModelDrafter(self.draft.model, VOCAB, confidence=0.2), Budget.chain(3)),
            "drawn tree": lambda: (drawn_tree(2), Budget(2, 2, 6)),
            "wrong tree": lambda: (guessed_tree(3), Budget(2, 3, 12)),
        }
        return made[name]()

    def next_logits(self, tokens: Sequence[int]) -> Tensor:
        with torch.inference_mode():
            row: Tensor = self.target.plain(input_ids=torch.tensor([list(tokens)])).logits[0, -1]
        return row

    def run(self, name: str, params: Sequence[SamplingParams], at_once: int) -> list[list[int]]:
        drafter, budget = self.drafter(name)
        config = EngineConfig(max_requests=at_once, step_rows=16 * at_once + 64, chunk_rows=5)
        engine = Engine(
            self.target.model,
            drafter,
            FixedController(budget),
            eos_ids=EOS,
            encode=lambda text: [int(word) for word in text.split()],
            config=config,
        )
        requests = [engine.add(PROMPT, own) for own in params]
        while engine.busy:
            engine.step()
        engine.check()
        if engine.guard.failures:
            raise RuntimeError(f"the {name} drafter failed: {engine.guard.failures}")
        return [written(request) for request in requests]

    def joint(self, params: SamplingParams) -> Tensor:
        """Exact law of the first two tokens, [V, V]; after an end of text the second is counted as 0."""
        found = torch.zeros((VOCAB, VOCAB), dtype=torch.float64)
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(EOS))
        first = self._law(params, [], ends)
        for token, mass in enumerate(first):
            if mass and token in ends:
                found[token, 0] += mass
            elif mass:
                found[token] += mass * torch.tensor(self._law(params, [token], ends), dtype=torch.float64)
        return found

    def _law(self, params: SamplingParams, text: list[int], ends: set[int]) -> list[float]:
        logits = self.next_logits([*PROMPT, *text]).double().tolist()
        return law_of(edited(logits, params, PROMPT, text, ends), params)


@dataclass(frozen=True)
class Outcome:
    kind: str
    parameter: str
    drafter: str
    ok: bool
    detail: str


def equality(world: World, parameter: str, drafter: str, batch: int, seed: int | None) -> Outcome:
    """The text of the plain loop, alone or beside two neighbours. seed None: greedy."""
    ours, plain = PARAMETERS[parameter]
    change: dict[str, Any] = {"temperature": 0.0} if seed is None else {"seed": seed}
    ours, plain = replace(ours, **change), replace(plain, **change)
    want, _ = plain_text(world.next_logits, PROMPT, plain, eos=EOS)
    neighbours = list(NEIGHBOURS[: batch - 1])
    got = world.run(drafter, [*neighbours, ours], batch)[-1]
    kind = "greedy" if seed is None else "seeded"
    return Outcome(kind, parameter, drafter, got == want, f"batch {batch}, seed {seed}: {got} for {want}")


def distribution(
    world: World, parameter: str, drafter: str, rule: str, batch: int, draws: int, first_seed: int, level: float
) -> Outcome:
    """Chi-square over `draws` requests. batch 3: every pass is shared with requests of two other kinds."""
    ours, plain = PARAMETERS[parameter]
    own = [replace(ours, seed=first_seed + i, rule=rule, max_tokens=max(2, ours.min_tokens)) for i in range(draws)]
    mixed = list(own)
    if batch > 1:
        mixed = [p for i, mine in enumerate(own) for p in ((mine, NEIGHBOURS[i % 2]) if i % 4 == 0 else (mine,))]
    texts = [t for p, t in zip(mixed, world.run(drafter, mixed, 192), strict=True) if p not in NEIGHBOURS]
    seen = counts([[*text, 0][:2] for text in texts], 2)
    exact = world.joint(plain)
    impossible = int(seen[exact == 0].sum())
    p = chi_square(seen, exact)
    detail = f"rule {rule}, batch {batch}: p = {p:.2g}, {impossible} impossible tokens"
    return Outcome(f"chi² {rule}", parameter, drafter, p > level and not impossible, detail)


def plan(world: World, quick: bool, seed: int) -> list[Callable[[], Outcome]]:
    """All cases, or a spread of 200 of them."""
    drafters = ("none", "lookup", "model", "drawn tree", "wrong tree")
    grid = list(itertools.product(PARAMETERS, drafters, (1, 3)))
    draws = 250 if quick else 400
    combos = [(p, d, rule, b) for p, d, b in grid for rule in RULES]
    level = 0.001 / len(combos)
    cases: list[Callable[[], Outcome]] = []
    for p, d, b in grid:
        for s in (None, *range(5)):
            cases.append(partial(equality, world, p, d, b, s))
    for i, (p, d, rule, b) in enumerate(combos):
        first = (seed * len(combos) + i) * 10_000
        cases.append(partial(distribution, world, p, d, rule, b, draws, first, level))
    if quick:
        chance = random.Random(seed)
        cases = chance.sample(cases[: 6 * len(grid)], 160) + chance.sample(cases[6 * len(grid) :], 40)
    return cases


def controls(world: World, draws: int) -> dict[str, bool]:
    """Biased rules put in the place of ours: whether the chi-square catches each."""
    caught = {}
    for wrong in (biased.hot_q, biased.accepts_all, biased.plain_residual, biased.redraws):
        tables = mock.patch(
            "sooner.core.verify.sparse", return_value=None
        )  # the wrong rules are written for tables
        with mock.patch("sooner.core.verify.traversal", wrong), tables:
            found = distribution(world, "temperature 1", "drawn tree", "traversal", 1, draws, 0, 1e-6)
        caught[wrong.__name__] = not found.ok
    return caught


def show(outcomes: Sequence[Outcome], caught: dict[str, bool]) -> None:
    console = Console()
    table = Table(title="cases (failed) by parameter and kind")
    kinds = sorted({o.kind for o in outcomes})
    table.add_column("parameter", no_wrap=True)
    for kind in kinds:
        table.add_column(kind, justify="right")
    for parameter in PARAMETERS:
        row = []
        for kind in kinds:
            some = [o for o in outcomes if o.parameter == parameter and o.kind == kind]
            failed = sum(not o.ok for o in some)
            row.append(f"{len(some)}" + (f" ({failed})" if failed else ""))
        table.add_row(parameter, *row)
    console.print(table)
    for o in outcomes:
        if not o.ok:
            console.print(f"FAILED {o.kind}, {o.parameter}, {o.drafter}: {o.detail}", markup=False)
    console.print("biased rules caught: " + ", ".join(f"{k} {'yes' if v else 'NO'}" for k, v in caught.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="200 cases, under a minute")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)  # tiny products: threads only wait for each other
    began = time.perf_counter()
    world = World(twin(11), twin(23))
    cases = plan(world, args.quick, args.seed)
    outcomes = [case() for case in track(cases, console=Console(stderr=True), description="cases")]
    caught = controls(world, 1500 if args.quick else 4000)
    show(outcomes, caught)
    failed = sum(not o.ok for o in outcomes) + sum(not c for c in caught.values())
    record = {
        "cases": len(outcomes),
        "failed": failed,
        "controls": len(caught),
        "controls_caught": sum(caught.values()),
        "seconds": round(time.perf_counter() - began, 1),
    }
    print(json.dumps(record))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
