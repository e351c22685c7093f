"""Counter-based randomness: a hash of (seed, position, stream, round, token). Knows no law and no state.

The same key always gives the same noise, so what a request draws does not depend on its batch
neighbours, on how its prompt was cut, or on any drafter. The mixing function is the finaliser of
splitmix64 (Steele, Lea, Flood 2014), applied to integers modulo 2**64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sooner.core.host import sent
from sooner.native import law as native

# Streams: noise for one purpose is independent of noise for another.
TARGET = 0  # the target's own choice at a position (rule *match*, and drafters that share it)
DRAFT = 1  # what a drafter draws under *reject*
COIN = 2  # accept or not
COPY = 4  # seeds of the second and further texts of one prompt
RESIDUAL = 3  # the correction or bonus token under *reject*

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * _MIX1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX2) & _MASK
    return value ^ (value >> 31)


def key(seed: int, position: int, stream: int, *extra: int) -> int:
    """A 64-bit key. `position` is the absolute position of the token to be chosen.

    Under *reject* the noise of one round must not return in the next, so `extra` holds the root's
    position, which differs from round to round, and the number of the draw within the round.
    """
    # The seed goes through as many rounds as any part, or key(a, b) would be key(b, a).
    state = 0
    for part in (seed, position, stream, *extra):
        state = _mix((state ^ _mix((part + _GOLDEN) & _MASK)) + _GOLDEN & _MASK)
    return state


def uniform(key: int) -> float:
    """One number in [0, 1), a multiple of 2**-53."""
    return (_mix(key) >> 11) * 2.0**-53


def exponential(keys: Tensor | int, ids: Tensor) -> Tensor:
    """Standard exponential noise, float64, for each pair of signed 64-bit `keys` and token `ids` (broadcast)."""
    bits = keys + (ids + 1) * _signed(_GOLDEN)
    bits = (bits ^ _shift(bits, 30)) * _signed(_MIX1)
    bits = (bits ^ _shift(bits, 27)) * _signed(_MIX2)
    bits = bits ^ _shift(bits, 31)
    # 52 bits and a half: with 53 the half is rounded away at the top, and the noise would be -0.0.
    return -torch.log((_shift(bits, 12).double() + 0.5) * 2.0**-52)


def gumbel(key: int, ids: Tensor) -> Tensor:
    """The noise of `race` on the scale of log-probabilities: it draws the id whose log p + gumbel is largest."""
    return -exponential(_signed(key), ids).log()


def _shift(bits: Tensor, count: int) -> Tensor:
    """Logical right shift of int64 (torch shifts arithmetically)."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def race(probs: Tensor, keys: Sequence[int], ids: Tensor | None = None) -> Tensor:
    """Draw one id from each row of `probs` [n, K] (they need not sum to 1): int64 [n]. ids: as in race_row."""
    drawn = [race_row(probs, r, key, ids) for r, key in enumerate(keys)]
    return torch.tensor(drawn, dtype=torch.int64, device=probs.device)


def race_rows(probs: Tensor, keys: Sequence[int]) -> list[int]:
    """race_row of every row of `probs` at once, columns as ids: for devices, which are waited for once."""
    names = torch.arange(probs.shape[-1], device=probs.device)
    noise = exponential(sent([_signed(key) for key in keys], torch.int64, probs.device)[:, None], names)
    drawn: list[int] = (probs.double() / noise).argmax(-1).tolist()
    return drawn


def race_row(probs: Tensor, row: int, key: int, ids: Tensor | None = None) -> int:
    """Draw one id from one row of `probs` [n, K], which need not sum to 1.

    ids: [n, K], the id each column stands for; the columns themselves by default.

    The id with the smallest exponential / probability wins, which is a draw from the normalised row
    (the Gumbel-max trick). A probability of 0 scores 0, so such a token never comes out.
    """
    if native.races(probs, ids):
        return native.race(probs, row, key, ids)
    names = torch.arange(probs.shape[-1], device=probs.device) if ids is None else ids[row]
    return int(names[(probs[row].double() / exponential(_signed(key), names)).argmax()])
