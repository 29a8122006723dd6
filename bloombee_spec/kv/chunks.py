"""One chunk of a span's KV on the wire: at most 256 tokens, at one level, behind a header, with a keyed checksum.

    "KV" | version | level | dtype | blocks | kv_heads | head_dim | start | tokens | payload bytes | payload | sum

The key of the sum belongs to one transfer. So a chunk that was damaged, that another transfer carried, or that anybody
without the key has made, is refused before its payload is looked at.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from bloombee_spec.kv.cachegen import COARSE, FINE, decode_lossy, encode_lossy
from bloombee_spec.kv.levels import Level
from bloombee_spec.kv.span import SpanShape, from_channels, to_channels
from bloombee_spec.wire.activations import WIRE_DTYPES, CodecError, get_codec
from bloombee_spec.wire.entropy import require_zstandard

MAX_CHUNK_TOKENS = 256
KEY_BYTES, SUM_BYTES = 16, 16
MAX_POSITION = 1 << 31
VERSION = 1

_HEADER = struct.Struct("<2sBBBHHHIHI")
_MAGIC = b"KV"
_CODECS = {Level.LOSSLESS: "lossless", Level.INT8: "int8"}
_QUALITIES = {Level.FINE: FINE, Level.COARSE: COARSE}
_TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class Depth:
    """Where in the model the span is, which decides how fine its steps are.

    :param first_block: index in the model of the span's first block
    :param model_blocks: blocks of the whole model
    """

    first_block: int
    model_blocks: int


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """A decoded chunk: the KV `[2, blocks, kv_heads, tokens, head_dim]` of the tokens from position `start` on, or, at
    the level `RECOMPUTE`, their ids."""

    start: int
    tokens: int
    level: Level
    kv: torch.Tensor | None = None
    ids: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return self.start + self.tokens


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    shape: SpanShape
    level: Level
    start: int
    tokens: int
    payload: int


def encode_chunk(kv: torch.Tensor, start: int, level: Level, depth: Depth, key: bytes) -> bytes:
    """
    :param kv: `[2, blocks, kv_heads, tokens, head_dim]`, any stride, any device
    :param start: position of the first token
    :param key: of the transfer, KEY_BYTES
    :raises CodecError: a shape that does not travel, or values that this level does not carry
    """
    shape, tokens = SpanShape.of(kv), kv.shape[3]
    if level is Level.RECOMPUTE:
        raise CodecError("a chunk to recompute has ids, no KV")
    _check_place(start, tokens)
    if level in _CODECS:
        payload = get_codec(_CODECS[level]).encode(to_channels(kv))
    else:
        require_zstandard(level.name.lower())
        steps = _QUALITIES[level].steps(depth.first_block, shape.blocks, depth.model_blocks)
        payload = encode_lossy(kv, start, steps)
        if len(payload) > max_payload(shape, tokens, level):
            raise CodecError("KV whose values are too uneven for a lossy level; use lossless")
    return _sealed(shape, level, start, tokens, payload, key)


def encode_ids(shape: SpanShape, start: int, ids: Sequence[int], key: bytes) -> bytes:
    """A chunk that the receiver's side recomputes from the ids of its tokens.

    :raises CodecError: too many ids, or one that is not a token
    """
    _check_place(start, len(ids))
    if not all(0 <= token < 1 << 8 * _TOKEN_BYTES for token in ids):
        raise CodecError(f"token ids between {min(ids)} and {max(ids)}")
    return _sealed(shape, Level.RECOMPUTE, start, len(ids), np.array(ids, dtype="<u4").tobytes(), key)


def max_payload(shape: SpanShape, tokens: int, level: Level) -> int:
    """Upper bound of a chunk's payload, in bytes."""
    if level is Level.RECOMPUTE:
        return _TOKEN_BYTES * tokens
    if level in _CODECS:
        return get_codec(_CODECS[level]).max_bytes(shape.channels, tokens, shape.dtype)
    return 8 * shape.blocks + shape.channels * (2 * tokens + 32) + 1024


def max_chunk_bytes(shape: SpanShape, tokens: int = MAX_CHUNK_TOKENS, level: Level | None = None) -> int:
    """Upper bound of a chunk at a level, or at any, in bytes: what a receiver must be ready to read."""
    levels = Level if level is None else (level,)
    return _HEADER.size + max(max_payload(shape, tokens, each) for each in levels) + SUM_BYTES


