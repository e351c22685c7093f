"""FusedModel against HFModel: every family it serves, chunks, trees, windows, soft-caps, neighbours."""

from __future__ import annotations

import copy

import pytest
import torch

from sooner.core.step import Segment, pack
from sooner.core.tree import chain
from sooner.model import decoder, fused, hf
from sooner.testing import check_model
from tests.model.test_hf import PATHS, PROMPT, TREE, options, tiny


@pytest.fixture(autouse=True)
def _registered() -> None:
    hf.register()


def run(model: hf.HFModel | fused.FusedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and features of a tree over a prompt in two chunks, beside two neighbours of other lengths."""
    lanes = model.lanes
    long, lane, short = lanes.open(), lanes.open(), lanes.open()
    head = pack([Segment(lane, 0, tuple(PROMPT[:5]), law=False)])
    model.forward(head, rows=head.law_rows)
    lanes.settle(lane, PROMPT)
    step = pack(
        [
            Segment(long, 0, tuple(i % 97 for i in range(60))),
            Segment(lane, 5, tuple(PROMPT[5:]), TREE),
            Segment(short, 0, (4,), chain([5, 6])),
        ]
    )
    out = model.forward(step, rows=step.law_rows, taps=(0, 2, 3))
    assert out.features is not None
    return out.logits, out.features


@pytest.mark.parametrize("family", sorted(decoder.FAMILIES))
def test_it_is_the_transformers_model(family: str) -> None:
    module = tiny(family, hf.NAME)
    for name, parameter in module.named_parameters():
        if "norm" in name or "bias" in name:  # at their first values (0 or 1) a norm forgotten would not show
            torch.nn.init.normal_(parameter, std=0.3)
    want, features = run(hf.HFModel(copy.deepcopy(module)))
    got, seen = run(fused.FusedModel(module))
    assert want.std() > 1e-3
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(seen, features, atol=2e-5, rtol=1e-4)


def test_it_keeps_the_protocol() -> None:
    model = fused.FusedModel(tiny("llama", hf.NAME))
    assert check_model(model, PROMPT, TREE) < 1e-5
    assert len(PATHS) == len(TREE) + 1


def test_rope_scaling_is_that_of_the_config() -> None:
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 16}  # fmt: skip
    module = tiny("llama", hf.NAME, rope_parameters=rope)
    want, _ = run(hf.HFModel(copy.deepcopy(module)))
    torch.testing.assert_close(run(fused.FusedModel(module))[0], want, atol=2e-5, rtol=1e-4)


def test_the_emptied_module_keeps_no_second_copy_of_the_layers() -> None:
    module = tiny("llama", hf.NAME)
    fused.FusedModel(module)
    assert not any("layers" in name for name, _ in module.named_parameters())


def test_bfloat16_rows_are_bit_identical_alone_in_a_chain_and_in_a_batch() -> None:
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    model = fused.FusedModel(tiny("llama", hf.NAME, **sizes, head_dim=64).to(torch.bfloat16))
    text = [(i * 31 + 7) % 97 for i in range(90)]
    a, b, c = (model.lanes.open() for _ in range(3))
    for lane in (a, b):
        head = pack([Segment(lane, 0, tuple(text[:70]), law=False)])
        model.forward(head, rows=head.law_rows)
        model.lanes.settle(lane, text)
    block = pack([Segment(a, 70, (text[70],), chain(text[71:80])), Segment(c, 0, tuple(text[:40]))])
    rows = model.forward(block, rows=block.law_rows).logits[:10]
    alone = []
    for i in range(70, 80):
        one = pack([Segment(b, i, (text[i],))])
        alone.append(model.forward(one, rows=one.law_rows).logits[0])
        model.lanes.settle(b, text)
    if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
        assert torch.equal(rows, torch.stack(alone))
    else:
        torch.testing.assert_close(rows, torch.stack(alone), atol=0.05, rtol=0.05)


def test_options_cover_every_family() -> None:
    assert all(options(family) for family in decoder.FAMILIES)
