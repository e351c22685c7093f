"""The kernels in registers of other widths than this machine's: their tests, compiled as for other processors.

Knows not what is faster. A vector of 16 floats where registers hold 8 lay in memory, and nobody saw it, since only
one width was ever compiled here.
"""

from __future__ import annotations

import ctypes

import pytest

from sooner.native import build
from tests.model import test_native as whole
from tests.model import test_native_quantize as fewer

_registered = whole._registered
test_float32 = whole.test_it_is_the_transformers_model
test_bfloat16 = whole.test_in_bfloat16_it_is_as_near_to_float32_as_the_transformers_model
test_product = whole.test_a_product_of_bfloat16_is_exact_up_to_the_rounding_of_float32_sums
test_bits = whole.test_the_bits_of_a_row_are_the_same_in_passes_of_every_number_of_rows
test_where_they_lie = whole.test_weights_read_where_they_lie_give_the_bits_of_packed_ones
test_int8 = fewer.test_int8_is_the_model_with_the_weights_its_codes_stand_for
test_int4 = fewer.test_int4_is_near_the_model_with_the_weights_its_codes_stand_for


@pytest.fixture(autouse=True, params=[(4, 16), (4, 32), (8, 16)], ids=lambda kind: "{} of {}".format(*kind))
def registers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many floats in a register, so many registers."""
    more, made = [f"{name}={n}" for name, n in zip(("W", "REGISTERS"), request.param, strict=True)], build.library

    def narrower(source: str, *defines: str) -> ctypes.CDLL | None:
        return made(source, *defines, *more)

    monkeypatch.setattr(build, "library", narrower)
