"""A packed row is the same bits alone and in company.

oneDNN multiplies a single bfloat16 row with another kernel. Over 1536 inputs about one row in eight then
differed in a bit, and a greedy text with it: plain decoding runs one row, a draft of k runs k + 1.
"""

from __future__ import annotations

import pytest
import torch

from sooner.model.linear import pack

ROWS = 33
NATIVE = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
# Where the processor does not multiply bfloat16 itself the promise is to rounding only.
TOLERANCE = 0.0 if NATIVE else 0.1


@pytest.mark.parametrize("inputs", [64, 576, 960, 1536, 2048])
def test_a_row_does_not_depend_on_how_many_rows_there_are(inputs: int) -> None:
    generator = torch.Generator().manual_seed(inputs)
    weight = (torch.randn((192, inputs), generator=generator) * 0.05).bfloat16()
    linear = pack([weight], [None])
    different = 0
    for _ in range(100):
        x = torch.randn((ROWS, inputs), generator=generator).bfloat16()
        alone = linear(x[:1])[0].float()
        company = [linear(x[:rows])[0].float() for rows in (2, 3, 4, 8, 9, 16, 17, ROWS)]
        different += any((row - alone).abs().max().item() > TOLERANCE for row in company)
    assert different == 0


def test_where_onednn_has_no_bfloat16_kernels_weights_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing raises on processors without AVX-512, and no bfloat16 model could be loaded by `fused`."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn((n, 32), generator=generator).bfloat16() for n in (8, 3))
    torch.testing.assert_close(pack([weight], [None])(x), x @ weight.T)
