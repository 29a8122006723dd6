"""The lossy codecs: bounded error, fixed size, rows that depend on themselves only, and no number made out of NaN."""

from __future__ import annotations

import pytest
import torch
from codec_helpers import DTYPES, LOSSY, activations, any_bits, codec, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

TILE = 64
# relative error of Gaussian-like rows and bits per value, for hidden sizes that are multiples of five tiles
EXPECTED = {"int8": (0.02, 8.25), "tah4": (0.09, 4.625), "tah3": (0.19, 3.625), "tah-mixed": (0.12, 4.45)}


def _through(name: str, rows: torch.Tensor) -> torch.Tensor:
    return codec(name).decode(codec(name).encode(rows), *rows.shape, rows.dtype)


def _error(name: str, rows: torch.Tensor) -> float:
    exact = rows.double()
    return float((_through(name, rows).double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("name", LOSSY)
@given(
    n=st.integers(1, 9),
    hidden=st.integers(1, 700),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
    make=st.sampled_from([activations, any_bits]),
)
@settings(max_examples=80, deadline=None)
def test_a_row_depends_on_nothing_but_itself(name, n, hidden, dtype, seed, make):
    rows = make(n, hidden, dtype, seed)
    data = codec(name).encode(rows)
    assert data == b"".join(codec(name).encode(row[None]) for row in rows)
    size = len(data) // n
    alone = [codec(name).decode(data[i * size : (i + 1) * size], 1, hidden, dtype) for i in range(n)]
    assert same_bits(codec(name).decode(data, n, hidden, dtype), torch.cat(alone))


@pytest.mark.parametrize("name", LOSSY)
@given(n=st.integers(1, 5), hidden=st.integers(1, 500), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_any_bit_pattern_is_carried_without_inventing_numbers(name, n, hidden, dtype, seed):
    rows = any_bits(n, hidden, dtype, seed)
    back = _through(name, rows)
    assert back.shape == rows.shape and back.dtype == dtype
    limit = torch.finfo(torch.float32).max
    broken = ~(rows.double().abs() <= limit)
    assert bool(back[broken].isnan().all())


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_error_and_size_are_what_the_bits_allow(name, dtype):
    rows = activations(32, 640, dtype)
    error, bits = EXPECTED[name]
    assert _error(name, rows) < error
    assert len(codec(name).encode(rows)) * 8 / rows.numel() <= bits


def test_int8_is_within_half_a_step_of_every_value():
    rows = activations(20, 320, torch.float32)
    largest = rows.view(20, 5, TILE).abs().amax(-1, keepdim=True)
    error = (_through("int8", rows) - rows).view(20, 5, TILE).abs()
    assert bool((error <= largest / 127 / 2 * (1 + 2**-6)).all())


@pytest.mark.parametrize("name", LOSSY)
def test_nan_and_infinity_spoil_their_own_tile_only(name):
    rows = activations(3, 320, torch.bfloat16)
    clean = _through(name, rows)
    dirty = rows.clone()
    dirty[1, 70], dirty[1, 200] = float("nan"), float("-inf")
    back = _through(name, dirty)
    for tile in (1, 3):
        assert bool(back[1, tile * TILE : (tile + 1) * TILE].isnan().all())
    assert same_bits(back[[0, 2]], clean[[0, 2]])
    if name != "tah-mixed":  # there, the tiles of one row share its bits
        assert same_bits(back[1, :TILE], clean[1, :TILE])
    assert int(back.isnan().sum()) == 2 * TILE


@pytest.mark.parametrize("name", ["tah4", "tah3", "tah-mixed"])
@pytest.mark.parametrize("size", [100.0, 10_000.0])
def test_an_outlier_does_not_drown_its_tile(name, size):
    rows = torch.randn(64, TILE * 5, generator=torch.Generator().manual_seed(1))
    quiet = (_through(name, rows) - rows)[:, :TILE].norm()
    loud = rows.clone()
    loud[:, 37] = size
    back = _through(name, loud)
    others = [channel for channel in range(TILE) if channel != 37]
    # Without the pivot, an outlier of 100 would widen the range of its tile by a factor of about five; if the range
    # were not taken from the rounded offset, one of 10,000 would push values out of it.
    assert (back - loud)[:, others].norm() < 3 * quiet
    assert (back - loud)[:, 37].abs().max() < 0.03 * size


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_numbers_stay_finite(name, dtype):
    largest = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max / 4)
    rows = torch.full((2, TILE), largest, dtype=dtype)
    rows[1, ::2] *= -0.875
    assert bool(_through(name, rows).isfinite().all())


@pytest.mark.parametrize("name", LOSSY)
def test_zeros_are_exact(name):
    rows = activations(3, 2 * TILE, torch.float16)
    rows[1], rows[2, :TILE] = 0.0, -0.0
    back = _through(name, rows)
    assert not bool(back[1].any()) and not bool(back[2, :TILE].any()) and bool(back[0].any())


@pytest.mark.parametrize("name", LOSSY)
def test_the_default_dtype_does_not_matter(name):
    rows = activations(3, 320, torch.float32)
    data, back = codec(name).encode(rows), _through(name, rows)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert codec(name).encode(rows) == data
        assert same_bits(codec(name).decode(data, *rows.shape, rows.dtype), back)
    finally:
        torch.set_default_dtype(torch.float32)


def test_mixed_tiles_get_their_fourth_bit_by_spread():
    rows = torch.randn(4, 5 * TILE, generator=torch.Generator().manual_seed(2))
    rows[:, 2 * TILE : 3 * TILE] *= 0.01
    mixed, narrow = _through("tah-mixed", rows), _through("tah3", rows)
    wide = _through("tah4", rows)
    quiet = slice(2 * TILE, 3 * TILE)
    assert same_bits(mixed[:, quiet], narrow[:, quiet])
    for loud in (slice(0, 2 * TILE), slice(3 * TILE, 5 * TILE)):
        assert same_bits(mixed[:, loud], wide[:, loud])
