"""What `raw` and `lossless` decode is what was encoded, bit for bit, whatever the values, shape, stride or dtype."""

from __future__ import annotations

import threading

import pytest
import torch
from codec_helpers import CODECS, DTYPES, activations, any_bits, codec, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from bloombee_spec.wire import entropy
from bloombee_spec.wire.activations import CodecError

LOSSLESS = ("raw", "lossless")


def _assert_round_trip(name: str, rows: torch.Tensor) -> bytes:
    data = codec(name).encode(rows)
    assert len(data) <= codec(name).max_bytes(*rows.shape, rows.dtype)
    back = codec(name).decode(data, *rows.shape, rows.dtype)
    assert back.shape == rows.shape and same_bits(back, rows)
    return data


@pytest.mark.parametrize("name", LOSSLESS)
@given(
    n=st.integers(0, 9),
    hidden=st.integers(0, 300),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
    make=st.sampled_from([activations, any_bits]),
)
@settings(max_examples=150, deadline=None)
def test_every_bit_comes_back(name, n, hidden, dtype, seed, make):
    _assert_round_trip(name, make(n, hidden, dtype, seed))


@pytest.mark.parametrize("name", LOSSLESS)
@given(values=st.lists(st.floats(width=32), min_size=1, max_size=60), dtype=st.sampled_from(DTYPES))
@settings(max_examples=100, deadline=None)
def test_special_values_come_back(name, values, dtype):
    _assert_round_trip(name, torch.tensor([values], dtype=torch.float64).to(dtype))


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_special_rows_among_ordinary_ones(name, dtype):
    rows = activations(8, 256, dtype)
    tiny = torch.finfo(dtype).tiny
    rows[1] = 0.0
    rows[2] = float("nan")
    rows[3, ::2] = float("inf")
    rows[4] = rows[4] * tiny  # denormals
    rows[5, 7] = torch.finfo(dtype).max
    rows[6, 3], rows[6, 4] = -0.0, tiny / 2
    _assert_round_trip(name, rows)


@pytest.mark.parametrize("name", CODECS)
def test_strides_do_not_matter(name):
    rows = activations(6, 320, torch.bfloat16)
    wide = activations(6, 640, torch.bfloat16)
    wide[:, ::2] = rows
    tall = torch.empty(320, 6, dtype=torch.bfloat16)
    tall.t().copy_(rows)
    assert codec(name).encode(wide[:, ::2]) == codec(name).encode(rows) == codec(name).encode(tall.t())
    spread = rows[:1].expand(5, -1)
    assert codec(name).encode(spread) == codec(name).encode(spread.clone())


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("shape", [(0, 0), (0, 64), (3, 0)])
def test_nothing_takes_no_bytes(name, shape):
    data = codec(name).encode(torch.zeros(shape, dtype=torch.float16))
    assert data == b""
    assert codec(name).decode(data, *shape, torch.float16).shape == shape
    with pytest.raises(CodecError):
        codec(name).decode(b"x", *shape, torch.float16)


def test_raw_is_little_endian_values():
    assert codec("raw").encode(torch.tensor([[1.0, -2.0]], dtype=torch.float16)) == bytes.fromhex("003c00c0")


@pytest.mark.parametrize("n", [1, 8, 64])
def test_lossless_takes_less_than_70_percent_of_bf16(n):
    rows = activations(n, 1024, torch.bfloat16)
    assert len(codec("lossless").encode(rows)) < 0.70 * rows.numel() * 2


def test_a_short_row_needs_no_table_of_its_own():
    rows = activations(1, 576, torch.bfloat16)
    assert len(codec("lossless").encode(rows)) < 0.70 * rows.numel() * 2


def test_lossless_finds_bits_that_a_wider_dtype_does_not_use():
    rows = activations(16, 1024, torch.bfloat16)
    for dtype in (torch.float16, torch.float32):
        data = _assert_round_trip("lossless", rows.to(dtype))
        assert len(data) < 0.75 * rows.numel() * 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_noise_costs_one_byte_more_than_raw(dtype):
    rows = any_bits(4, 512, dtype)
    assert len(_assert_round_trip("lossless", rows)) <= rows.numel() * dtype.itemsize + 1


def test_threads_do_not_disturb_each_other():
    inputs = [activations(16, 512, torch.bfloat16, seed) for seed in range(4)]
    wrong: list[int] = []

    def work(seed: int) -> None:
        for _ in range(30):
            data = codec("lossless").encode(inputs[seed])
            if not same_bits(codec("lossless").decode(data, 16, 512, torch.bfloat16), inputs[seed]):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_each_thread_has_compressors_of_its_own():
    seen = [entropy._contexts.compressors]
    thread = threading.Thread(target=lambda: seen.append(entropy._contexts.compressors))
    thread.start()
    thread.join()
    assert seen[0] is not seen[1] and entropy._contexts.compressors is seen[0]


def test_rows_that_no_codec_carries_are_refused():
    for rows in (torch.zeros(3), torch.zeros(1, 2, 3), torch.zeros(2, 2, dtype=torch.int32)):
        with pytest.raises(CodecError):
            codec("raw").encode(rows)
