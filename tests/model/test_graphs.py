"""Recorded passes: equal to others, dropped when the lanes move, and given up where recording fails."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sooner.core.step import Segment, pack
from sooner.core.tree import Draft, chain
from sooner.model import decoder, fused, graphs, hf
from sooner.model.graphs import Graphs
from tests.model.recorders import NothingRead, Tapes
from tests.model.test_frame import some_tree
from tests.model.test_hf import tiny
from tests.pretend import on_device, pretended_gpu


@pytest.fixture(autouse=True)
def _registered() -> None:
    hf.register()


def ahead(model: fused.FusedModel | hf.HFModel, seed: int, taps: tuple[int, ...] = ()) -> list[torch.Tensor]:
    """Logits and features of 40 passes of three texts that come, go on by chains and trees, and leave."""
    random, lanes = Random(seed), model.lanes
    held: dict[int, list[int]] = {}
    found = []
    for turn in range(40):
        if len(held) < 3 and random.random() < 0.5:
            held[lanes.open()] = [random.randrange(97) for _ in range(random.randint(1, 9))]
        elif len(held) > 1 and random.random() < 0.2:
            gone = random.choice(list(held))
            del held[gone]
            lanes.close(gone)
        segments = []
        for lane, text in held.items():
            at = len(lanes.held(lane))
            draft = some_tree(random, 5) if turn % 3 else chain([random.randrange(97) for _ in range(turn % 5)])
            segments.append(Segment(lane, at, tuple(text[at:]), draft))
        if not segments:
            continue
        step = pack(segments)
        out = model.forward(step, rows=step.law_rows, taps=taps)
        found += [out.logits] if out.features is None else [out.logits, out.features]
        for segment in segments:
            held[segment.lane] += _some_path(random, segment.draft)
            lanes.settle(segment.lane, held[segment.lane])
            held[segment.lane].append(random.randrange(97))
    return found


def _some_path(random: Random, draft: Draft) -> list[int]:
    path: list[int] = []
    node = -1
    while random.random() < 0.7:
        below = [i for i, parent in enumerate(draft.parents) if parent == node]
        if not below:
            break
        node = random.choice(below)
        path.append(draft.tokens[node])
    return path


@pytest.mark.parametrize("family", sorted(decoder.FAMILIES))
def test_recorded_passes_are_those_of_the_transformers_model(family: str) -> None:
    module = tiny(family, hf.NAME)
    want = ahead(hf.HFModel(copy.deepcopy(module)), 5, (0, 2, 3))
    tapes = Tapes()
    got = ahead(fused.FusedModel(module, tiles=fused.COARSE, recorder=tapes), 5, (0, 2, 3))
    assert tapes.replays > 20
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_tiles_and_recordings_change_no_pass(seed: int) -> None:
    module = tiny("gemma3_text", hf.NAME)
    want = ahead(fused.FusedModel(copy.deepcopy(module)), seed)
    tapes = Tapes()
    got = ahead(fused.FusedModel(module, tiles=fused.COARSE, recorder=tapes), seed)
    assert tapes.replays > 15
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_nothing_is_read_back_in_a_pass_that_is_not_recorded_either() -> None:
    """Prompts run as they are; the host must not wait for the device in them."""
    model = fused.FusedModel(tiny("gemma2", hf.NAME), tiles=fused.COARSE)
    lane = model.lanes.open()
    step = pack([Segment(lane, 0, tuple(i % 97 for i in range(80)), Draft((1, 2, 3), (-1, -1, 0)))])
    body = model._pass

    def watched(*arguments: object) -> tuple[torch.Tensor, ...]:
        with NothingRead():
            return body(*arguments)  # type: ignore[arg-type]  # what forward hands over

    model._pass = watched  # type: ignore[method-assign]  # to look on
    assert model.forward(step, rows=step.law_rows, taps=(0, 3)).features is not None


def settle_on_device(module: Any) -> None:
    """Weights and buffers of a module lie on the pretended GPU from now on."""
    for part in module.modules():
        for kept in (part._parameters, part._buffers):
            for name in [name for name, tensor in kept.items() if tensor is not None]:
                tensor = kept.pop(name).detach()
                object.__setattr__(part, name, on_device(tensor))


@pytest.mark.parametrize("family", sorted(decoder.FAMILIES))
def test_a_pass_neither_waits_for_the_device_nor_mixes_it_with_the_host(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, tapes = tiny(family, hf.NAME), Tapes()
    want = fused.FusedModel(copy.deepcopy(module))
    with pretended_gpu(monkeypatch) as gpu:
        settle_on_device(module)
        got = fused.FusedModel(module, recorder=tapes)
        assert got.lanes.store.device.type == "cuda"
        step = pack([Segment(got.lanes.open(), 0, tuple(range(9)), some_tree(Random(3), 6))])
        gpu.waits.clear()
        for _ in range(3):  # as it is, recorded, replayed
            out = got.forward(step, rows=step.law_rows, taps=(0, 3))
        assert not gpu.waits
        assert tapes.replays == 2
        logits = out.logits.cpu()
    want.lanes.open()
    torch.testing.assert_close(logits, want.forward(step, rows=step.law_rows).logits, atol=2e-5, rtol=1e-4)


def doubled(numbers: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (numbers * 2.0,)


def numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def test_a_layout_is_recorded_once_and_results_are_the_callers_own() -> None:
    tapes = Tapes()
    passes, lanes = Graphs(tapes), torch.zeros(3)
    first = passes.run("a", lanes, numbers(1, 2), doubled)[0]
    assert (len(tapes.made), tapes.replays) == (1, 0)
    second = passes.run("a", lanes, numbers(3, 4), doubled)[0]
    third = passes.run("a", lanes, numbers(5, 6), doubled)[0]
    assert [x.tolist() for x in (first, second, third)] == [[2, 4], [6, 8], [10, 12]]
    assert (len(tapes.made), tapes.replays) == (1, 2)


def test_what_is_not_worth_it_is_not_recorded() -> None:
    tapes = Tapes()
    passes, lanes = Graphs(tapes), torch.zeros(3)
    for i in range(5):
        assert passes.run(None, lanes, numbers(i), doubled)[0].tolist() == [2 * i]
    assert not tapes.made


def test_recordings_go_when_the_lanes_move() -> None:
    tapes = Tapes()
    passes, lanes = Graphs(tapes), torch.ones(3)

    def run(value: int) -> float:
        place = lanes  # as a recorded pass holds on to it
        return float(passes.run("a", lanes, numbers(value), lambda n: (n * place[:1],))[0])

    assert [run(i) for i in range(3)] == [0, 1, 2]
    lanes = torch.full((6,), 10.0)
    assert [run(i) for i in range(3)] == [0, 10, 20]
    assert (len(tapes.made), tapes.replays) == (2, 4)


def test_lanes_that_grow_in_the_middle_of_a_text_change_no_pass() -> None:
    module, text = tiny("llama", hf.NAME, max_position_embeddings=512), [(i * 31 + 7) % 97 for i in range(200)]
    tapes = Tapes()
    found = []
    for model in (
        fused.FusedModel(copy.deepcopy(module)),
        fused.FusedModel(module, tiles=fused.COARSE, recorder=tapes),
    ):
        lane, rows, stores = model.lanes.open(), [], set()
        for at in range(0, 195, 3):
            step = pack([Segment(lane, at, tuple(text[at : at + 3]))])
            rows.append(model.forward(step, rows=step.law_rows).logits)
            model.lanes.settle(lane, text)
            stores.add(model.lanes.store.shape)
        assert len(stores) > 2
        found.append(torch.cat(rows))
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-4)
    assert len(tapes.made) > 2


def test_recordings_are_bounded_and_the_longest_unused_goes() -> None:
    tapes = Tapes()
    passes, lanes = Graphs(tapes, most=2), torch.zeros(1)
    for key in "abaca":
        passes.run(key, lanes, numbers(1), doubled)
    assert len(tapes.made) == 3  # b went, a was used in between
    passes.run("b", lanes, numbers(1), doubled)
    assert len(tapes.made) == 4


def test_where_recording_fails_passes_go_on_and_the_reason_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    tapes = Tapes(fault=RuntimeError("no such thing\nin this driver"))
    passes, lanes = Graphs(tapes), torch.zeros(1)
    with caplog.at_level(logging.WARNING, logger="sooner"):
        got = [passes.run(key, lanes, numbers(i), doubled)[0].tolist() for i, key in enumerate("aaabbb")]
    assert got == [[2.0 * i] for i in range(6)]
    assert len(tapes.made) == 1
    (message,) = [record.getMessage() for record in caplog.records]
    assert "RuntimeError: no such thing (SOONER_CUDA_GRAPHS=0" in message


def test_a_pass_that_reads_a_number_back_cannot_be_recorded(caplog: pytest.LogCaptureFixture) -> None:
    """The stand-in is as strict as a device; without it the tests above would show little."""
    passes, lanes = Graphs(Tapes()), torch.zeros(1)
    with caplog.at_level(logging.WARNING, logger="sooner"):
        for _ in range(3):
            assert passes.run("a", lanes, numbers(4), lambda n: (n * n.max().item(),))[0].tolist() == [16]
    assert "_local_scalar_dense cannot be recorded" in caplog.text


class Cuda:
    """Stands in for torch.cuda, and writes down in which order and where things are done."""

    def __init__(self, patch: pytest.MonkeyPatch, fault: str | None = None) -> None:
        self.said: list[str] = []
        self._fault = fault
        graph = SimpleNamespace(replay=lambda: self.said.append("replay"))
        patch.delenv(graphs.OFF, raising=False)
        patch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
        patch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(device=device))
        patch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
        patch.setattr(torch.cuda, "current_stream", lambda: "the usual stream")
        patch.setattr(torch.cuda, "device", lambda device: self.block(str(device)))
        patch.setattr(torch.cuda, "stream", self.block)
        patch.setattr(torch.cuda, "graph", self.record)

    @contextmanager
    def block(self, name: str) -> Iterator[None]:
        self.said.append(f"on {name}")
        yield
        self.said.append(f"off {name}")

    @contextmanager
    def record(self, graph: object, pool: str, stream: Any, *, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        self.said.append(f"record on {stream.device} in the {pool}")
        try:
            yield
        finally:  # as torch does when a recording was spoilt
            if self._fault:
                raise RuntimeError(self._fault)


def test_a_cuda_graph_is_recorded_and_replayed_on_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch)
    make = graphs.graphs_for(torch.device("cuda:1"))
    assert make is not None
    recorder, two = make(), torch.ones(2)
    assert recorder.capture(lambda: (two,)) == (two,)
    inside = ["on cuda:1", "on the usual stream", "record on cuda:1 in the pool"]
    assert cuda.said == [*inside, "off the usual stream", "off cuda:1"]
    recorder.replay()
    assert cuda.said[5:] == ["on cuda:1", "replay", "off cuda:1"]


def test_a_failed_recording_names_what_failed_first(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Cuda(monkeypatch, fault="operation failed due to a previous error during capture")
    passes, calls = Graphs(graphs.graphs_for(torch.device("cuda"))), []

    def body(numbers: torch.Tensor) -> tuple[torch.Tensor, ...]:
        calls.append(numbers)
        if len(calls) == 2:
            raise RuntimeError("operation not permitted when stream is capturing")
        return (numbers,)

    with caplog.at_level(logging.WARNING, logger="sooner"):
        for i in range(3):
            assert passes.run("a", torch.zeros(1), numbers(i), body)[0].tolist() == [i]
    assert "not permitted when stream is capturing" in caplog.text


def test_nothing_is_recorded_on_a_cpu_or_where_the_environment_forbids_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert graphs.graphs_for(torch.device("cpu")) is None
    monkeypatch.setenv(graphs.OFF, "0")
    assert graphs.graphs_for(torch.device("cuda")) is None
