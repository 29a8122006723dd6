"""Keyed noise: Philox 4x64-10, addressed by (seed, row, position, token), and turned into Exp(1)."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bloombee_spec.sampling.noise import MAX_SEED, NoiseCache, exponential_noise, fresh_seed, race_noise

MASK = 2**64 - 1

# Known answers published with the Random123 library: counter, key, output.
KNOWN_ANSWERS = [
    (
        (0, 0, 0, 0),
        (0, 0),
        (0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B),
    ),
    (
        (MASK, MASK, MASK, MASK),
        (MASK, MASK),
        (0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0),
    ),
    (
        (0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89),
        (0x452821E638D01377, 0xBE5466CF34E90C6C),
        (0xA528F45403E61D95, 0x38C72DBD566E9788, 0xA5A1610E72FD18B5, 0x57BD43B5E52B7FE6),
    ),
]


def _philox4x64(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """One block, in plain Python integers: ten rounds of two multiplications and a key schedule."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        left, right = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = (right >> 64) ^ c1 ^ k0, right & MASK, (left >> 64) ^ c3 ^ k1, left & MASK
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & MASK, (k1 + 0xBB67AE8584CAA73B) & MASK
    return c0, c1, c2, c3


def _expected(seed: int, row: int, position: int, token: int) -> float:
    word = _philox4x64((1 + token // 4, 0, row, position), (seed, 0))[token % 4]
    return float(np.float32(-math.log(((word >> 12) + 0.5) / 2**52)))


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_reference_generator_gives_the_published_answers(counter, key, output):
    assert _philox4x64(counter, key) == output


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, MAX_SEED),
    row=st.integers(0, 2**32 - 1),
    position=st.integers(0, 2**32 - 1),
    size=st.integers(1, 9),
)
def test_noise_is_the_reference_generator_at_its_address(seed, row, position, size):
    noise = exponential_noise(seed, row, position, size)
    assert noise.dtype == torch.float32 and noise.shape == (size,)
    expected = [_expected(seed, row, position, token) for token in range(size)]
    # The integers are exact; one unit in the last place is left to the platform's logarithm.
    np.testing.assert_array_max_ulp(noise.numpy(), np.array(expected, dtype=np.float32), maxulp=1)


def test_noise_of_a_smaller_vocabulary_is_a_prefix():
    assert torch.equal(exponential_noise(7, 1, 2, 1003)[:50], exponential_noise(7, 1, 2, 50))


def test_no_two_addresses_share_numbers():
    """Also shifted by whole blocks: consecutive values in the low word of the counter would overlap."""
    seen: set[float] = set()
    count = 0
    for seed in (0, 1, 2**63):
        for row in range(4):
            for position in range(4):
                values = exponential_noise(seed, row, position, 64).tolist()
                count += len(values)
                seen.update(values)
    assert len(seen) >= count - 1  # float32: one coincidence among 3072 numbers has a chance of about a half


def test_row_and_position_are_not_interchangeable():
    assert not torch.equal(exponential_noise(3, 5, 9, 16), exponential_noise(3, 9, 5, 16))


def test_numbers_are_exponential_and_independent_across_neighbours():
    size = 50_000
    noise = {(row, position): exponential_noise(11, row, position, size) for row in range(2) for position in range(2)}
    for values in noise.values():
        survival = np.sort(np.exp(-values.double().numpy()))
        distance = np.abs(survival - (np.arange(size) + 0.5) / size).max()
        assert distance < 2.0 / math.sqrt(
            size
        )  # Kolmogorov-Smirnov, chance of failure about 1e-3 and fixed by the seed
        assert values.min() > 0 and torch.isfinite(values).all()
    stacked = torch.stack(list(noise.values())).double()
    correlation = torch.corrcoef(stacked) - torch.eye(4, dtype=torch.float64)
    assert correlation.abs().max() < 5.0 / math.sqrt(size)


@pytest.mark.parametrize("word", [0, MASK])
def test_the_extreme_words_give_positive_finite_numbers(word, monkeypatch):
    """One in 2**52 of each: with E = 0 a token of probability zero could win, with an infinite E no token could."""

    class Extreme:
        def __init__(self, key, counter):
            pass

        def random_raw(self, size):
            return np.full(size, word, dtype=np.uint64)

    monkeypatch.setattr(np.random, "Philox", Extreme)
    noise = exponential_noise(0, 0, 0, 3)
    assert (noise > 0).all() and torch.isfinite(noise).all() and torch.isfinite(race_noise(0, 0, 0, 3)).all()


def test_race_noise_is_minus_log_of_exponential_noise():
    noise = race_noise(1, 2, 3, 100)
    assert noise.dtype == torch.float64
    torch.testing.assert_close(noise, -exponential_noise(1, 2, 3, 100).double().log())


@pytest.mark.parametrize(
    "arguments",
    [(-1, 0, 0, 4), (2**64, 0, 0, 4), (0, -1, 0, 4), (0, 0, 2**32, 4), (0, 0, -1, 4), (0, 0, 0, -1), (0, 0, 0, 2**30)],
)
def test_arguments_out_of_range_are_refused(arguments):
    with pytest.raises(ValueError, match="must be in"):
        exponential_noise(*arguments)


def test_numpy_integers_do_not_wrap_around():
    plain = exponential_noise(5, 6, 7, 8)
    assert torch.equal(plain, exponential_noise(np.int64(5), np.int32(6), np.int64(7), np.int64(8)))  # type: ignore[arg-type]


def test_fresh_seeds_differ_and_follow_the_global_generator():
    torch.manual_seed(0)
    first, second = fresh_seed(), fresh_seed()
    torch.manual_seed(0)
    assert first != second and fresh_seed() == first and 0 <= first <= MAX_SEED


def test_cache_gives_the_same_noise_and_makes_it_once():
    cache = NoiseCache(1, 2, 100)
    noise = cache.at(7)
    assert torch.equal(noise, race_noise(1, 2, 7, 100)) and cache.at(7) is noise


def test_cache_forgets_committed_positions_only():
    cache = NoiseCache(1, 2, 10)
    for position in (5, 6, 7, 8):
        cache.at(position)
    cache.commit(6)
    assert [position in cache for position in (5, 6, 7, 8)] == [False, False, True, True]


def test_cache_is_bounded_and_drops_the_least_recently_used():
    cache = NoiseCache(1, 2, 10, capacity=3)
    for position in (1, 2, 3, 1, 4):
        cache.at(position)
    assert len(cache) == 3 and [position in cache for position in (1, 2, 3, 4)] == [True, False, True, True]
    with pytest.raises(ValueError, match="capacity"):
        NoiseCache(1, 2, 10, capacity=0)
