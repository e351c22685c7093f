"""Drafters made of the target's own weights: fewer bits (self:) and the first layers (early-exit)."""

from __future__ import annotations

import pytest
import torch

from sooner import LLM, SamplingParams
from sooner.core.step import Segment, pack
from sooner.draft.model import ModelDrafter
from sooner.errors import ConfigError
from sooner.model import fused, hf
from sooner.model.load import first_layers
from sooner.testing import ToyModel, check_drafter, check_model
from tests.model.test_hf import PROMPT, TREE, tiny
from tests.tiny import VOCAB, make_tiny

DRAFTS = ["self:int8", "self:int4", "early-exit", "early-exit:2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("own") / "model", seed=3, layers=3))


@pytest.mark.parametrize("draft", DRAFTS)
def test_they_keep_the_drafter_protocol(folder: str, draft: str) -> None:
    def make() -> ModelDrafter:
        drafter = LLM(folder, draft, dtype="float32", device="cpu").engine.guard.drafter
        assert isinstance(drafter, ModelDrafter)
        assert drafter.name == draft.partition(":")[0]
        return drafter

    check_drafter(make, VOCAB)


@pytest.mark.parametrize("runtime", ["fused", "hf"])
@pytest.mark.parametrize("draft", DRAFTS)
def test_the_text_is_that_of_plain_decoding(folder: str, draft: str, runtime: str) -> None:
    plain = LLM(folder, "none", dtype="float32", device="cpu", runtime=runtime)
    drafted = LLM(folder, draft, k=4, dtype="float32", device="cpu", runtime=runtime)
    for params in (SamplingParams(max_tokens=40), SamplingParams(max_tokens=40, temperature=0.7, seed=4)):
        want, got = plain.generate("once upon a time", params), drafted.generate("once upon a time", params)
        assert got.token_ids == want.token_ids
        assert got.stats.drafted > 0
        assert got.stats.draft_failures == 0


def test_int8_of_the_target_is_nearly_always_right(folder: str) -> None:
    stats = (
        LLM(folder, "self:int8", k=4, dtype="float32", device="cpu")
        .generate("the end", SamplingParams(max_tokens=60))
        .stats
    )
    assert stats.accepted > 0.8 * stats.drafted > 0


def test_a_quantised_target_drafts_for_itself_without_a_miss(folder: str) -> None:
    llm = LLM(folder, "self:int8", k=4, dtype="float32", device="cpu", quantize="int8")
    stats = llm.generate("the end", SamplingParams(max_tokens=60)).stats
    assert stats.accepted == stats.drafted > 0


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gpt_neox", "qwen3_moe", "gemma2"])
def test_the_first_layers_of_the_modules_are_a_model_that_shares_their_weights(family: str) -> None:
    hf.register()
    module = tiny(family, hf.NAME)
    whole = hf.HFModel(module)
    before = dict(module.named_parameters())
    early = whole.first_layers(1)
    assert early.lanes.store.shape[0] == 1
    assert check_model(early, PROMPT, TREE) < 1e-4
    assert set(early._module.parameters()) < set(before.values())
    assert dict(module.named_parameters()).keys() == before.keys()
    assert check_model(whole, PROMPT, TREE) < 1e-4


def test_the_first_layers_give_the_features_of_the_whole_model_after_the_final_norm() -> None:
    hf.register()
    whole = fused.FusedModel(tiny("llama", hf.NAME))
    early = whole.first_layers(1)
    text = tuple(PROMPT)
    outs = []
    for model, taps in ((whole, (0, 1)), (early, (0, 1))):
        step = pack([Segment(model.lanes.open(), 0, text)])
        outs.append(model.forward(step, rows=step.law_rows, taps=taps))
    assert outs[0].features is not None
    assert outs[1].features is not None
    assert torch.equal(outs[0].features[:, 0], outs[1].features[:, 0])
    # Tap 1 of the whole is what its second layer reads; of the early one, the same after the final norm.
    assert torch.equal(whole._shape.norm(outs[0].features[:, 1]), outs[1].features[:, 1])


@pytest.mark.parametrize("count", [0, 3, 4])
def test_a_count_of_layers_that_leaves_none_out_is_refused(folder: str, count: int) -> None:
    model = LLM(folder, "none", dtype="float32", device="cpu").target.model
    with pytest.raises(ConfigError, match="needs a number from 1 to 2: the target has 3 layers"):
        first_layers(model, count)


def test_a_model_that_cannot_be_cut_is_refused_by_name() -> None:
    from sooner.errors import ModelError

    with pytest.raises(ModelError, match="ToyModel cannot be cut"):
        first_layers(ToyModel(), 1)
