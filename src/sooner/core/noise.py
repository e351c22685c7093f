"""Counter-based randomness: a hash of (seed, position, stream, round, token). Knows no law and no state.

The same key always gives the same noise, so what a request draws does not depend on its batch
neighbours, on how its prompt was cut, or on any drafter. The mixing function is the finaliser of
splitmix64 (Steele, Lea, Flood 2014), applied to integers modulo 2**64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Streams: noise for one purpose is independent of noise for another.
TARGET = 0  # the target's own choice at a position (rule *match*, and drafters that share it)
DRAFT = 1  # what a drafter draws under *reject*
COIN = 2  # accept or not
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


def exponential(keys: Tensor, ids: Tensor) -> Tensor:
    """Standard exponential noise, float64, for each pair of int64 `keys` and token `ids` (broadcast)."""
    bits = keys + (ids + 1) * _signed(_GOLDEN)
    bits = (bits ^ _shift(bits, 30)) * _signed(_MIX1)
    bits = (bits ^ _shift(bits, 27)) * _signed(_MIX2)
    bits = bits ^ _shift(bits, 31)
    # 52 bits and a half: with 53 the half is rounded away at the top, and the noise would be -0.0.
    return -torch.log((_shift(bits, 12).double() + 0.5) * 2.0**-52)


def _shift(bits: Tensor, count: int) -> Tensor:
    """Logical right shift of int64 (torch shifts arithmetically)."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def race(probs: Tensor, keys: Sequence[int]) -> Tensor:
    """Draw one id from each row of `probs` [n, V] (they need not sum to 1): int64 [n].

    The id with the smallest exponential / probability wins, which is a draw from the normalised row
    (the Gumbel-max trick). Only ids with mass get noise, so a token of probability 0 never comes out.
    """
    rows, ids = probs.nonzero(as_tuple=True)
    row_keys = torch.tensor([_signed(k) for k in keys], dtype=torch.int64, device=probs.device)
    score = torch.zeros(probs.shape, dtype=torch.float64, device=probs.device)
    score[rows, ids] = probs[rows, ids].double() / exponential(row_keys[rows], ids)
    return score.argmax(dim=-1)
