"""Medusa files: every layout is read as written, and what does not fit together is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sooner.errors import ModelError
from sooner.heads.medusa import MedusaHeads, load
from tests.heads.medusa_files import (
    Head,
    blocks_layout,
    expected_logits,
    heads_only,
    merged,
    official,
    pickled,
    some_heads,
)

HIDDEN, VOCAB = 6, 11
STATE = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(9))
LM_HEAD = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(10))


def logits(heads: MedusaHeads) -> list[Tensor]:
    outs = [LM_HEAD if head.out is None else head.out for head in heads.heads]
    return [head.state(STATE[None])[0] @ out.T for head, out in zip(heads.heads, outs, strict=True)]


def check(heads: MedusaHeads, written: list[Head], *, bias: bool = True) -> None:
    expected = expected_logits(written, STATE, LM_HEAD, bias=bias)
    assert len(heads.heads) == len(written)
    for mine, theirs in zip(logits(heads), expected, strict=True):
        assert torch.allclose(mine.double(), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("vocab", [VOCAB, None], ids=["v1", "v2"])
@pytest.mark.parametrize("blocks", [1, 2])
def test_heads_alone_are_read(tmp_path: Path, vocab: int | None, blocks: int) -> None:
    """v1 or v2 is seen from the tensors; the published configs' number of heads is wrong."""
    written = some_heads(3, blocks, HIDDEN, vocab)
    heads = load(heads_only(tmp_path, written, **({"version": "2"} if vocab is None else {})))
    check(heads, written)
    assert heads.own_lm_heads == (vocab is not None)


@pytest.mark.parametrize("vocab", [VOCAB, None], ids=["v1", "v2"])
@pytest.mark.parametrize("shards", [False, True], ids=["one file", "shards"])
def test_heads_merged_into_a_model_are_read(tmp_path: Path, vocab: int | None, shards: bool) -> None:
    written = some_heads(4, 1, HIDDEN, vocab)
    check(load(merged(tmp_path, written, shards)), written)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
def test_the_blocks_layout_is_read(tmp_path: Path, bias: bool, prefix: str) -> None:
    written = some_heads(3, 2, HIDDEN, VOCAB)
    check(load(blocks_layout(tmp_path, written, bias=bias, prefix=prefix)), written, bias=bias)


def test_one_lm_head_for_all(tmp_path: Path) -> None:
    written = some_heads(3, 1, HIDDEN, VOCAB)
    heads = load(blocks_layout(tmp_path, written, bias=True, one_lm_head=True))
    check(heads, [(blocks, written[0][1]) for blocks, _ in written])


def test_a_token_map_names_the_targets_ids(tmp_path: Path) -> None:
    written = some_heads(2, 1, HIDDEN, 4)
    heads = load(blocks_layout(tmp_path, written, bias=True, token_map=[9, 2, 5, 7]))
    assert heads.ids is not None
    assert heads.ids.tolist() == [9, 2, 5, 7]
    with pytest.raises(ModelError, match="names id 9; the target has ids up to 7"):
        heads.check_target(HIDDEN, 8)


def test_pickles_are_read_only_if_allowed(tmp_path: Path) -> None:
    written = some_heads(2, 1, HIDDEN, VOCAB)
    pickled(tmp_path, written)
    with pytest.raises(ModelError, match=r"medusa_lm_head.pt is a pickle, which can run code"):
        load(tmp_path)
    check(load(tmp_path, pickles=True), written)


def test_a_pickle_that_is_more_than_tensors_is_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
            return (__import__("os").system, (f"touch {tmp_path}/ran",))

    torch.save({"0.0.linear.weight": Evil()}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ModelError, match="more than tensors"):
        load(tmp_path, pickles=True)
    assert not (tmp_path / "ran").exists()


