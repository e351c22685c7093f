"""HFModel against transformers' own eager passes: every supported family, chunks, trees, windows, neighbours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sooner.core.step import Segment, pack
from sooner.core.tree import Draft, chain
from sooner.errors import ModelError
from sooner.model import hf
from sooner.testing import check_model

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHARED_HEADS = {"num_key_value_heads": 2, "head_dim": 8}
PROMPT = [5, 9, 13, 40, 22, 7, 9, 13]
TREE = Draft((40, 3, 22, 11, 8, 61), (-1, -1, 0, 1, 3, 3))
PATHS: list[list[int]] = [[], [40], [3], [40, 22], [3, 11], [3, 11, 8], [3, 11, 61]]


def options(family: str) -> dict[str, Any]:
    """Small sizes for a family, with its own names, and a window shorter than the prompt where it has one."""
    config = type(AutoConfig.for_model(family))
    wanted = dict(SMALL)
    if family not in ("gpt2", "gpt_neox", "opt"):
        wanted["num_key_value_heads"] = 2
    if hasattr(config(), "head_dim") and family not in ("phi", "olmo", "olmo2", "olmo3", "phi3"):
        wanted["head_dim"] = 8
    if hasattr(config(), "sliding_window"):
        wanted["sliding_window"] = 5
    if family == "qwen2":
        wanted |= {"use_sliding_window": True, "max_window_layers": 1}
    if family in ("gemma2", "gemma3_text"):
        wanted |= {"query_pre_attn_scalar": 8}
    if family in ("qwen3_moe", "mixtral"):
        wanted |= {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    if family == "opt":
        wanted |= {"ffn_dim": 48, "word_embed_proj_dim": 32}
    return wanted


def tiny(family: str, attention: str, **extra: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(options(family) | extra))
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


@pytest.fixture(autouse=True)
def _registered() -> None:
    hf.register()


@pytest.mark.parametrize("family", sorted(hf.FAMILIES))
def test_every_node_of_a_tree_has_the_logits_of_its_own_path(family: str) -> None:
    module = tiny(family, "eager")
    with torch.no_grad():
        want = torch.stack([module(torch.tensor([PROMPT + path])).logits[0, -1] for path in PATHS])
    module.set_attn_implementation(hf.NAME)
    model = hf.HFModel(module)
    neighbour, lane = model.lanes.open(), model.lanes.open()
    head = pack([Segment(lane, 0, tuple(PROMPT[:5]), law=False)])
    assert model.forward(head, rows=head.law_rows).logits.shape == (0, 97)
    assert model.lanes.settle(lane, PROMPT) == 5
    step = pack([Segment(neighbour, 0, (4, 5, 6)), Segment(lane, 5, tuple(PROMPT[5:]), TREE)])
    got = model.forward(step, rows=step.law_rows).logits[1:]
    torch.testing.assert_close(got, want, atol=5e-6, rtol=1e-5)
    # A family whose window or soft-cap did not reach our attention would still pass on a flat model.
    assert want.std() > 1e-3


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "mistral"])
def test_a_model_keeps_the_protocol(family: str) -> None:
    model = hf.HFModel(tiny(family, hf.NAME))
    assert check_model(model, PROMPT, TREE) < 1e-5
    assert check_model(model, [7], chain([3, 9, 3])) < 1e-5


def test_a_window_is_felt() -> None:
    """The same model with a wider window gives other logits: the window is not simply ignored."""
    rows = []
    for window in (3, 100):
        model = hf.HFModel(tiny("mistral", hf.NAME, sliding_window=window))
        step = pack([Segment(model.lanes.open(), 0, tuple(PROMPT))])
        rows.append(model.forward(step, rows=step.law_rows).logits)
    assert (rows[0] - rows[1]).abs().max() > 1e-4


def test_taps_are_the_streams_transformers_shows() -> None:
    module = tiny("llama", "eager")
    with torch.no_grad():
        hidden = module(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
    module.set_attn_implementation(hf.NAME)
    model = hf.HFModel(module)
    step = pack([Segment(model.lanes.open(), 0, tuple(PROMPT))])
    features = model.forward(step, rows=step.law_rows, taps=(1, 3)).features
    assert features is not None
    torch.testing.assert_close(features, torch.stack([hidden[1][0], hidden[3][0]], dim=1), atol=5e-6, rtol=1e-5)


def test_lanes_that_grow_while_others_are_in_use_keep_their_keys() -> None:
    model = hf.HFModel(tiny("llama", hf.NAME))
    short, long = model.lanes.open(), model.lanes.open()
    step = pack([Segment(short, 0, tuple(PROMPT))])
    before = model.forward(step, rows=step.law_rows).logits
    model.lanes.settle(short, PROMPT[:-1])
    big = pack([Segment(long, 0, tuple(i % 97 for i in range(120)), law=False)])
    model.forward(big, rows=big.law_rows)
    again = pack([Segment(short, 7, (PROMPT[-1],))])
    after = model.forward(again, rows=again.law_rows).logits
    torch.testing.assert_close(before, after, atol=5e-6, rtol=1e-5)


def test_many_lanes_with_holes_between_them_do_not_mix() -> None:
    model = hf.HFModel(tiny("qwen2", hf.NAME))
    lanes = [model.lanes.open() for _ in range(9)]
    texts = {lane: [(lane * 13 + i) % 97 for i in range(3 + lane)] for lane in (lanes[0], lanes[4], lanes[8])}
    step = pack([Segment(lane, 0, tuple(text)) for lane, text in texts.items()])
    together = model.forward(step, rows=step.law_rows).logits
    for row, text in zip(together, texts.values(), strict=True):
        alone = pack([Segment(lanes[2], 0, tuple(text))])
        want = model.forward(alone, rows=alone.law_rows).logits[0]
        torch.testing.assert_close(row, want, atol=5e-6, rtol=1e-5)


def test_a_long_prompt_beside_decoding_rows_is_the_same_as_alone() -> None:
    model = hf.HFModel(tiny("llama", hf.NAME))
    a, b = model.lanes.open(), model.lanes.open()
    long = tuple(i * 7 % 97 for i in range(100))
    step = pack([Segment(a, 0, (5,)), Segment(b, 0, long)])
    row = model.forward(step, rows=step.law_rows).logits[1]
    model.lanes.settle(b, [])
    alone = pack([Segment(b, 0, long)])
    torch.testing.assert_close(row, model.forward(alone, rows=alone.law_rows).logits[0], atol=5e-6, rtol=1e-5)


def test_bfloat16_rows_are_bit_identical_alone_and_in_a_chain() -> None:
    """Greedy text would change with the draft length otherwise. Needs a processor with bfloat16 products."""
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    module = tiny("llama", hf.NAME, **sizes, head_dim=64).to(torch.bfloat16)
    model = hf.HFModel(module)
    text = [(i * 31 + 7) % 97 for i in range(90)]
    a, b = model.lanes.open(), model.lanes.open()
    for lane in (a, b):
        head = pack([Segment(lane, 0, tuple(text[:70]), law=False)])
        model.forward(head, rows=head.law_rows)
        model.lanes.settle(lane, text)
    block = pack([Segment(a, 70, (text[70],), chain(text[71:80]))])
    rows = model.forward(block, rows=block.law_rows).logits
    alone = []
    for i in range(70, 80):
        one = pack([Segment(b, i, (text[i],))])
        alone.append(model.forward(one, rows=one.law_rows).logits[0])
        model.lanes.settle(b, text)
    if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
        assert torch.equal(rows, torch.stack(alone))
    else:
        torch.testing.assert_close(rows, torch.stack(alone), atol=0.05, rtol=0.05)


def test_a_family_outside_the_list_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="bloom"):
        hf.check_family(AutoConfig.for_model("bloom"))


def test_an_attention_feature_we_do_not_have_is_refused_by_name() -> None:
    config = AutoConfig.for_model("gpt_oss", **SMALL, **SHARED_HEADS, num_local_experts=4, num_experts_per_tok=2)
    module = AutoModelForCausalLM.from_config(config, attn_implementation=hf.NAME).eval()
    with pytest.raises(ModelError, match="s_aux"):
        module(torch.tensor([PROMPT]), sooner_plan=None)


def test_a_rotary_embedding_that_follows_the_longest_text_is_kept_below_its_switch() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config = AutoConfig.for_model("llama", **SMALL, rope_parameters=rope)
    assert hf.context_limit(config) == 128


def test_a_pass_that_fails_leaves_nothing_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hf.HFModel(tiny("llama", hf.NAME))
    lane = model.lanes.open()
    step = pack([Segment(lane, 0, tuple(PROMPT))])
    with monkeypatch.context() as patched:
        patched.setattr(hf.attention, "attend", lambda *a, **k: (_ for _ in ()).throw(RuntimeError("no memory")))
        with pytest.raises(RuntimeError, match="no memory"):
            model.forward(step, rows=step.law_rows)
    assert model.lanes.settle(lane, PROMPT) == 0
