"""Bytes from a peer that are no encoding: CodecError, nothing else, and no memory beyond what the shape allows."""

from __future__ import annotations

import tracemalloc

import pytest
import torch
from codec_helpers import CODECS, activations, codec, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from bloombee_spec.wire.activations import MAX_VALUES, CodecError
from bloombee_spec.wire.entropy import put_plane, take_plane
from bloombee_spec.wire.varint import put_uint

N, HIDDEN, DTYPE = 3, 320, torch.bfloat16


def _decode_or_refuse(name: str, data: bytes, n: int = N, hidden: int = HIDDEN, dtype: torch.dtype = DTYPE) -> bool:
    """Whether the bytes were refused. Anything but CodecError or rows of the right shape fails the test."""
    try:
        rows = codec(name).decode(data, n, hidden, dtype)
    except CodecError:
        return True
    assert rows.shape == (n, hidden) and rows.dtype == dtype
    return False


@pytest.mark.parametrize("name", CODECS)
def test_every_truncation_is_refused(name):
    data = codec(name).encode(activations(N, HIDDEN, DTYPE))
    for end in range(len(data)):
        assert _decode_or_refuse(name, data[:end]), f"{end} of {len(data)} bytes were accepted"


@pytest.mark.parametrize("name", CODECS)
@given(extra=st.binary(min_size=1, max_size=40))
@settings(max_examples=40, deadline=None)
def test_trailing_bytes_are_refused(name, extra):
    assert _decode_or_refuse(name, codec(name).encode(activations(N, HIDDEN, DTYPE)) + extra)


@pytest.mark.parametrize("name", CODECS)
@given(flips=st.lists(st.tuples(st.integers(0, 2**20), st.integers(1, 255)), min_size=1, max_size=8))
@settings(max_examples=200, deadline=None)
def test_flipped_bits_never_crash(name, flips):
    data = bytearray(codec(name).encode(activations(N, HIDDEN, DTYPE)))
    for place, mask in flips:
        data[place % len(data)] ^= mask
    _decode_or_refuse(name, bytes(data))


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("shape", [(-1, 64), (1, -64), (1, MAX_VALUES + 1), (2**40, 2**40)])
def test_impossible_shapes_are_refused_unread(name, shape):
    with pytest.raises(CodecError, match="outside the bounds"):
        codec(name).decode(b"\0" * 64, *shape, torch.float32)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("other", [(N, HIDDEN + 1, DTYPE), (N + 1, HIDDEN, DTYPE), (N, HIDDEN, torch.float64)])
def test_another_shape_or_dtype_than_encoded(name, other):
    data = codec(name).encode(activations(N, HIDDEN, DTYPE))
    refused = _decode_or_refuse(name, data, *other)
    by_dtype_only = other[:2] == (N, HIDDEN)
    # Row formats of lossy codecs do not depend on the dtype; padding may hide one more channel in the last tile.
    assert refused or (name not in ("raw", "lossless") and by_dtype_only)


def test_integer_rows_are_not_made():
    with pytest.raises(CodecError, match="does not travel"):
        codec("raw").decode(b"\0\0\0\0", 1, 1, torch.int32)


def test_a_plane_that_unpacks_to_more_than_announced_is_refused_within_bounds():
    bomb = bytearray()
    put_plane(bomb, bytes(64 << 20))
    assert len(bomb) < 10_000
    size = 4096
    del bomb[0 : next(i for i, byte in enumerate(bomb) if byte < 0x80) + 1]
    data = bytearray()
    put_uint(data, len(bomb) << 2 | 1)
    data += bomb
    tracemalloc.start()
    with pytest.raises(CodecError):
        take_plane(memoryview(data), size)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_a_length_beyond_the_end_is_refused():
    data = bytearray()
    put_uint(data, 4000 << 2 | 1)
    with pytest.raises(CodecError):
        take_plane(memoryview(data + b"abc"), 4096)


