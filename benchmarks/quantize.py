"""What weights at fewer bits cost and give: ms a pass, bytes, and how far the law moves from the plain weights'.

    python benchmarks/quantize.py --trace questions.jsonl [--model M] [--kinds int8,int4] [--limit 24] [--no-time]

The plain model answers each prompt greedily; then every model reads prompt and answer in one pass. KL is the mean,
over the answers' tokens, of sum p log(p / q), p the plain law, q the quantised one, in nats; "same" is how often
the likeliest token is the same. A pass is of 1 to 32 rows after `--context` tokens; the models take turns, medians
count. Bytes are those of the process after loading, less before. Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from sooner import LLM, SamplingParams
from sooner.core.step import Segment, pack
from sooner.core.tree import chain
from sooner.measure.bench import encode
from sooner.measure.workload import choose, read
from sooner.model.load import Loaded, load
from sooner.model.protocol import Model

PLAIN = "plain"


def main() -> None:
    """Load, measure, print."""
    options = _options()
    models, grown = _load(options)
    plain = models[PLAIN]
    prompts = encode(plain, choose(read(options.trace), limit=options.limit), raw=False, room=options.max_tokens)
    answers = LLM(plain, "none").generate(prompts, SamplingParams(max_tokens=options.max_tokens))
    texts = [(prompt, list(answer.token_ids)) for prompt, answer in zip(prompts, answers, strict=True)]
    moved = {name: _moved(plain.model, models[name].model, texts) for name in models if name != PLAIN}
    text = [token for prompt, answer in texts for token in prompt + answer]
    cost = {} if options.no_time else _cost({n: m.model for n, m in models.items()}, text, options)
    print(f"{'weights':<8} {'MB':>6} {'mean KL':>9} {'same':>7}" + "".join(f"{r:>4} rows" for r in options.rows))
    for name in models:
        kl, same = moved.get(name, (0.0, 1.0))
        times = "".join(f"{cost[name][rows]:>9.2f}" for rows in options.rows) if cost else ""
        print(f"{name:<8} {grown[name] / 1e6:>6.0f} {kl:>9.5f} {100 * same:>6.1f}%{times}")
    summary = {
        "model": options.model,
        "dtype": str(plain.model.lanes.store.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "prompts": len(texts),
        "tokens": sum(len(answer) for _, answer in texts),
        "megabytes": {name: round(grown[name] / 1e6) for name in models},
        "kl": {name: round(kl, 6) for name, (kl, _) in moved.items()},
        "same": {name: round(same, 5) for name, (_, same) in moved.items()},
        "pass_ms": {name: {str(r): round(ms, 3) for r, ms in rows.items()} for name, rows in cost.items()},
    }
    for name in moved if cost else ():
        for rows in options.rows:
            summary[f"ratio_{name}_{rows}"] = round(cost[name][rows] / cost[PLAIN][rows], 4)
    print(json.dumps(summary))


def _load(options: argparse.Namespace) -> tuple[dict[str, Loaded], dict[str, int]]:
    """The model as it is and at fewer bits, and what each added to the process."""
    models, grown = {}, {}
    for name in [PLAIN, *options.kinds.split(",")]:
        before = _resident()
        models[name] = load(options.model, dtype=options.dtype, quantize=None if name == PLAIN else name)
        grown[name] = _resident() - before
    return models, grown


def _resident() -> int:
    """Bytes of the process that no file backs."""
    with open("/proc/self/status") as status:
        return sum(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


def _logits(model: Model, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    """log p of what may stand at each place of the answer, float32 [answer, V]."""
    lane = model.lanes.open()
    step = pack([Segment(lane, 0, tuple([*prompt, *answer]))])
    places = torch.arange(len(prompt) - 1, len(prompt) + len(answer) - 1)
    logits = model.forward(step, rows=places).logits.float().log_softmax(-1)
    model.lanes.close(lane)
    return logits


def _moved(plain: Model, other: Model, texts: Sequence[tuple[list[int], list[int]]]) -> tuple[float, float]:
    """Mean KL and how often the likeliest token is the same."""
    divergence, same, count = 0.0, 0, 0
    for prompt, answer in texts:
        p, q = _logits(plain, prompt, answer), _logits(other, prompt, answer)
        divergence += float((p.exp() * (p - q)).sum())
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
        count += len(answer)
    return divergence / count, same / count


def _cost(models: dict[str, Model], text: list[int], options: argparse.Namespace) -> dict[str, dict[int, float]]:
    """Milliseconds of a pass, by model and rows."""
    if len(text) < options.context + max(options.rows):
        raise SystemExit(f"the trace gives {len(text)} tokens only; lower --context or raise --limit")
    lanes = {}
    for name, model in models.items():
        lanes[name] = model.lanes.open()
        head = pack([Segment(lanes[name], 0, tuple(text[: options.context]), law=False)])
        model.forward(head, rows=head.law_rows)
        model.lanes.settle(lanes[name], text[: options.context])
    seconds: dict[str, dict[int, list[float]]] = {name: {rows: [] for rows in options.rows} for name in models}
    for turn in range(options.repeat + 2):  # the first two turns warm up
        for rows in options.rows:
            for name, model in models.items():
                draft = chain(text[options.context + 1 : options.context + rows])
                step = pack([Segment(lanes[name], options.context, (text[options.context],), draft)])
                began = time.perf_counter()
                model.forward(step, rows=step.law_rows)
                if turn > 1:
                    seconds[name][rows].append(time.perf_counter() - began)
    return {name: {r: statistics.median(s) * 1e3 for r, s in each.items()} for name, each in seconds.items()}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, required=True, help="prompts, in the format of Spec-Bench")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--kinds", default="int8,int4")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--limit", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 32])
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--no-time", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