def without(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {n: t for n, t in tensors.items() if n != name}


def renamed(old: str, new: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {new if n == old else n: t for n, t in tensors.items()}


def put(name: str, *shape: int) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: tensors | {name: torch.zeros(*shape)}


WRONG = [
    (without("1.0.linear.bias"), r"the heads lack 1\.0\.linear\.bias"),
    (without("1.1.weight"), "some heads have an LM head of their own and some have none"),
    (lambda t: {n: x for n, x in t.items() if not n.startswith("1.")}, r"the heads are \[0, 2\]: one is missing"),
    (put("0.0.linear.scale", 3), r"tensor '0\.0\.linear\.scale' is none that Medusa heads have"),
    (put("lm_head.weight", 3, 3), r"tensor 'lm_head\.weight' is none that Medusa heads have"),
    (put("2.1.bias", 3), r"tensor '2\.1\.bias' is none"),
    (put("2.0.linear.weight", HIDDEN, HIDDEN + 1), r"block 0 of head 2 is \[6, 7\], expected \[6, 6\]"),
    (put("2.0.linear.bias", HIDDEN - 1), r"the bias of block 0 of head 2 is \[5\], expected \[6\]"),
    (put("1.1.weight", VOCAB + 1, HIDDEN), r"the LM head of head 1 is \[12, 6\], expected \[11, 6\]"),
    (renamed("0.1.weight", "0.2.weight"), r"head 0 has 1 blocks, so its LM head is 0\.1\.weight, not 0\.2"),
    (renamed("0.0.linear.weight", "0.3.linear.weight"), "one is missing"),
]


@pytest.mark.parametrize(("change", "named"), WRONG, ids=[named[:40] for _, named in WRONG])
def test_tensors_that_do_not_fit_together_are_named(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], named: str
) -> None:
    save_file(change(official(some_heads(3, 1, HIDDEN, VOCAB))), tmp_path / "medusa_lm_head.safetensors")
    with pytest.raises(ModelError, match=named):
        load(tmp_path)


def test_a_config_that_contradicts_the_tensors_is_named(tmp_path: Path) -> None:
    heads_only(tmp_path, some_heads(3, 1, HIDDEN, VOCAB), medusa_num_layers=2)
    with pytest.raises(ModelError, match=r"config\.json says medusa_num_layers 2, the tensors say 1"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"medusa_fc_bias": True}, "block 0 of head 0 has no bias, but medusa_fc_bias is true"),
        ({"num_heads": 4}, "config.json says num_heads 4, the tensors say 3"),
        ({"num_hidden_layers": 3}, "config.json says num_hidden_layers 3, the tensors say 1"),
    ],
)
def test_a_config_that_contradicts_the_blocks_layout_is_named(
    tmp_path: Path, settings: dict[str, object], named: str
) -> None:
    blocks_layout(tmp_path, some_heads(3, 1, HIDDEN, VOCAB), bias=False, **settings)
    with pytest.raises(ModelError, match=named):
        load(tmp_path)


def test_a_bias_that_the_config_does_not_announce_is_named(tmp_path: Path) -> None:
    blocks_layout(tmp_path, some_heads(3, 1, HIDDEN, VOCAB), bias=True, medusa_fc_bias=False)
    with pytest.raises(ModelError, match="has a bias, but medusa_fc_bias is false"):
        load(tmp_path)


def test_a_token_map_that_repeats_itself_is_named(tmp_path: Path) -> None:
    blocks_layout(tmp_path, some_heads(2, 1, HIDDEN, 3), bias=True, token_map=[4, 2, 4])
    with pytest.raises(ModelError, match="the token map names an id twice"):
        load(tmp_path)


def test_folders_without_heads_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds no Medusa heads"):
        load(tmp_path)
    with pytest.raises(ModelError, match="is no folder"):
        load(tmp_path / "nowhere")


def test_an_index_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    index = {"weight_map": {"medusa_head.0.0.linear.weight": "../elsewhere.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="outside its folder"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("hidden", "vocab", "named"),
    [
        (HIDDEN + 1, VOCAB, "states of width 6, the target's have 7"),
        (HIDDEN, 10, "among 11 ids, the target has 10"),
    ],
)
def test_heads_of_another_target_are_named(tmp_path: Path, hidden: int, vocab: int, named: str) -> None:
    heads = load(heads_only(tmp_path, some_heads(2, 1, HIDDEN, VOCAB)))
    heads.check_target(HIDDEN, VOCAB)
    with pytest.raises(ModelError, match=named):
        heads.check_target(hidden, vocab)