def chunk_tokens(shape: SpanShape, limit_bytes: int, level: Level | None = None) -> int:
    """The most tokens with which no chunk of this shape, at that level or at whatever level, is longer than
    `limit_bytes`.

    :raises CodecError: not even one token fits
    """
    for n in (256, 192, 128, 96, 64, 48, 32, 16, 8, 4, 2, 1):
        if max_chunk_bytes(shape, n, level) <= limit_bytes:
            return n
    one = max_chunk_bytes(shape, 1, level)
    raise CodecError(f"one token of {shape} takes up to {one} bytes, {limit_bytes} are allowed")


def read_header(data: bytes | memoryview, shape: SpanShape) -> ChunkHeader:
    """:param shape: what was agreed upon; a chunk of anything else is refused
    :raises CodecError: not a chunk, of another version or shape, or of another length than it says
    """
    if not _HEADER.size + SUM_BYTES < len(data) <= max_chunk_bytes(shape):
        most = max_chunk_bytes(shape)
        raise CodecError(f"a chunk of {len(data)} bytes, expected {_HEADER.size + SUM_BYTES + 1} to {most}")
    magic, version, level, dtype, blocks, kv_heads, head_dim, start, tokens, payload = _HEADER.unpack_from(data)
    if magic != _MAGIC or version != VERSION:
        raise CodecError(f"a chunk begins with {magic!r}, version {version}; expected {_MAGIC!r}, version {VERSION}")
    if dtype >= len(WIRE_DTYPES) or (blocks, kv_heads, head_dim, WIRE_DTYPES[dtype]) != (
        shape.blocks, shape.kv_heads, shape.head_dim, shape.dtype,
    ):  # fmt: skip
        raise CodecError(f"a chunk of {blocks} blocks, {kv_heads} heads, size {head_dim}, dtype {dtype}: not {shape}")
    _check_place(start, tokens)
    try:
        known = Level(level)
    except ValueError:
        raise CodecError(f"a chunk is at the unknown level {level}") from None
    if payload > max_payload(shape, tokens, known) or len(data) != _HEADER.size + payload + SUM_BYTES:
        raise CodecError(f"a chunk of {len(data)} bytes announces a payload of {payload} for {tokens} tokens")
    return ChunkHeader(shape, known, start, tokens, payload)


def check_sum(data: bytes | memoryview, key: bytes) -> None:
    """:raises CodecError: the chunk was damaged, or belongs to another transfer"""
    view = memoryview(data)
    if not hmac.compare_digest(_sum(view[:-SUM_BYTES], key), bytes(view[-SUM_BYTES:])):
        raise CodecError("checksum mismatch: a chunk was damaged, or belongs to another transfer")


def decode_chunk(data: bytes | memoryview, shape: SpanShape, key: bytes) -> Chunk:
    """:raises CodecError: anything but an intact chunk of this shape and transfer"""
    header = read_header(data, shape)
    check_sum(data, key)
    return decode_payload(header, memoryview(data)[_HEADER.size : -SUM_BYTES])


def decode_payload(header: ChunkHeader, payload: memoryview) -> Chunk:
    """:raises CodecError: malformed"""
    shape, tokens, level = header.shape, header.tokens, header.level
    if level is Level.RECOMPUTE:
        if len(payload) != _TOKEN_BYTES * tokens:
            raise CodecError(f"{len(payload)} bytes of ids for {tokens} tokens")
        return Chunk(header.start, tokens, level, ids=tuple(np.frombuffer(payload, dtype="<u4").tolist()))
    if level in _CODECS:
        rows = get_codec(_CODECS[level]).decode(payload, shape.channels, tokens, shape.dtype)
        kv = from_channels(rows, shape)
    else:
        require_zstandard(level.name.lower())
        kv = decode_lossy(payload, shape, tokens)
    return Chunk(header.start, tokens, level, kv=kv)


def _check_place(start: int, tokens: int) -> None:
    if not 1 <= tokens <= MAX_CHUNK_TOKENS or not 0 <= start <= MAX_POSITION - tokens:
        raise CodecError(f"a chunk of {tokens} tokens from position {start}: 1 to {MAX_CHUNK_TOKENS} may travel")


def _sealed(shape: SpanShape, level: Level, start: int, tokens: int, payload: bytes, key: bytes) -> bytes:
    dtype = WIRE_DTYPES.index(shape.dtype)
    sizes = shape.blocks, shape.kv_heads, shape.head_dim, start, tokens, len(payload)
    body = _HEADER.pack(_MAGIC, VERSION, level, dtype, *sizes) + payload
    return body + _sum(body, key)


def _sum(body: bytes | memoryview, key: bytes) -> bytes:
    if len(key) != KEY_BYTES:
        raise ValueError(f"the key of a transfer has {KEY_BYTES} bytes, found {len(key)}")
    return hashlib.blake2b(body, digest_size=SUM_BYTES, key=key).digest()
