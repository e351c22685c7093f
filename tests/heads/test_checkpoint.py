"""Files of EAGLE heads: what is wrong in them is refused by name, or changes the drafts as the reference says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sooner.errors import ModelError
from sooner.heads import checkpoint
from sooner.heads.checkpoint import Checkpoint
from sooner.heads.eagle import EagleConfig, EagleHead, Rope
from tests.heads import eagle_files as files
from tests.heads.eagle_files import DRAFT, VOCAB, H, Settings, Tensors


def read(folder: Path, settings: Settings, tensors: Tensors) -> Checkpoint:
    return checkpoint.load(files.write(folder, settings, tensors))


def refused(folder: Path, settings: Settings, tensors: Tensors) -> str:
    with pytest.raises(ModelError) as caught:
        read(folder, settings, tensors)
    return str(caught.value)


def without(tensors: Tensors, *names: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name not in names}


THREE = files.eagle3()
SETTINGS, TENSORS = THREE
IDS = TENSORS["d2t"] + torch.arange(DRAFT)
SWAPPED = TENSORS["d2t"].clone()
SWAPPED[[3, 9]] = SWAPPED[[9, 3]]
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
OTHER_MARKS = torch.zeros(VOCAB, dtype=torch.bool)
OTHER_MARKS[:DRAFT] = True


@pytest.mark.parametrize(
    ("settings", "tensors", "named"),
    [
        ({}, {"d2t": IDS}, "Are they ids instead of offsets?"),
        ({}, {"d2t": SWAPPED}, "never fall"),
        ({}, {"d2t": TENSORS["d2t"] + 30}, "ids below 40"),
        ({}, {"d2t": -TENSORS["d2t"]}, "never fall"),
        ({}, {"d2t": TENSORS["d2t"][:-1]}, f"d2t must be {DRAFT} whole numbers"),
        ({}, {"d2t": TENSORS["d2t"].float()}, "whole numbers"),
        ({}, {"d2t": None}, "d2t is missing"),
        ({}, {"t2d": OTHER_MARKS}, "t2d marks other ids"),
        ({}, {"t2d": torch.ones(VOCAB, dtype=torch.bool)}, "t2d must mark 14 of 40 ids; it marks 40"),
        ({"draft_vocab_size": 13}, {}, "draft_vocab_size 13, but lm_head.weight says 14"),
        ({"hidden_size": 32}, {}, "hidden_size 32, but fc.weight says 16"),
        ({"intermediate_size": 32}, {}, "intermediate_size 32"),
        ({"target_hidden_size": 20}, {}, "no whole number of streams"),
        ({"num_attention_heads": 8}, {}, "does not fit 8 heads"),
        ({"num_key_value_heads": 4}, {}, "does not fit 4 heads, 4 key heads"),
        ({"num_hidden_layers": 2}, {}, "has 1 layer here, config.json says 2"),
        ({"hidden_act": "swoosh"}, {}, "unknown activation 'swoosh'"),
        ({"vocab_size": None}, {}, "needs vocab_size"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, {}, "unknown rope type 'yarn'"),
        ({"fc_norm": True}, {}, "says fc_norm (True), but its tensors are missing"),
        ({"fc_norm": False}, {f"fc_norm.{i}.weight": torch.ones(H) for i in range(3)}, "tensors are there"),
        ({"attention_bias": True}, {}, "says attention_bias (True), but its tensors are missing"),
        ({"bias": True}, {}, "says bias (True), but its tensors are missing"),
        ({"norm_output": True}, {}, "norm_output in an official config is ambiguous"),
        ({}, {"norm.weight": None}, "missing: norm.weight"),
        ({}, {"midlayer.mlp.up_proj.weight": None}, "missing: layers.0.mlp.gate_proj.weight / layers.0"),
        ({}, {"midlayer.self_attn.q_norm.weight": torch.ones(4)}, "not used: layers.0.self_attn.q_norm.weight"),
        ({}, {"layers.0.hidden_norm.weight": torch.ones(H)}, "name the same weight twice"),
        ({}, {"norm.weight": torch.ones(H + 1)}, "norm.weight is [17], not [16]"),
        ({}, {"embed_tokens.weight": torch.ones(VOCAB - 1, H)}, "embed_tokens is [39, 16]"),
        ({}, {"lm_head.weight": None}, "lacks lm_head.weight"),
        ({}, {"fc.weight": None}, "no fc.weight"),
        (
            {LAYER_IDS: [2, 4, 5], "eagle_config": {LAYER_IDS: [2, 4, 5]}},
            {},
            "do not agree",
        ),
    ],
    ids=str,
)  # fmt: skip
def test_what_the_files_contradict_is_refused_by_name(
    tmp_path: Path, settings: Settings, tensors: dict[str, torch.Tensor | None], named: str
) -> None:
    changed = {name: tensor for name, tensor in (TENSORS | tensors).items() if tensor is not None}
    assert named in refused(tmp_path, {k: v for k, v in (SETTINGS | settings).items() if v is not None}, changed)


def test_the_embedding_must_come_along_where_the_widths_differ(tmp_path: Path) -> None:
    settings, tensors = files.eagle3(target_hidden=24, own_embedding=True)
    assert read(tmp_path / "a", settings, tensors).embedding is not None
    said = refused(tmp_path / "b", settings, without(tensors, "embed_tokens.weight"))
    assert "embed_tokens.weight is missing" in said


def test_a_missing_bias_of_eagle_1_is_an_error_unless_its_config_says_so(tmp_path: Path) -> None:
    """The reference takes an absent `bias` for true, and then leaves the missing weight random."""
    settings, tensors = files.eagle1(bias=False)
    assert read(tmp_path / "a", settings, tensors).head.config.version == 1
    assert "leaves out bias (True)" in refused(tmp_path / "b", without(settings, "bias"), tensors)
    assert "says bias (False), but its tensors are there" in refused(tmp_path / "c", settings, files.eagle1()[1])


def test_the_library_layout_must_say_which_residual_it_means(tmp_path: Path) -> None:
    """Two readers of it take its absence for opposite values."""
    settings, tensors = files.speculators()
    assert "norm_before_residual" in refused(tmp_path, without(settings, "norm_before_residual"), tensors)
    assert "only eagle3 is supported" in refused(tmp_path, settings | {"speculators_model_type": "mtp"}, tensors)


@pytest.mark.parametrize(
    ("settings", "layers", "taps"),
    [
        ({}, 32, (2, 16, 29)),
        ({}, 30, (2, 15, 27)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 5, 9]}, 12, (1, 5, 9)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 11, 21]}}, 24, (2, 12, 22)),
    ],
)
def test_layer_ids_follow_the_convention_of_where_they_stand(
    tmp_path: Path, settings: dict[str, Any], layers: int, taps: tuple[int, ...]
) -> None:
    """At the top: streams entering a layer. In eagle_config: streams leaving it, which enter the next."""
    assert read(tmp_path, SETTINGS | settings, TENSORS).taps_for(layers) == taps


@pytest.mark.parametrize("ids", [[5, 1, 9], [1, 1, 9], [1, 5, 12], [-1, 5, 9], [1, 5]])
def test_layer_ids_a_target_does_not_have_are_refused(tmp_path: Path, ids: list[int]) -> None:
    made = read(tmp_path, SETTINGS | {"eagle_aux_hidden_state_layer_ids": ids}, TENSORS)
    with pytest.raises(ModelError, match="layer"):
        made.taps_for(12)


def test_eagle_1_reads_the_final_state(tmp_path: Path) -> None:
    assert read(tmp_path, *files.eagle1()).taps_for(32) == (32,)


def test_the_rope_base_is_the_heads_own(tmp_path: Path) -> None:
    """10000 where the head names none, even if its target has another."""
    bases = {
        "none": ({}, Rope()),
        "theta": ({"rope_theta": 500000.0}, Rope(500000.0)),
        "parameters": ({"rope_parameters": {"rope_type": "default", "rope_theta": 3000.0}}, Rope(3000.0)),
        "linear": ({"rope_scaling": {"type": "linear", "factor": 4.0}}, Rope(10000.0, "linear", 4.0)),
    }
    for name, (more, rope) in bases.items():
        assert read(tmp_path / name, SETTINGS | more, TENSORS).head.config.rope == rope
    assert torch.allclose(Rope(100.0, "linear", 4.0).frequencies(8) * 4, Rope(100.0).frequencies(8))


def test_llama_3_scaling_leaves_fast_turns_and_slows_the_others() -> None:
    plain, scaled = Rope(500000.0).frequencies(64), Rope(500000.0, "llama3", 8.0, 1.0, 4.0, 8192).frequencies(64)
    turns = 8192 * plain / (2 * torch.pi)
    assert torch.allclose(scaled[turns > 4], plain[turns > 4])
    assert torch.allclose(scaled[turns < 1], plain[turns < 1] / 8)
    between = (turns > 1) & (turns < 4)
    assert bool((scaled[between] < plain[between]).all() and (scaled[between] > plain[between] / 8).all())


def test_names_of_the_stream_norms_of_another_trainer_are_known(tmp_path: Path) -> None:
    named = files.with_fc_norm(TENSORS)
    renamed = {
        name.replace("fc_norm.0", "aux_norm_low").replace("fc_norm.1", "aux_norm_mid").replace(
            "fc_norm.2", "aux_norm_high"
        ): tensor
        for name, tensor in named.items()
    }  # fmt: skip
    a, b = read(tmp_path / "a", SETTINGS, named).head, read(tmp_path / "b", SETTINGS, renamed).head
    assert a.config.fc_norm
    assert all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def test_pickles_are_read_only_when_allowed_and_only_as_tensors(tmp_path: Path) -> None:
    folder = files.write(tmp_path / "a", *files.eagle1(), weights="pytorch_model.bin")
    with pytest.raises(ModelError, match="is a pickle"):
        checkpoint.load(folder)
    assert checkpoint.load(folder, pickles=True).head.config.bias
    torch.save({"fc.weight": "not a tensor"}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="does not hold tensors"):
        checkpoint.load(folder, pickles=True)
    torch.save({"fc.weight": Path("code")}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="cannot be read"):
        checkpoint.load(folder, pickles=True)


def test_a_folder_without_a_head_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config.json cannot be read"):
        checkpoint.load(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="is not an object"):
        checkpoint.load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"holds no model.safetensors"):
        checkpoint.load(tmp_path)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_what_is_saved_is_the_published_layout_and_reads_back(tmp_path: Path, kv_heads: int) -> None:
    config = EagleConfig(
        version=3, hidden=H, intermediate=24, heads=4, kv_heads=kv_heads, head_dim=4, vocab=VOCAB,
        draft_vocab=DRAFT, target_hidden=H, streams=3, fc_norm=True, rope=Rope(300.0),
    )  # fmt: skip
    torch.manual_seed(0)
    head = EagleHead(config)
    checkpoint.save(tmp_path, head, ids=IDS, taps=(2, 4, 5), notes={"target": "t"})
    names = set(checkpoint._tensors(tmp_path, pickles=False))
    assert names == set(files.with_fc_norm(TENSORS))
    made = checkpoint.load(tmp_path)
    assert made.head.config == config
    assert made.taps_for(8) == (2, 4, 5)
    assert made.ids is not None
    assert made.ids.tolist() == IDS.tolist()
    assert json.loads((tmp_path / "config.json").read_text())["sooner"] == {"target": "t"}
    for name, tensor in head.state_dict().items():
        assert torch.equal(made.head.state_dict()[name], tensor)
