"""Entropy stage of the lossy KV levels: small integers of many channels, where channels differ in spread.

A table per (layer, channel) would cost more than it saves on 256 tokens. Instead channels of equal spread form a
class, across layers and heads, and each class is a stream of its own with its own table; the class of a channel is
one byte, before compression. Up to eight symbols share a byte of a stream, so that a Huffman coder, which spends
whole bits, gets near the entropy of symbols that are mostly zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from bloombee_spec.wire.activations import CodecError
from bloombee_spec.wire.entropy import ByteArray, put_plane, take_plane

Symbols = npt.NDArray[np.int32]

CLASSES = 24
_PACKINGS = (8, 4, 3, 2, 1)  # symbols per byte
_ALPHABET = {8: 2, 4: 4, 3: 6, 2: 16, 1: 256}  # of a packing: -radius .. radius, and one that stands for an escape
_ESCAPES = 0.02  # share of a class above which a packing is not tried
_TRIALS = 2  # of the packings that fit, the densest are tried


def put_symbols(out: bytearray, symbols: Symbols) -> None:
    """Appends `symbols` `[channels, n]`. Whoever reads them must know both sizes."""
    channels, n = symbols.shape
    classes = spread_classes(symbols)
    put_plane(out, classes.tobytes())
    if not n:
        return
    order = np.argsort(classes, kind="stable")
    ends = np.bincount(classes, minlength=CLASSES).cumsum()
    ordered = symbols[order]
    escaped = []
    for start, end in zip((0, *ends[:-1]), ends):
        if end > start:
            escaped.append(_put_class(out, ordered[start:end].reshape(-1)))
    values = np.concatenate(escaped)
    if len(values):
        planes = np.ascontiguousarray(values.astype("<i4").view(np.uint8).reshape(-1, 4).T)
        put_plane(out, planes.tobytes())


def take_symbols(data: memoryview, channels: int, n: int) -> tuple[Symbols, memoryview]:
    """The symbols `[channels, n]` with which `data` begins, and what follows them. Allocates a small multiple of
    `channels × n` bytes, whatever `data` says.

    :raises CodecError: malformed
    """
    classes, data = take_plane(data, channels)
    symbols = np.zeros((channels, n), dtype=np.int32)
    if int(classes.max(initial=0)) >= CLASSES:
        raise CodecError(f"a channel is of class {classes.max()}, there are {CLASSES}")
    if not n:
        return symbols, data
    order = np.argsort(classes, kind="stable")
    ends = np.bincount(classes, minlength=CLASSES).cumsum()
    ordered = np.empty(channels * n, dtype=np.int16)
    escapes = []
    for start, end in zip((0, *ends[:-1]), ends):
        if end > start:
            data, at = _take_class(data, ordered[start * n : end * n])
            escapes.append(at + start * n)
    wide = ordered.astype(np.int32)
    places = np.concatenate(escapes)
    if len(places):
        plane, data = take_plane(data, 4 * len(places))
        wide[places] = np.ascontiguousarray(plane.reshape(4, -1).T).view("<i4").reshape(-1)
    symbols[order] = wide.reshape(channels, n)
    return symbols, data


def spread_classes(symbols: Symbols) -> ByteArray:
    """The class of each channel: half octaves of its mean magnitude, from 1/64 and less to 48 and more."""
    mean = np.abs(symbols).mean(axis=1, dtype=np.float32) if symbols.shape[1] else np.zeros(len(symbols), np.float32)
    steps = np.rint(2.0 * np.log2(np.maximum(mean, 2.0**-6))) + 12
    classes: ByteArray = np.clip(steps, 0, CLASSES - 1).astype(np.uint8)
    return classes


def _put_class(out: bytearray, symbols: Symbols) -> Symbols:
    """Appends one class in the packing that makes it shortest; returns the symbols that it has only escapes for."""
    magnitudes = np.abs(symbols)
    beyond = {packing: int((magnitudes > _radius(packing)).sum()) for packing in _PACKINGS}
    fitting = [packing for packing in _PACKINGS if beyond[packing] <= _ESCAPES * len(symbols)][:_TRIALS] or [1]
    packed = {packing: _packed(symbols, packing) for packing in fitting}
    best = min(fitting, key=lambda packing: len(packed[packing]) + beyond[packing])  # an escape takes about a byte
    out += packed[best]
    return symbols[magnitudes > _radius(best)]


def _packed(symbols: Symbols, packing: int) -> bytearray:
    out = bytearray([packing])
    put_plane(out, _pack(symbols, packing).tobytes())
    return out


def _take_class(data: memoryview, symbols: npt.NDArray[np.int16]) -> tuple[memoryview, npt.NDArray[np.int64]]:
    """Fills `symbols`; returns what follows the class and where its escapes are."""
    packing = data[0] if len(data) else 0
    if packing not in _ALPHABET:
        raise CodecError(f"a class of symbols is packed {packing} to a byte")
    plane, data = take_plane(data[1:], -(-len(symbols) // packing))
    table = _UNPACK[packing]
    if len(table) < 256 and int(plane.max()) >= len(table):
        raise CodecError(f"a byte of {packing} symbols holds {plane.max()}, at most {len(table) - 1} exists")
    symbols[:] = table[plane].reshape(-1)[: len(symbols)]
    escapes = np.flatnonzero(symbols > _radius(packing))
    return data, escapes


def _radius(packing: int) -> int:
    return (_ALPHABET[packing] - 2) // 2


def _pack(symbols: Symbols, packing: int) -> ByteArray:
    """Symbols of a class, `packing` to a byte, the first one in the lowest place; beyond the radius is an escape."""
    base, radius = _ALPHABET[packing], _radius(packing)
    codes = np.minimum((symbols + radius).view(np.uint32), base - 1).astype(np.uint8)  # negative ones wrap to huge
    codes = np.pad(codes, (0, -len(codes) % packing), constant_values=radius).reshape(-1, packing)
    packed = codes[:, packing - 1].copy()
    for place in range(packing - 2, -1, -1):
        packed *= np.uint8(base % 256)
        packed += codes[:, place]
    return packed


def _unpack_table(packing: int) -> npt.NDArray[np.int16]:
    """`[bytes, packing]`: the symbols of each byte."""
    base, radius = _ALPHABET[packing], _radius(packing)
    codes = np.arange(base**packing)
    places = [codes // base**place % base - radius for place in range(packing)]
    table: npt.NDArray[np.int16] = np.stack(places, axis=1).astype(np.int16)
    return table


_UNPACK: dict[int, npt.NDArray[Any]] = {packing: _unpack_table(packing) for packing in _PACKINGS}
