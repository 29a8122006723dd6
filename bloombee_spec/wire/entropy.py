"""Entropy coding of byte planes with zstandard, set up to act as a fast Huffman coder, and packing of incompressible
bits.

Of constriction (ANS and range coder), blosc2 and zstandard on real rows, zstandard with its match search all but
disabled won: within 2 % of the bytes of an ANS coder, in an eighth of its time (docs/codecs.md).
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from bloombee_spec.wire.activations import CodecError, CodecUnavailable
from bloombee_spec.wire.varint import FrameError, Reader, put_uint

try:
    import zstandard
except ImportError:
    zstandard = None  # type: ignore[assignment]

ByteArray = npt.NDArray[np.uint8]

_RAW, _PLAIN, _TRAINED = 0, 1, 2  # how a plane was written
_SHORT = 1024  # bytes; below, zstd takes a dictionary's table without asking whether one of its own would be better
_WINDOW_LOG = 17
# Each zstd frame would start with these two bytes (window of 128 KiB; no content size, no checksum), so they stay at
# home. That also means that no peer can announce a content size, for which the library would allocate unasked.
_FRAME_HEADER = bytes([0x00, (_WINDOW_LOG - 10) << 3])

# A zstd dictionary (RFC 8878, section 5) made for one thing: the Huffman weights of the symbols 0 to 122 of
# lossless.py, a hex digit each, so that a short plane needs no table of its own. benchmarks/codecs_dictionary.py
# computes them from rows of SmolLM2-135M. What follows them (sequence tables, repeat offsets, 8 bytes of content)
# the format asks for; it sees no use.
_WEIGHTS = (
    "20000000000000000000000000000000000000001111111111112111323233"
    "33444455556666777788889888876665544321221111111111111111111110"
)
_UNUSED_TABLES = (
    "a331280c12140f0c0c6766db06442045d10c81402010080402814020100804411004411004411004411004414c84104208212222f244"
    "800001020202020204040402020202040204040202870a02079c40f04544441e0100000004000000080000004041424344454647"
)
_DICTIONARY = bytes.fromhex("37a430ec43505342" + "fa" + _WEIGHTS + _UNUSED_TABLES)


class _Contexts(threading.local):
    """zstd contexts serve one thread at a time and cost more to make than a row costs to code."""

    def __init__(self) -> None:
        parameters = zstandard.ZstdCompressionParameters(
            format=zstandard.FORMAT_ZSTD1_MAGICLESS,
            strategy=zstandard.STRATEGY_FAST,
            window_log=_WINDOW_LOG,
            hash_log=6,  # the smallest tables and the longest shortest match: exponents have no repeats worth a search
            chain_log=6,
            search_log=1,
            min_match=7,
            target_length=0,
            write_content_size=0,
            write_checksum=0,
            write_dict_id=0,
        )
        dictionary = zstandard.ZstdCompressionDict(_DICTIONARY)
        self.compressors = {
            _PLAIN: zstandard.ZstdCompressor(compression_params=parameters),
            _TRAINED: zstandard.ZstdCompressor(compression_params=parameters, dict_data=dictionary),
        }
        self.decompressors = {_PLAIN: _decompressor(None), _TRAINED: _decompressor(dictionary)}


def _decompressor(dictionary: Any) -> Any:
    magicless = zstandard.FORMAT_ZSTD1_MAGICLESS
    return zstandard.ZstdDecompressor(dict_data=dictionary, max_window_size=1 << _WINDOW_LOG, format=magicless)


_contexts = _Contexts() if zstandard is not None else None


def require_zstandard(codec: str) -> None:
    """:raises CodecUnavailable: the library is not installed"""
    if zstandard is None:
        raise CodecUnavailable(f"the codec {codec!r} needs the package zstandard: pip install 'zstandard>=0.22'")


def put_plane(out: bytearray, plane: bytes, *, trained: bool = False) -> None:
    """Appends `plane`, compressed if that makes it shorter. Whoever reads it must know its size.

    :param trained: the plane holds symbols as in lossless.py, for which the dictionary has a table
    """
    assert _contexts is not None
    kinds = [_TRAINED, _PLAIN] if trained and len(plane) <= _SHORT else [_TRAINED if trained else _PLAIN]
    packed = {kind: _contexts.compressors[kind].compress(plane)[len(_FRAME_HEADER) :] for kind in kinds}
    kind = min(kinds, key=lambda k: len(packed[k]))
    if len(packed[kind]) >= len(plane):
        put_uint(out, _RAW)
        out += plane
    else:
        put_uint(out, len(packed[kind]) << 2 | kind)
        out += packed[kind]


def take_plane(data: memoryview, size: int) -> tuple[ByteArray, memoryview]:
    """The plane of `size` bytes with which `data` begins, and what follows it. Allocates `size` bytes, whatever
    `data` says.

    :raises CodecError: malformed, or of another size
    """
    assert _contexts is not None
    try:
        reader = Reader(data)
        tag = reader.uint(limit=size << 2 | _TRAINED)
        rest = reader.rest()
        length, kind = (size, _RAW) if tag == _RAW else (tag >> 2, tag & 3)
        if length > len(rest):
            raise CodecError(f"a plane of {length} bytes starts {len(rest)} bytes before the end")
        packed, rest = rest[:length], rest[length:]
        if tag == _RAW:
            return np.frombuffer(packed, dtype=np.uint8), rest
        if kind not in _contexts.decompressors:
            raise CodecError(f"a plane is of the unknown kind {kind}")
        frame = _FRAME_HEADER + packed
        plane = _contexts.decompressors[kind].decompress(frame, max_output_size=size, allow_extra_data=False)
    except (FrameError, zstandard.ZstdError) as error:
        raise CodecError(f"a plane of {size} bytes is malformed: {error}") from error
    if len(plane) != size:
        raise CodecError(f"a plane has {len(plane)} bytes, expected {size}")
    return np.frombuffer(plane, dtype=np.uint8), rest


def pack_bits(values: ByteArray, width: int) -> bytes:
    """The lowest `width` < 8 bits of each of `values`, packed:

    a plane of four bits if there are that many, then single bits.
    """
    parts = []
    if width >= 4:
        half = (len(values) + 1) // 2
        nibbles = values[:half] & 15
        nibbles[: len(values) - half] |= values[half:] << 4
        parts.append(nibbles.tobytes())
    for place in range(4 if width >= 4 else 0, width):
        parts.append(np.packbits(values & (1 << place)).tobytes())
    return b"".join(parts)


def packed_size(count: int, width: int) -> int:
    """Bytes that `pack_bits` makes of `count` values."""
    nibbles, single = ((count + 1) // 2, width - 4) if width >= 4 else (0, width)
    return nibbles + single * -(-count // 8)


def unpack_bits(packed: memoryview, count: int, width: int) -> ByteArray:
    """Inverse of `pack_bits`; `packed` has `packed_size` bytes."""
    data = np.frombuffer(packed, dtype=np.uint8)
    values = np.zeros(count, dtype=np.uint8)
    if width >= 4:
        half = (count + 1) // 2
        values[:half], values[half:] = data[:half] & 15, data[: count - half] >> 4
        data = data[half:]
    plane = -(-count // 8)
    for index, place in enumerate(range(4 if width >= 4 else 0, width)):
        values |= np.unpackbits(data[index * plane : (index + 1) * plane], count=count) << np.uint8(place)
    return values