def test_decoding_a_large_claim_from_few_bytes_allocates_no_more_than_the_rows():
    rows = torch.zeros(64, 4096, dtype=torch.bfloat16)
    data = codec("lossless").encode(rows)
    assert len(data) < rows.numel()
    tracemalloc.start()
    back = codec("lossless").decode(data, *rows.shape, rows.dtype)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert same_bits(back, rows)
    assert peak < 8 * rows.numel() * 2


def test_bytes_between_the_end_of_the_compressed_data_and_its_announced_length_are_refused():
    valid = bytearray()
    put_plane(valid, bytes(100))
    data = bytearray([valid[0] + (3 << 2)]) + valid[1:] + b"abc"
    assert len(valid) < 30 and len(take_plane(memoryview(valid), 100)[1]) == 0
    with pytest.raises(CodecError):
        take_plane(memoryview(data), 100)


@pytest.mark.parametrize("kind", [0, 3])
def test_a_plane_of_no_known_kind_is_refused(kind):
    data = bytearray()
    put_uint(data, 5 << 2 | kind)  # a plane that is not compressed has no length of its own
    with pytest.raises(CodecError):
        take_plane(memoryview(data + b"12345"), 10)


def _made_by_hand(dtype: torch.dtype, mean: int, code: int, escaped: int | None = None) -> bytes:
    """A `lossless` encoding of 64 equal values whose bits are zero, except for the exponent."""
    size = 2 if dtype == torch.float64 else 1
    out = bytearray([1]) + mean.to_bytes(size, "little")
    put_plane(out, bytes([code << 2]) * 64)
    if escaped is not None:
        put_plane(out, escaped.to_bytes(size, "little") * 64)
    for _ in range({torch.bfloat16: 0, torch.float16: 1, torch.float64: 6}[dtype]):
        put_plane(out, bytes(64))
    odd_bits = {torch.bfloat16: 6, torch.float16: 1, torch.float64: 3}[dtype]
    return bytes(out + bytes(64 * odd_bits // 8))


@pytest.mark.parametrize("dtype, bias", [(torch.bfloat16, 127), (torch.float16, 15), (torch.float64, 1023)])
def test_a_lossless_encoding_made_by_hand_is_understood(dtype, bias):
    for data in (_made_by_hand(dtype, bias, 21), _made_by_hand(dtype, 0, 1, bias + 1)):
        assert codec("lossless").decode(data, 1, 64, dtype).tolist() == [[2.0] * 64]


@pytest.mark.parametrize(
    "dtype, mean, code, escaped",
    [
        (torch.bfloat16, 250, 31, None),
        (torch.bfloat16, 0, 2, None),
        (torch.float16, 31, 21, None),
        (torch.float16, 0, 1, 32),
        (torch.float64, 2047, 21, None),
        (torch.float64, 0, 1, 2048),
        (torch.float64, 0, 1, 0x4000 + 1023),  # in 16 bits, this times four is an ordinary exponent
        (torch.float64, 0x4000 + 1023, 20, None),
    ],
)
def test_exponents_that_the_dtype_does_not_have_are_refused(dtype, mean, code, escaped):
    with pytest.raises(CodecError, match="exponents from"):
        codec("lossless").decode(_made_by_hand(dtype, mean, code, escaped), 1, 64, dtype)


@pytest.mark.parametrize("name", ["tah4", "tah3", "tah-mixed"])
def test_a_pivot_outside_its_tile_is_refused(name):
    data = bytearray(codec(name).encode(activations(1, HIDDEN, DTYPE)))
    data[4] = 64
    assert _decode_or_refuse(name, bytes(data), n=1)


def test_a_wrong_number_of_wide_tiles_is_refused():
    data = bytearray(codec("tah-mixed").encode(activations(1, HIDDEN, DTYPE)))
    mask = 5 * 5  # five heads come first
    for wrong in (0b00011111, 0b00000111, 0b11101111):
        data[mask] = wrong
        assert _decode_or_refuse("tah-mixed", bytes(data), n=1)
