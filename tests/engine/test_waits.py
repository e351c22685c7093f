"""How often a step waits for a GPU, counted on a pretended one; and that its texts are those of the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sooner.config import Budget
from sooner.control.fixed import FixedController
from sooner.core.step import Step
from sooner.draft import registry
from sooner.draft.model import ModelDrafter
from sooner.draft.protocol import Drafter
from sooner.engine.engine import Engine
from sooner.model.protocol import Output
from sooner.params import SamplingParams
from sooner.testing import ToyModel
from tests.pretend import PretendedGpu, on_device, pretended_gpu

PROMPTS = [[1, 2, 3, 1, 2], [4, 5, 4, 5, 4, 5, 4], [7]]


class Elsewhere(ToyModel):
    """A toy whose logits lie on the pretended GPU."""

    def forward(self, step: Step, *, rows: Tensor, taps: Sequence[int] = ()) -> Output:
        with torch._C.DisableTorchFunction():
            out = super().forward(step, rows=rows, taps=taps)
        return replace(out, logits=on_device(out.logits.float()))


class Here(ToyModel):
    """The same on the CPU."""

    def forward(self, step: Step, *, rows: Tensor, taps: Sequence[int] = ()) -> Output:
        out = super().forward(step, rows=rows, taps=taps)
        return replace(out, logits=out.logits.float())


def texts(
    model: ToyModel, params: SamplingParams, drafter: Drafter, gpu: PretendedGpu | None = None
) -> tuple[list[list[int]], list[int]]:
    """What is written, and the waits of every step."""
    engine = Engine(model, drafter, FixedController(Budget(4, 2, 6)))
    requests = [engine.add(prompt, params) for prompt in PROMPTS]
    waits = []
    while engine.busy:
        before = len(gpu.waits) if gpu else 0
        engine.step()
        waits.append(len(gpu.waits) - before if gpu else 0)
    return [request.tokens for request in requests], waits


def named(draft: str) -> Drafter:
    """recycle asks for the likeliest ids of every row."""
    return registry.make(registry.parse(draft), ToyModel(17), lambda spec: ToyModel(17))


LAWS = {
    "greedy": SamplingParams(max_tokens=24),
    "top_p": SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9, seed=3),
    "top_k": SamplingParams(max_tokens=24, temperature=1.2, top_k=5, seed=3),
    "penalties": SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9, seed=3, repetition_penalty=1.2),
    "biased": SamplingParams(max_tokens=24, logit_bias={3: 1.0}, presence_penalty=0.2),
    "unseeded": SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9),
}


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("draft", ["lookup", "recycle"])
def test_a_step_waits_once(name: str, draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params = LAWS[name]
    with pretended_gpu(monkeypatch) as gpu:
        found, waits = texts(Elsewhere(17, order=3), params, named(draft), gpu)
    assert set(waits) == {1}, gpu.waits
    if name != "unseeded":
        assert found == texts(Here(17, order=3), params, named(draft))[0]


def test_a_seeded_law_without_a_filter_waits_once_more_for_each_request(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=3)
    with pretended_gpu(monkeypatch) as gpu:
        found, waits = texts(Elsewhere(17, order=30, spread=20.0), params, named("lookup"), gpu)
    assert found == texts(Here(17, order=30, spread=20.0), params, named("lookup"))[0]
    assert max(waits) <= 1 + len(PROMPTS)
    tokens = sum(len(text) for text in found) - sum(len(prompt) for prompt in PROMPTS)
    assert tokens > 1.2 * len(PROMPTS) * len(waits)  # or a wait for every token would do as well


@pytest.mark.parametrize("rule", ["match", "reject"])
@pytest.mark.parametrize("params", [LAWS["greedy"], LAWS["top_p"]])
def test_a_drafted_token_waits_twice_at_most(
    params: SamplingParams, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = replace(params, seed=None if rule == "reject" else params.seed)
    with pretended_gpu(monkeypatch) as gpu:
        found, waits = texts(Elsewhere(17, order=3), params, ModelDrafter(Elsewhere(17, order=2), 17), gpu)
    assert max(waits) <= 1 + 2 * 4  # chains of four
    if params.seed is not None or not params.temperature:
        assert found == texts(Here(17, order=3), params, named("lookup"))[0]


def test_log_probabilities_are_one_more_wait_for_each_request(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=12, logprobs=3, logprobs_mode="raw")
    with pretended_gpu(monkeypatch) as gpu:
        _, waits = texts(Elsewhere(17, order=3), params, named("lookup"), gpu)
    assert max(waits) <= 1 + len(PROMPTS)


def test_the_pretended_gpu_counts_what_a_gpu_waits_for_and_refuses_what_it_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pretended_gpu(monkeypatch) as gpu:
        x = on_device(torch.arange(6.0))
        assert x.device.type == "cuda"
        y = (x * 2)[1:]
        assert not gpu.waits
        assert y.tolist() == [2, 4, 6, 8, 10]
        assert float(y.sum()) == 30
        assert bool(y.any())
        y[[0, 1]]
        torch.tensor([1], device=y.device)
        torch.tensor([1]).to(y.device)
        torch.tensor([1]).pin_memory().to(y.device, non_blocking=True)  # this one is free
        assert gpu.waits == ["tolist", "__float__", "__bool__", "__getitem__", "tensor", "to"]
        with pytest.raises(RuntimeError, match="two devices"):
            torch.arange(5) + y
