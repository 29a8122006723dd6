"""What a peer may send instead of a chunk: it is refused within bounds, never a crash, a hang or a full memory."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bloombee_spec.kv.cachegen import FINE, GROUP, SINKS, decode_lossy, encode_lossy
from bloombee_spec.kv.chunks import (
    KEY_BYTES,
    SUM_BYTES,
    ChunkHeader,
    Depth,
    _sum,
    decode_chunk,
    decode_payload,
    encode_chunk,
    encode_ids,
    max_chunk_bytes,
    max_payload,
    read_header,
)
from bloombee_spec.kv.levels import Level
from bloombee_spec.kv.span import SpanShape
from bloombee_spec.kv.symbols import CLASSES, put_symbols, take_symbols
from bloombee_spec.wire.activations import CodecError
from bloombee_spec.wire.entropy import put_plane
from tests.kv_helpers import DEPTH, KEY, OTHER_KEY, model_like

pytest.importorskip("zstandard")

KV = model_like(2, 2, 40, 8)
SHAPE = SpanShape.of(KV)
HEADER_BYTES = len(encode_ids(SHAPE, 0, [1], KEY)) - SUM_BYTES - 4
LEVELS = (Level.LOSSLESS, Level.INT8, Level.FINE, Level.COARSE)


def chunk(level: Level, start: int = 5) -> bytes:
    if level is Level.RECOMPUTE:
        return encode_ids(SHAPE, start, range(40), KEY)
    return encode_chunk(KV, start, level, DEPTH, KEY)


def resealed(data: bytes | bytearray, key: bytes = KEY) -> bytes:
    """With a right checksum: what a peer that knows the key, but is broken or hostile, could send."""
    return bytes(data[:-SUM_BYTES]) + _sum(bytes(data[:-SUM_BYTES]), key)


def refused_or_decoded(data: bytes) -> bool:
    try:
        result = decode_chunk(data, SHAPE, KEY)
    except CodecError:
        return True
    assert result.kv is None or result.kv.shape == SHAPE.size(result.tokens)
    return False


@pytest.mark.parametrize("level", list(Level))
def test_every_truncation_and_every_extension_is_refused(level):
    data = chunk(level)
    for end in range(len(data)):
        with pytest.raises(CodecError):
            decode_chunk(data[:end], SHAPE, KEY)
    with pytest.raises(CodecError):
        decode_chunk(data + b"\0", SHAPE, KEY)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(list(Level)), st.data())
def test_every_changed_bit_is_found(level, draw):
    data = bytearray(chunk(level))
    data[draw.draw(st.integers(0, len(data) - 1))] ^= 1 << draw.draw(st.integers(0, 7))
    with pytest.raises(CodecError):
        decode_chunk(data, SHAPE, KEY)


def test_a_chunk_of_another_transfer_is_refused():
    for level in Level:
        with pytest.raises(CodecError, match="checksum"):
            decode_chunk(chunk(level), SHAPE, OTHER_KEY)


def test_a_key_of_another_length_is_a_fault_of_the_caller():
    with pytest.raises(ValueError, match=f"{KEY_BYTES} bytes"):
        encode_ids(SHAPE, 0, [1], b"short")


@pytest.mark.parametrize(
    "other",
    [
        SpanShape(1, 2, 8, torch.float32),
        SpanShape(2, 1, 8, torch.float32),
        SpanShape(2, 2, 16, torch.float32),
        SpanShape(2, 2, 8, torch.float16),
        SpanShape(2, 4, 4, torch.float32),  # as many channels
    ],
)
def test_a_chunk_of_another_shape_or_dtype_is_refused(other):
    for level in Level:
        with pytest.raises(CodecError):
            decode_chunk(chunk(level), other, KEY)


def test_headers_are_checked_field_by_field():
    good = bytearray(chunk(Level.FINE))
    assert read_header(good, SHAPE).tokens == 40
    for at, value in ((0, 0x00), (2, 2), (3, 5), (3, 255), (4, 200), (5, 3), (9, 99)):
        bad = bytearray(good)
        bad[at] = value
        with pytest.raises(CodecError):
            read_header(bad, SHAPE)


@pytest.mark.parametrize(("start", "tokens"), [(0, 0), (0, 257), (0, 65535), (1 << 31, 40), ((1 << 32) - 1, 40)])
def test_places_out_of_bounds_are_refused(start, tokens):
    data = bytearray(chunk(Level.FINE))
    struct.pack_into("<IH", data, 11, start, tokens)
    with pytest.raises(CodecError, match="tokens from position"):
        read_header(data, SHAPE)


@pytest.mark.parametrize("level", list(Level))
def test_a_payload_beyond_its_level_s_bound_is_refused_unread(level):
    payload = bytes(max_payload(SHAPE, 40, level) + 1)
    data = bytearray(chunk(level)[:HEADER_BYTES]) + payload + bytes(SUM_BYTES)
    struct.pack_into("<I", data, 17, len(payload))
    with pytest.raises(CodecError):
        read_header(data, SHAPE)
    with pytest.raises(CodecError):
        read_header(bytes(max_chunk_bytes(SHAPE) + 1), SHAPE)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(LEVELS), st.binary(max_size=600), st.integers(1, 256))
def test_noise_under_a_right_checksum_is_refused_or_decodes_within_bounds(level, payload, tokens):
    head = bytearray(chunk(level)[:HEADER_BYTES])
    struct.pack_into("<HI", head, 15, tokens, len(payload))
    refused_or_decoded(resealed(head + payload + bytes(SUM_BYTES)))


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(LEVELS), st.data())
def test_mutated_payloads_under_a_right_checksum_are_refused_or_decode_within_bounds(level, draw):
    data = bytearray(chunk(level))
    for _ in range(draw.draw(st.integers(1, 4))):
        at = draw.draw(st.integers(HEADER_BYTES, len(data) - SUM_BYTES - 1))
        data[at] = draw.draw(st.integers(0, 255))
    refused_or_decoded(resealed(data))


def test_few_bytes_that_claim_much_allocate_no_more_than_the_chunk():
    shape = SpanShape(8, 3, 64, torch.float32)
    payload = bytearray(b"\0" + np.ones(16, dtype="<f4").tobytes())
    for channels, n in ((16, 192), (0, 0), (3072, 256 // GROUP), (3072, 256 - 256 // GROUP)):
        if channels == 0:
            put_plane(payload, bytes(3072))
        else:
            put_symbols(payload, np.zeros((channels, n), dtype=np.int32))
    assert len(payload) < 1000
    header = ChunkHeader(shape, Level.FINE, 0, 256, len(payload))
    decode_payload(header, memoryview(bytes(payload)))  # imports and tables, once
    tracemalloc.start()
    kv = decode_payload(header, memoryview(bytes(payload))).kv
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kv is not None and not kv.any()
    assert peak < 6 * kv.numel() * 4


def test_a_lossy_payload_with_a_bomb_in_a_plane_is_refused_within_bounds():
    bomb = bytearray(b"\0" + np.ones(4, dtype="<f4").tobytes())
    put_plane(bomb, bytes(64 << 20))
    assert len(bomb) < 10_000
    tracemalloc.start()
    with pytest.raises(CodecError):
        decode_lossy(memoryview(bytes(bomb)), SHAPE, 40)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("step", [0.0, -1.0, float("nan"), float("inf"), 1e26])
def test_steps_that_make_no_number_are_refused(step):
    data = bytearray(encode_lossy(KV, SINKS, FINE.steps(0, 2, 2)))
    struct.pack_into("<f", data, 5, step)
    with pytest.raises(CodecError, match="steps between"):
        decode_lossy(memoryview(data), SHAPE, 40)


def test_the_largest_codes_and_steps_stay_finite():
    payload = bytearray(b"\0" + np.full(4, 1e25, dtype="<f4").tobytes())
    huge = np.iinfo(np.int32)
    for channels, n in ((4, 16), (0, 0), (64, 40 // GROUP), (64, 40 - 40 // GROUP)):
        if channels == 0:
            put_plane(payload, bytes([8]) * 64)
        else:
            put_symbols(payload, np.resize(np.array([huge.max, huge.min + 1, 0], np.int32), (channels, n)))
    for dtype in (torch.float32, torch.float16):
        assert decode_lossy(memoryview(payload), SpanShape(2, 2, 8, dtype), 40).isfinite().all()


def test_unknown_classes_packings_and_bytes_are_refused():
    def lossy(classes: bytes, packing: int, packed: bytes) -> memoryview:
        out = bytearray()
        put_plane(out, classes)
        out.append(packing)
        put_plane(out, packed)
        return memoryview(bytes(out))

    symbols, rest = take_symbols(lossy(bytes(2), 3, bytes([43, 43])), 2, 3)
    assert symbols.tolist() == [[-1, -1, -1], [-1, -1, -1]] and not len(rest)
    for classes, packing, packed in (
        (bytes([0, CLASSES]), 3, bytes([43, 43])),
        (bytes(2), 0, bytes([43, 43])),
        (bytes(2), 5, bytes([43, 43])),
        (bytes(2), 3, bytes([43, 216])),  # 6 ** 3 values exist
    ):
        with pytest.raises(CodecError):
            take_symbols(lossy(classes, packing, packed), 2, 3)


def test_shares_beyond_one_are_refused():
    payload = bytearray(b"\0" + np.ones(4, dtype="<f4").tobytes())
    put_symbols(payload, np.zeros((4, 16), dtype=np.int32))
    put_plane(payload, bytes([9]) * 64)
    with pytest.raises(CodecError, match="eighths"):
        decode_lossy(memoryview(payload), SHAPE, 40)


def test_a_number_of_sinks_that_cannot_be_is_refused():
    for start, wrong in ((0, SINKS + 1), (0, 0), (0, 255), (SINKS, 1)):
        data = bytearray(encode_lossy(KV, start, FINE.steps(0, 2, 2)))
        assert data[0] == max(0, SINKS - start)
        data[0] = wrong
        with pytest.raises(CodecError):
            decode_lossy(memoryview(data), SHAPE, 40)
    short = encode_lossy(KV[:, :, :, :2], 0, FINE.steps(0, 2, 2))
    assert decode_lossy(memoryview(short), SHAPE, 2).shape == SHAPE.size(2)
    for data in (short[:-1], short + b"\0", b""):
        with pytest.raises(CodecError):
            decode_lossy(memoryview(data), SHAPE, 2)


def test_bad_arguments_of_the_sender_are_refused():
    for bad in (KV[0], KV[:1], KV.to(torch.int32), KV[:, :, :, :0], model_like(1, 1, 257, 2)):
        with pytest.raises(CodecError):
            encode_chunk(bad, 0, Level.LOSSLESS, Depth(0, 1), KEY)
    with pytest.raises(CodecError):
        encode_chunk(KV, -1, Level.LOSSLESS, Depth(0, 1), KEY)
    with pytest.raises(CodecError, match="ids"):
        encode_chunk(KV, 0, Level.RECOMPUTE, Depth(0, 1), KEY)
    for ids in ([], [-1], [1 << 32], range(257)):
        with pytest.raises(CodecError):
            encode_ids(SHAPE, 0, ids, KEY)
