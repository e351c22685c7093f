"""The kernels in registers of other widths than this machine's: their tests, compiled as for other processors.

Knows not what is faster. A vector of 16 floats where registers hold 8 lay in memory, and nobody saw it, since only
one width was ever compiled here.
"""

from __future__ import annotations

import ctypes

import pytest

from sooner.native import build
from tests.model.test_native import (
    _registered as _registered,
)
from tests.model.test_native import (
    test_in_bfloat16_it_is_as_near_to_float32_as_the_transformers_model as test_bfloat16,
)
from tests.model.test_native import (
    test_it_is_the_transformers_model as test_float32,
)
from tests.model.test_native import (
    test_the_bits_of_a_row_are_the_same_in_passes_of_every_number_of_rows as test_bits,
)
from tests.model.test_native import (
    test_weights_read_where_they_lie_give_the_bits_of_packed_ones as test_where_they_lie,
)
from tests.model.test_native_quantize import (
    test_int4_is_near_the_model_with_the_weights_its_codes_stand_for as test_int4,
)
from tests.model.test_native_quantize import (
    test_int8_is_the_model_with_the_weights_its_codes_stand_for as test_int8,
)

__all__ = ["test_bfloat16", "test_bits", "test_float32", "test_int4", "test_int8", "test_where_they_lie"]


@pytest.fixture(autouse=True, params=[(4, 16), (4, 32), (8, 16)], ids=lambda kind: "{} of {}".format(*kind))
def registers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many floats in a register, so many registers."""
    more, made = [f"{name}={n}" for name, n in zip(("W", "REGISTERS"), request.param, strict=True)], build.library

    def narrower(source: str, *defines: str) -> ctypes.CDLL | None:
        return made(source, *defines, *more)

    monkeypatch.setattr(build, "library", narrower)
