"""Quantised weights in the native runtime: near what the codes stand for, and bits that depend on nothing else."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch

from sooner.core.step import Segment, pack
from sooner.core.tree import ancestors, chain
from sooner.errors import ModelError
from sooner.model import hf, native
from sooner.model.quantize import fits_int4, to_int4, to_int8
from sooner.testing import check_model
from tests.model.test_fused import run
from tests.model.test_hf import PROMPT, TREE
from tests.model.test_native import made, random_tree

SIZES = {"intermediate_size": 96}


@pytest.fixture(autouse=True)
def _registered() -> None:
    hf.register()


def dense(module: Any, kind: str) -> Any:
    """The module with the weights that its codes stand for; embeddings too where they are the head."""
    other = copy.deepcopy(module)
    head, embedding = other.get_output_embeddings(), other.get_input_embeddings()
    tied = head.weight is embedding.weight
    for part in other.modules():
        if isinstance(part, torch.nn.Linear):
            four = kind == "int4" and part is not head and fits_int4(*part.weight.shape)
            part.weight.data = (to_int4 if four else to_int8)(part.weight.data).dense()
    if tied:
        embedding.weight.data = head.weight.data
    return other


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen2", "qwen3", "phi3"])
def test_int8_is_the_model_with_the_weights_its_codes_stand_for(family: str, tied: bool) -> None:
    module = made(family, **SIZES, tie_word_embeddings=tied)
    want, features = run(hf.HFModel(dense(module, "int8")))
    got, seen = run(native.NativeModel(module, "int8"))
    # Rows are rounded to 16 bits before each product.
    assert (got - want).abs().max() < 2**-10 * want.abs().max()
    assert (seen - features).abs().max() < 2**-10 * features.abs().max()


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen2", "qwen3", "phi3"])
def test_int4_is_near_the_model_with_the_weights_its_codes_stand_for(family: str) -> None:
    module = made(family, **SIZES)
    want, _ = run(hf.HFModel(dense(module, "int4")))
    got, _ = run(native.NativeModel(module, "int4"))
    # Rows are rounded to 8 bits, each 32 numbers with a scale: off by 1 / 254 / sqrt(3) of their largest.
    assert (got - want).square().mean().sqrt() < 0.02 * want.std()
    assert not torch.equal(got, want)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_the_protocol_holds_whole_and_cut(kind: str) -> None:
    whole = native.NativeModel(made("llama", **SIZES), kind)
    early = whole.first_layers(1)
    assert check_model(whole, PROMPT, TREE) == 0
    assert check_model(early, PROMPT, TREE) == 0
    assert (whole.lanes.store.shape[0], early.lanes.store.shape[0]) == (3, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_the_bits_of_a_row_are_the_same_alone_in_trees_in_company_and_on_more_threads(
    dtype: torch.dtype, kind: str
) -> None:
    model = native.NativeModel(made("llama", **SIZES, head_dim=32).to(dtype), kind)
    dice = random.Random(7)
    text = [dice.randrange(97) for _ in range(40)]
    lane, other, company = (model.lanes.open() for _ in range(3))
    head = pack([Segment(lane, 0, tuple(text), law=False), Segment(other, 0, tuple(text), law=False)])
    model.forward(head, rows=head.law_rows)
    before = torch.get_num_threads()
    for size in (1, 2, 3, 5, 7, 8, 11, 15, 16, 19, 33):
        model.lanes.settle(lane, text)
        model.lanes.settle(company, [])
        tree = random_tree(dice, size)
        step = pack([Segment(company, 0, tuple(text[:size]), chain(text[:3])), Segment(lane, 40, (5,), tree)])
        torch.set_num_threads(1 + size % 2)
        rows = model.forward(step, rows=step.law_rows).logits[4:]
        for node in dice.sample(range(size), min(size, 3)):
            path = [5] + [tree.tokens[i] for i in ancestors(tree.parents)[node].nonzero().flatten().tolist()]
            model.lanes.settle(other, text)
            for at, token in enumerate(path):
                one = pack([Segment(other, 40 + at, (token,))])
                alone = model.forward(one, rows=one.law_rows).logits[0]
                model.lanes.settle(other, [*text, *path[: at + 1]])
            assert torch.equal(alone, rows[node + 1])
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["weight", "norm"])
def test_what_is_not_finite_is_not_rounded_away(kind: str, bad: float, where: str) -> None:
    module = made("llama", **SIZES)
    with torch.no_grad():
        layer = module.model.layers[1]
        (layer.mlp.down_proj.weight[0] if where == "weight" else layer.input_layernorm.weight)[3] = bad
    model = native.NativeModel(module, kind)
    step = pack([Segment(model.lanes.open(), 0, (1, 2, 3))])
    assert model.forward(step, rows=step.law_rows).logits.isnan().any()


def test_the_weights_take_half_or_a_third_and_no_second_copy_is_kept() -> None:
    def held(kind: str | None) -> int:
        module = made("llama", hidden_size=256, intermediate_size=512, tie_word_embeddings=True).bfloat16()
        model = native.NativeModel(module, kind)
        assert sum(p.numel() for p in module.parameters()) <= 256  # the final norm
        return sum(tensor.nbytes for tensor in model._packer.kept)

    plain = held(None)
    assert held("int8") < 0.53 * plain
    assert held("int4") < 0.36 * plain


def test_draft_heads_are_told_the_weights_as_they_were_and_refused_quantised_ones() -> None:
    for tied in (True, False):
        module = made("llama", tie_word_embeddings=tied)
        embedding, head = (
            part.weight.detach().clone()
            for part in (module.get_input_embeddings(), module.get_output_embeddings())
        )
        ends = native.NativeModel(module).ends()
        assert torch.equal(ends.embedding, embedding)
        assert torch.equal(ends.head(), head)
        torch.testing.assert_close(ends.project(torch.ones((2, 64))), torch.ones((2, 64)) @ head.t())
    with pytest.raises(ModelError, match="the target's weights are quantised"):
        native.NativeModel(made("llama"), "int8").ends()
