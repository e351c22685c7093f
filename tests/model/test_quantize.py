"""Weights at fewer bits: what they stand for, how far off they are, and that rows keep their bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sooner.errors import ConfigError
from sooner.model import hf, quantize
from sooner.model.fused import FusedModel
from sooner.model.linear import pack
from sooner.model.load import load
from sooner.model.quantize import GROUP, Int8Linear, check, to_int4, to_int8
from tests.model.test_hf import tiny
from tests.tiny import make_tiny

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]


def weights(out: int, inputs: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(out * inputs)
    return (torch.randn((out, inputs), generator=generator) * 0.05).to(dtype)


def inputs(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn((rows, width), generator=torch.Generator().manual_seed(rows)).to(dtype)


def test_int8_is_off_by_half_a_step_of_its_output_at_most() -> None:
    weight = weights(96, 200)
    small = to_int8(weight)
    # The scale is rounded to bfloat16 (2**-9 of it), which may clip the largest weight by as much again.
    step = weight.abs().amax(1, keepdim=True) / 127
    assert (small.dense() - weight).abs().le(step * (0.5 + 127 * 2**-8)).all()
    assert (small.dense() - weight).square().mean().sqrt() < 0.31 * step.mean()  # uniform: 1 / sqrt(12) = 0.289


def test_int4_is_off_by_half_a_step_of_its_group_nearly_everywhere() -> None:
    weight = weights(96, 320)
    error = (to_int4(weight).dense() - weight).view(96, -1, GROUP)
    grouped = weight.view(96, -1, GROUP)
    step = (grouped.amax(-1) - grouped.amin(-1)) / 15
    assert (error.square().mean(-1).sqrt() / step).mean() < 0.3
    assert (
        error.abs() / step[..., None]
    ).max() < 2  # where clipping the end of a group costs less than keeping it


def test_weights_that_were_int4_already_come_out_as_they_went_in() -> None:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (64, 96), generator=generator)
    codes.view(64, -1, GROUP)[..., :2] = torch.tensor([0, 15])  # as files have them: the range is used
    scale = (torch.rand((64, 3, 1), generator=generator) + 0.5).bfloat16().float() / 64
    middle = torch.randn((64, 3, 1), generator=generator).bfloat16().float() / 64
    was = ((codes.view(64, 3, GROUP) - 8) * scale + middle).view(64, 96)
    assert (to_int4(was).dense() - was).abs().max() < 2**-8 * was.abs().max()
    assert torch.equal(to_int4(was).codes, codes.to(torch.uint8))


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_rows_and_groups_of_zeros_stay_zeros(kind: str) -> None:
    weight = weights(32, 64)
    weight[3] = 0
    weight[5, :32] = 0
    small = to_int8(weight) if kind == "int8" else to_int4(weight)
    assert not small.dense()[3].any()
    assert not small.dense()[5, :32].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("shape", [(96, 64), (192, 576), (48, 1536)])
def test_the_product_is_that_of_the_weights_the_codes_stand_for(
    kind: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    weight, bias = weights(*shape, dtype), weights(1, shape[0], dtype)[0]
    x = inputs(7, shape[1], dtype)
    dense = (to_int8(weight) if kind == "int8" else to_int4(weight)).dense().double()
    wanted = x.double() @ dense.t() + bias.double()
    got = pack([weight[:32], weight[32:]], [bias[:32], bias[32:]], kind)(x)
    assert got.dtype == dtype
    # Sums of float32 products, then one rounding each for the result and for adding the bias.
    bound = (2**-7 if dtype == torch.bfloat16 else 2**-20) * (x.double().abs() @ dense.abs().t()).amax()
    assert (got.double() - wanted).abs().max() < bound


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("width", [64, 576, 1536])
def test_a_row_does_not_depend_on_how_many_rows_there_are(kind: str, dtype: torch.dtype, width: int) -> None:
    linear = pack([weights(96, width, dtype)], [None], kind)
    for turn in range(10):
        x = inputs(33 + turn, width, dtype)
        full = linear(x)
        assert all(torch.equal(linear(x[:rows]), full[:rows]) for rows in (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 32))


def test_a_shape_that_int4_cannot_hold_is_kept_in_int8() -> None:
    for shape in ((33, 64), (32, 72)):
        weight = weights(*shape)
        linear = pack([weight], [None], "int4")
        assert isinstance(linear, Int8Linear)
        wanted = inputs(2, shape[1], torch.float32) @ to_int8(weight).dense().t()
        torch.testing.assert_close(linear(inputs(2, shape[1], torch.float32)), wanted, atol=1e-5, rtol=1e-5)


def held(linear: object) -> int:
    """Bytes of the tensors a linear map keeps, storage and all."""
    tensors = [getattr(linear, name) for name in linear.__slots__]  # type: ignore[attr-defined]  # dataclasses
    return sum(t.untyped_storage().nbytes() for t in tensors if isinstance(t, torch.Tensor))


def test_the_weights_take_half_or_a_third_and_no_second_copy_is_kept() -> None:
    weight = weights(256, 512, torch.bfloat16)
    plain = weight.untyped_storage().nbytes()
    assert held(pack([weight], [None], "int8")) < 0.51 * plain
    assert held(pack([weight], [None], "int4")) < 0.32 * plain  # 4 bits, and 32 more for every 32 weights


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_quantised_model_is_near_the_model(kind: str) -> None:
    from tests.model.test_fused import run

    hf.register()
    module = tiny("llama", hf.NAME)
    want, _ = run(hf.HFModel(module))
    got, _ = run(FusedModel(module, kind))
    assert not torch.equal(got, want)
    off = (got - want).square().mean().sqrt() / want.std()
    assert off < (0.03 if kind == "int8" else 0.4)


def test_what_is_not_allowed_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown quantize 'int9'.*Allowed: int4, int8"):
        check("int9", CPU, torch.float32)
    with pytest.raises(ConfigError, match="quantize int8 runs on the CPU only, not on cuda"):
        check("int8", torch.device("cuda"), torch.bfloat16)
    with pytest.raises(ConfigError, match="dtype float32 and bfloat16, not float16"):
        check("int4", CPU, torch.float16)
    assert quantize.KINDS == ("int4", "int8")
    folder = str(make_tiny(tmp_path / "model", seed=0))
    with pytest.raises(ConfigError, match="quantize int8 needs runtime native or fused"):
        load(folder, device="cpu", runtime="hf", quantize="int8")
    with pytest.raises(ConfigError, match=r"unknown quantize 'int9'"):
        load(folder, device="cpu", quantize="int9")
