"""NativeModel against HFModel: every family it serves, trees, windows, soft-caps, neighbours; and its bits."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch

from sooner.core.step import Segment, pack
from sooner.core.tree import Draft, ancestors, chain
from sooner.model import decoder, hf, native
from sooner.native import build
from sooner.testing import check_model
from tests.model.test_fused import run
from tests.model.test_hf import PROMPT, TREE, tiny

SIZES = {"hidden_size": 64, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(autouse=True)
def _registered() -> None:
    hf.register()


def made(family: str, **extra: Any) -> Any:
    head = {} if family in ("phi3", "olmo2") else {"head_dim": 16}
    module = tiny(family, hf.NAME, **SIZES | head | extra)
    for name, parameter in module.named_parameters():
        if "norm" in name or "bias" in name:  # at their first values (0 or 1) a norm forgotten would not show
            torch.nn.init.normal_(parameter, std=0.3)
    return module


def test_this_machine_has_a_compiler() -> None:
    # Without one every test below would be about nothing.
    assert build.library("pass.c", "BF16=0") is not None


@pytest.mark.parametrize("family", sorted(decoder.FAMILIES))
def test_it_is_the_transformers_model(family: str) -> None:
    module = made(family)
    want, features = run(hf.HFModel(copy.deepcopy(module)))
    assert native.serves(module)
    got, seen = run(native.NativeModel(module))
    assert want.std() > 1e-3
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(seen, features, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def test_in_bfloat16_it_is_as_near_to_float32_as_the_transformers_model(family: str) -> None:
    module = made(family, head_dim=32)
    exact, _ = run(hf.HFModel(copy.deepcopy(module)))
    theirs, _ = run(hf.HFModel(copy.deepcopy(module).to(torch.bfloat16)))
    ours, features = run(native.NativeModel(module.to(torch.bfloat16)))
    assert features.dtype == torch.bfloat16
    assert (ours - exact).square().mean() < 1.2 * (theirs.float() - exact).square().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", sorted(decoder.FAMILIES - {"olmo2", "phi3"}) + ["phi3"])
def test_weights_read_where_they_lie_give_the_bits_of_packed_ones(family: str, dtype: torch.dtype) -> None:
    sizes = {"hidden_size": 128} if family == "phi3" else {"head_dim": 32}
    module = made(family, vocab_size=99, **sizes).to(dtype)  # 99: the last panel of the head is not whole
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    got, seen = run(native.NativeModel(module, borrow=True))
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    want, features = run(native.NativeModel(module))
    assert torch.equal(got, want)
    assert torch.equal(seen, features)


def test_a_target_that_is_borrowed_shares_its_ends() -> None:
    module = made("llama", tie_word_embeddings=True)
    ends = native.NativeModel(module, borrow=True).ends()
    assert ends.embedding is module.model.embed_tokens.weight
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(ends.project(x), module.lm_head(x))


def test_it_keeps_the_protocol() -> None:
    assert check_model(native.NativeModel(made("llama")), PROMPT, TREE) < 1e-5


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_may_be_the_head_or_a_table_of_their_own(tied: bool) -> None:
    module = made("llama", tie_word_embeddings=tied)
    want, _ = run(hf.HFModel(copy.deepcopy(module)))
    torch.testing.assert_close(run(native.NativeModel(module))[0], want, atol=2e-5, rtol=1e-4)


def test_rope_scaling_is_that_of_the_config() -> None:
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 16}  # fmt: skip
    module = made("llama", rope_parameters=rope)
    want, _ = run(hf.HFModel(copy.deepcopy(module)))
    torch.testing.assert_close(run(native.NativeModel(module))[0], want, atol=2e-5, rtol=1e-4)


def test_a_window_that_the_family_does_not_look_at_is_not_applied() -> None:
    # The setting was taken from any configuration that had it; llama's modules see the whole text all the same.
    module = made("llama", sliding_window=3)
    want, _ = run(hf.HFModel(copy.deepcopy(module)))
    torch.testing.assert_close(run(native.NativeModel(module))[0], want, atol=2e-5, rtol=1e-4)


def test_the_emptied_module_keeps_no_second_copy() -> None:
    module = made("llama", tie_word_embeddings=True)
    native.NativeModel(module)
    assert sum(parameter.numel() for parameter in module.parameters()) <= SIZES["hidden_size"]  # the final norm


def test_other_sizes_devices_and_activations_are_not_served() -> None:
    assert not native.serves(tiny("llama", hf.NAME))  # heads of 8
    assert not native.serves(made("llama", hidden_act="relu"))
    assert not native.serves(made("llama").half())


def random_tree(dice: random.Random, size: int) -> Draft:
    parents, tokens = [], []
    for node in range(size):
        parent = dice.randrange(-1, node)
        taken = {t for t, p in zip(tokens, parents, strict=True) if p == parent}
        parents.append(parent)
        tokens.append(next(t for t in iter(lambda: dice.randrange(97), None) if t not in taken))
    return Draft(tuple(tokens), tuple(parents))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("window", [None, 12])
def test_the_bits_of_a_row_are_the_same_alone_in_chains_in_trees_and_in_company(
    dtype: torch.dtype, window: int | None
) -> None:
    family = "llama" if window is None else "mistral"
    model = native.NativeModel(
        made(family, head_dim=32, **{} if window is None else {"sliding_window": window}).to(dtype)
    )
    dice = random.Random(5)
    text = [dice.randrange(97) for _ in range(70)]
    a, b, c = (model.lanes.open() for _ in range(3))
    for trial in range(8):
        tree = random_tree(dice, dice.randrange(1, 24))
        start = dice.randrange(1, 60)
        model.lanes.settle(a, [])
        head = pack([Segment(a, 0, tuple(text[:start]), law=False)])
        model.forward(head, rows=head.law_rows)
        model.lanes.settle(a, text[:start])
        company = Segment(c, 0, tuple(text[: trial + 3]), chain(text[:trial]))
        model.lanes.settle(c, [])
        step = pack([company, Segment(a, start, (text[start],), tree)])
        torch.set_num_threads(1 + trial % 2)
        first = step.law_starts[1]
        assert first is not None
        rows = model.forward(step, rows=step.law_rows).logits[first:]
        for node, above in enumerate(ancestors(tree.parents)):
            model.lanes.settle(b, [])  # the path as plain text, one token at a time
            path = text[: start + 1] + [tree.tokens[i] for i in above.nonzero().flatten().tolist()]
            for at, token in enumerate(path):
                one = pack([Segment(b, at, (token,))])
                alone = model.forward(one, rows=one.law_rows).logits[0]
                model.lanes.settle(b, path[: at + 1])
            assert torch.equal(alone, rows[node + 1])
            if node == 3:
                break


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_bits_of_a_row_are_the_same_in_passes_of_every_number_of_rows(dtype: torch.dtype) -> None:
    """Products go in tiles of up to 14 rows, as even as can be, or of 8: none has an order of its own."""
    model = native.NativeModel(made("llama", head_dim=32).to(dtype))
    dice = random.Random(7)
    lane = model.lanes.open()
    text = [dice.randrange(97) for _ in range(45)]
    whole = pack([Segment(lane, 0, (text[0],), chain(text[1:]))])
    right = model.forward(whole, rows=whole.law_rows).logits
    for count in range(1, len(text)):
        model.lanes.settle(lane, [])
        step = pack([Segment(lane, 0, (text[0],), chain(text[1:count]))])
        assert torch.equal(model.forward(step, rows=step.law_rows).logits, right[:count]), count


def test_a_product_of_bfloat16_is_exact_up_to_the_rounding_of_float32_sums() -> None:
    """Where a processor multiplies no pairs of bfloat16 they are parted, and the rest of a part is no mantissa."""
    module = made("llama", head_dim=32).to(torch.bfloat16)
    model = native.NativeModel(copy.deepcopy(module))
    model.lanes.open()
    step = pack([Segment(0, 0, (1,), chain(list(range(2, 20))))])
    out = model.forward(step, rows=step.law_rows, taps=(3,))  # the last one: what the head reads
    assert out.features is not None
    want = out.features.view(len(out.logits), -1).double() @ module.lm_head.weight.double().T
    torch.testing.assert_close(out.logits.double(), want, atol=1e-5, rtol=1e-5)


def test_logits_that_are_not_finite_stay_so() -> None:
    module = made("llama")
    with torch.no_grad():
        module.model.layers[1].mlp.down_proj.weight[0] = torch.nan
    step = pack([Segment(0, 0, (1, 2, 3))])
    model = native.NativeModel(module)
    model.lanes.open()
    assert model.forward(step, rows=step.law_rows).logits.isnan().any()
