"""The noise: uniform, independent of everything but its key, and never on the wrong side of an edge."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sooner.core import noise
from tests.core.goodness import LIMIT, chi_square, independent, off_by, uniform_fit

STREAMS = (noise.TARGET, noise.DRAFT, noise.COIN, noise.RESIDUAL)
COUNT = 20_000
_MASK = 2**64 - 1


def _as_int64(keys: list[int]) -> Tensor:
    return torch.tensor([k - 2**64 if k >= 2**63 else k for k in keys])


def _flat(keys: list[int], token: int) -> Tensor:
    """The exponential noise of one token under many keys, mapped to [0, 1)."""
    return 1 - torch.exp(-noise.exponential(_as_int64(keys), torch.tensor(token)))


def _unmix(value: int) -> int:
    """The inverse of splitmix64's finaliser: which key gives these bits."""

    def unshift(value: int, count: int) -> int:
        result = value
        for _ in range(64 // count):
            result = value ^ (result >> count)
        return result

    value = unshift(value, 31) * pow(0x94D049BB133111EB, -1, 2**64) & _MASK
    value = unshift(value, 27) * pow(0xBF58476D1CE4E5B9, -1, 2**64) & _MASK
    return unshift(value, 30)


def _key_with_bits(bits: int, token: int) -> int:
    """A key under which the noise of `token` is made from exactly these 64 bits."""
    return (_unmix(bits) - (token + 1) * 0x9E3779B97F4A7C15) & _MASK


# --- uniform ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", STREAMS)
def test_uniform_is_uniform_over_seeds_and_over_positions(stream: int) -> None:
    over_seeds = torch.tensor([noise.uniform(noise.key(s, 5, stream)) for s in range(COUNT)])
    over_positions = torch.tensor([noise.uniform(noise.key(5, p, stream)) for p in range(COUNT)])
    assert uniform_fit(over_seeds) > LIMIT
    assert uniform_fit(over_positions) > LIMIT


def test_uniform_reaches_zero_and_never_one() -> None:
    """One at the top would reject what must be accepted; a multiple of 2**-53 is below 1 by 2**-53."""
    assert noise.uniform(_unmix(0)) == 0.0
    assert noise.uniform(_unmix(_MASK)) == 1 - 2.0**-53 < 1


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(key=st.integers(0, _MASK))
def test_uniform_lies_in_its_range(key: int) -> None:
    assert 0 <= noise.uniform(key) < 1


# --- exponential -----------------------------------------------------------------------------------


def test_exponential_is_exponential_over_keys_and_over_tokens() -> None:
    keys = [noise.key(s, 9, noise.TARGET) for s in range(COUNT)]
    assert uniform_fit(_flat(keys, 3)) > LIMIT
    over_ids = noise.exponential(_as_int64(keys[:1]), torch.arange(COUNT))
    assert uniform_fit(1 - torch.exp(-over_ids)) > LIMIT
    assert abs(float(over_ids.mean()) - 1) < 4 / COUNT**0.5  # standard error: 1 / sqrt(COUNT)


@pytest.mark.parametrize("bits", [0, 1, 2**11 - 1, 2**12, _MASK - 2**11, _MASK - 1, _MASK])
def test_exponential_is_above_zero_and_finite_for_all_bits(bits: int) -> None:
    """At the very top the half that keeps the logarithm from 0 was rounded away: noise of -0.0, and with
    it a law with a single token gave another one, of probability 0."""
    value = noise.exponential(_as_int64([_key_with_bits(bits, 2)]), torch.tensor(2))
    assert 0 < float(value) < 64


@pytest.mark.parametrize("bits", [0, _MASK])
def test_a_one_hot_law_gives_its_token_at_both_ends_of_the_noise(bits: int) -> None:
    law = torch.tensor([[0.0, 0.0, 1.0, 0.0]])
    assert noise.race(law, [_key_with_bits(bits, 2)]).tolist() == [2]


# --- independence ----------------------------------------------------------------------------------


def _key(seed: int, position: int, stream: int, *extra: int) -> int:
    return noise.key(seed, position, stream, *extra)


@pytest.mark.parametrize(
    ("name", "left", "right"),
    [
        ("neighbouring seeds", lambda i: _key(i, 7, 0), lambda i: _key(i + 1, 7, 0)),
        ("neighbouring positions", lambda i: _key(3, i, 0), lambda i: _key(3, i + 1, 0)),
        ("seed and position exchanged", lambda i: _key(i, i + 3, 0), lambda i: _key(i + 3, i, 0)),
        ("seed up, position down", lambda i: _key(i, 9, 0), lambda i: _key(i + 1, 8, 0)),
        ("target and draft", lambda i: _key(i, 7, noise.TARGET), lambda i: _key(i, 7, noise.DRAFT)),
        ("draft and coin", lambda i: _key(i, 7, noise.DRAFT, 6), lambda i: _key(i, 7, noise.COIN, 6, 1)),
        ("coin and residual", lambda i: _key(i, 7, noise.COIN, 6, 1), lambda i: _key(i, 7, noise.RESIDUAL, 6, 2)),
        ("stream and position exchanged", lambda i: _key(i, 2, 1), lambda i: _key(i, 1, 2)),
        ("roots of two rounds", lambda i: _key(i, 9, 2, 7, 1), lambda i: _key(i, 9, 2, 8, 1)),
        ("draws of one round", lambda i: _key(i, 9, 2, 7, 1), lambda i: _key(i, 9, 2, 7, 2)),
        ("with and without a root", lambda i: _key(i, 9, 2), lambda i: _key(i, 9, 2, 0)),
        ("seeds far apart", lambda i: _key(i, 9, 0), lambda i: _key(i + 2**62, 9, 0)),
    ],
)
def test_noise_under_related_keys_is_independent(name: str, left: object, right: object) -> None:
    a = [left(i) for i in range(COUNT)]  # type: ignore[operator]
    b = [right(i) for i in range(COUNT)]  # type: ignore[operator]
    assert independent(_flat(a, 4), _flat(b, 4)) > LIMIT, name
    coins_a, coins_b = (torch.tensor([noise.uniform(k) for k in keys]) for keys in (a, b))
    assert independent(coins_a, coins_b) > LIMIT, name


@pytest.mark.parametrize("gap", [1, 2, 3, 31, 32, 1024, 49_151])
def test_noise_of_two_tokens_under_one_key_is_independent(gap: int) -> None:
    keys = [noise.key(s, 11, noise.TARGET) for s in range(COUNT)]
    assert independent(_flat(keys, 5), _flat(keys, 5 + gap)) > LIMIT


def test_a_coin_and_a_race_under_one_key_are_independent() -> None:
    keys = [noise.key(s, 11, noise.COIN, 10, 1) for s in range(COUNT)]
    coins = torch.tensor([noise.uniform(k) for k in keys])
    assert independent(coins, _flat(keys, 0)) > LIMIT


def test_sums_over_three_seeds_have_the_spread_of_independent_numbers() -> None:
    """Pairs may look independent where triples are not (a lattice): sums of three are tested as well."""
    flats = _flat([noise.key(s, 3, noise.TARGET) for s in range(COUNT + 2)], 1)
    third = (flats[:-2] + flats[1:-1] + flats[2:]) % 1.0
    assert uniform_fit(third) > LIMIT


def test_seed_and_position_do_not_commute() -> None:
    """Seed and position were mixed alike and joined by exclusive or: seed 5 at position 7 had the noise of
    seed 7 at position 5, and every seed met the same noise at the position equal to itself."""
    assert noise.key(5, 7, noise.TARGET) != noise.key(7, 5, noise.TARGET)
    assert len({noise.key(n, n, noise.TARGET) for n in range(100)}) == 100


def test_keys_differ_wherever_their_parts_differ() -> None:
    parts = itertools.product((0, 1, 2**63 - 1), (0, 1, 77), STREAMS, ((), (0,), (1,), (1, 0), (1, 1), (0, 1)))
    keys = [noise.key(seed, position, stream, *extra) for seed, position, stream, extra in parts]
    assert len(set(keys)) == len(keys)
    assert all(0 <= k <= _MASK for k in keys)


# --- race ------------------------------------------------------------------------------------------

LAW = [0.4, 0.0, 0.25, 0.2, 0.1, 0.05, 0.0]
RACES = 6_000


@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.float32, 1.0), (torch.float32, 1e-6), (torch.float64, 1.0), (torch.float64, 250.0)]
)
def test_race_draws_from_the_normalised_row(dtype: torch.dtype, scale: float) -> None:
    law = torch.tensor(LAW, dtype=dtype)
    keys = [noise.key(s, 2, noise.RESIDUAL, 1, 1) for s in range(RACES)]
    drawn = noise.race((law * scale).expand(RACES, -1), keys)
    assert chi_square(torch.bincount(drawn, minlength=len(LAW)), torch.tensor(LAW)) > LIMIT


