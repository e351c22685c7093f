"""The default controller behind the front door: what results say of it, and what is kept between runs."""

from __future__ import annotations

from pathlib import Path

import pytest

import sooner
from sooner.control.adaptive import AdaptiveController
from sooner.control.fixed import FixedController
from sooner.native import build

PARAMS = sooner.SamplingParams(max_tokens=60, ignore_eos=True)
PROMPT = [5, 6, 7, 8] * 8


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SOONER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_without_a_k_the_controller_decides_and_the_result_says_so(tiny: Path, cache: Path) -> None:
    llm = sooner.LLM(str(tiny), draft="lookup", dtype="float32")
    assert isinstance(llm.engine.controller, AdaptiveController)
    plain = sooner.LLM(llm.target, draft="none", k=0).generate(PROMPT, PARAMS)
    result = llm.generate(PROMPT, PARAMS)
    assert result.token_ids == plain.token_ids
    assert result.stats.speculation == "auto"
    assert result.stats.speedup is not None
    assert (plain.stats.speculation, plain.stats.why_off) == ("k=0", "k is 0")


def test_a_request_may_ask_for_none_or_for_a_k_of_its_own(tiny: Path, cache: Path) -> None:
    llm = sooner.LLM(str(tiny), draft="lookup", dtype="float32")
    off = llm.generate(PROMPT, sooner.SamplingParams(max_tokens=30, speculation="off")).stats
    assert (off.drafted, off.speculation, off.why_off) == (0, "off", "the request asked for none")
    three = llm.generate(PROMPT, sooner.SamplingParams(max_tokens=30, speculation=3)).stats
    assert three.speculation == "k=3"
    assert three.drafted > 0
    assert len(three.drafted_by_depth) <= 3


def test_a_k_for_all_is_kept_to(tiny: Path, cache: Path) -> None:
    llm = sooner.LLM(str(tiny), draft="lookup", k=2, dtype="float32")
    assert isinstance(llm.engine.controller, FixedController)
    assert llm.generate(PROMPT, PARAMS).stats.speculation == "k=2"


def test_costs_are_there_at_the_next_start(tiny: Path, cache: Path) -> None:
    first = sooner.LLM(str(tiny), draft="lookup", dtype="float32")
    for _ in range(3):
        first.generate(PROMPT, PARAMS)
    [_] = (cache / "costs").iterdir()
    again = sooner.LLM(str(tiny), draft="lookup", dtype="float32")
    assert isinstance(again.engine.controller, AdaptiveController)
    assert again.engine.controller.costs.passes.known


def test_costs_of_another_version_of_the_kernels_are_not_believed(
    tiny: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft step that had become eight times as fast stayed switched off for what it had cost before."""
    first = sooner.LLM(str(tiny), draft="lookup", dtype="float32")
    for _ in range(3):
        first.generate(PROMPT, PARAMS)
    assert isinstance(first.engine.controller, AdaptiveController)
    drafts = first.engine.controller.costs.drafts.seen
    monkeypatch.setattr(build, "sources", lambda: "another version")
    again = sooner.LLM(str(tiny), draft="lookup", dtype="float32")
    assert isinstance(again.engine.controller, AdaptiveController)
    assert drafts > 0 == again.engine.controller.costs.drafts.seen


def test_passes_are_measured_before_the_first_request_where_there_is_something_to_decide(
    tiny: Path, cache: Path
) -> None:
    first = sooner.LLM(str(tiny), draft="lookup", dtype="float32")
    assert isinstance(first.engine.controller, AdaptiveController)
    assert first.engine.controller.costs.passes.seen > 10
    first.engine.check()
    plain = sooner.LLM(first.target, draft="none")
    assert isinstance(plain.engine.controller, AdaptiveController)
    assert not plain.engine.controller.costs.passes.known


def test_a_model_that_came_loaded_leaves_no_file(tiny: Path, cache: Path) -> None:
    target = sooner.LLM(str(tiny), k=1, dtype="float32").target
    for _ in range(3):
        sooner.LLM(target, draft="lookup").generate(PROMPT, PARAMS)
    assert not (cache / "costs").exists()


def test_a_limit_of_memory_may_be_words_or_bytes(tiny: Path, cache: Path) -> None:
    words = sooner.LLM(str(tiny), kv_memory="2MiB", dtype="float32")
    assert words.engine.config.kv_memory == 2 * 2**20
    bytes_of = sooner.LLM(str(tiny), kv_memory=2**20, config=sooner.EngineConfig(max_requests=3), dtype="float32")
    assert (bytes_of.engine.config.kv_memory, bytes_of.engine.config.max_requests) == (2**20, 3)
    texts = words.generate([PROMPT, PROMPT[1:]], PARAMS)
    assert [len(text.token_ids) for text in texts] == [60, 60]
    assert words.target.model.lanes.bytes <= 2 * 2**20