def test_race_over_positions_of_one_seed_draws_from_the_row_and_forgets_the_last_draw() -> None:
    law = torch.tensor(LAW)
    keys = [noise.key(12, p, noise.TARGET) for p in range(RACES)]
    drawn = noise.race(law.expand(RACES, -1), keys)
    pairs = torch.bincount(drawn[:-1] * len(LAW) + drawn[1:], minlength=len(LAW) ** 2)
    assert chi_square(pairs, torch.outer(law, law)) > LIMIT


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(data=st.data(), seed=st.integers(0, 2**63 - 1), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_race_never_gives_a_token_without_probability(data: st.DataObject, seed: int, dtype: torch.dtype) -> None:
    masses = st.sampled_from([0.0, 0.0, 1e-38, 1e-12, 0.3, 1.0])
    row = data.draw(st.lists(masses, min_size=1, max_size=9).filter(any))
    drawn = noise.race(torch.tensor([row], dtype=dtype), [noise.key(seed, 0, 0)])
    assert row[int(drawn)] > 0


def test_a_draw_does_not_depend_on_its_batch() -> None:
    generator = torch.Generator().manual_seed(1)
    laws = torch.randn((40, 500), generator=generator).softmax(-1)
    laws[::3, 100:] = 0
    keys = [noise.key(s, s % 7, noise.TARGET) for s in range(40)]
    together = noise.race(laws, keys)
    alone = torch.cat([noise.race(laws[r : r + 1], keys[r : r + 1]) for r in range(40)])
    order = torch.randperm(40, generator=generator)
    shuffled = noise.race(laws[order], [keys[r] for r in order.tolist()])
    assert torch.equal(together, alone)
    assert torch.equal(together[order], shuffled)


def test_a_draw_does_not_depend_on_tokens_that_cannot_come() -> None:
    """Noise belongs to the token's id, not to its place among the possible ones."""
    wide = torch.randn((60, 30), generator=torch.Generator().manual_seed(2)).softmax(-1)
    keys = [noise.key(s, 0, noise.TARGET) for s in range(60)]
    drawn = noise.race(wide, keys)
    narrow = torch.zeros_like(wide)
    narrow[:, 10:] = wide[:, 10:]
    later = drawn >= 10
    assert bool(later.any())
    assert torch.equal(noise.race(narrow, keys)[later], drawn[later])


def test_rare_tokens_of_a_wide_vocabulary_come_as_often_as_they_should() -> None:
    """20,000 of 50,000 tokens with a 200,000th each: a tenth together, spread evenly over their ids."""
    vocab, rare, count = 50_000, 20_000, 1_000
    law = torch.zeros(vocab)
    law[7] = 0.9
    law[-rare:] = 0.1 / rare
    keys = [noise.key(s, 1, noise.TARGET) for s in range(count)]
    drawn = torch.cat([noise.race(law.expand(50, -1), keys[at : at + 50]) for at in range(0, count, 50)])
    high = drawn[drawn != 7] - (vocab - rare)
    assert off_by(len(high) / count, 0.1, count) < 4
    assert chi_square(torch.bincount(high * 5 // rare, minlength=5), torch.full((5,), 0.2)) > LIMIT


def test_a_token_of_one_in_a_million_beats_a_likely_one_as_often_as_it_should() -> None:
    """The noise must be fine-grained near 0; float32 noise would give far too few or too many."""
    count = 4_000_000
    keys = _as_int64([noise.key(s, 1, noise.TARGET) for s in range(2_000)])
    ids = torch.arange(count // 2_000)
    values = noise.exponential(keys[:, None], ids)
    seen = int((values < 1e-6).sum())
    assert 0 < seen < 16  # mean 4, standard deviation 2
    assert float(values.min()) < 3e-6


def test_gumbel_noise_is_that_of_the_race_on_the_scale_of_log_probabilities() -> None:
    probs = torch.rand((1, 40), generator=torch.Generator().manual_seed(3)).double()
    for seed in range(50):
        key = noise.key(seed, 5, noise.TARGET)
        best = (probs[0].log() + noise.gumbel(key, torch.arange(40))).argmax()
        assert int(best) == int(noise.race(probs, [key])[0])
