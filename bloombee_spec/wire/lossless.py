"""Bit-exact activations in fewer bytes: what is predictable in a value is entropy-coded, the rest is packed as it is.

In a row of activations only the exponent and, a little, the top of the mantissa are predictable; sign and lower
mantissa are noise. So each value becomes a symbol of 7 bits (its exponent relative to the row's mean exponent, and
its upper two mantissa bits), which goes through the entropy stage, and a residue (sign and the other mantissa bits),
which is packed. The rows of one encoding share their statistics: that changes how many bytes they take, never what
they decode to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bloombee_spec.wire.activations import ActivationCodec, CodecError, bits_of, row_bytes, rows_from_bytes
from bloombee_spec.wire.entropy import (
    ByteArray,
    pack_bits,
    packed_size,
    put_plane,
    require_zstandard,
    take_plane,
    unpack_bits,
)

Words = npt.NDArray[np.unsignedinteger[Any]]
Fields = npt.NDArray[np.int16]

_RAW, _PLANES = 0, 1  # first byte of an encoding
# An exponent's code is 0 for the field 0 (zeros, denormals), 1 for an escape (the field follows in a list of its
# own), and else counts from 18 below the row's mean to 11 above it: all but a few values of real rows, outlier
# channels included.
_ESCAPE, _FIRST, _MEAN, _LAST = 1, 2, 20, 31
_TOP = 2  # mantissa bits in a symbol; a "field" here is an exponent and these bits, a symbol is a code and these bits


@dataclass(frozen=True, slots=True)
class Layout:
    """The parts of a float:

    sign, `exponent` bits, 2 mantissa bits that belong to the symbol, `low` bits that do not.
    """

    word: type[np.unsignedinteger[Any]]
    exponent: int
    low: int

    @property
    def max_exponent(self) -> int:
        return (1 << self.exponent) - 1

    @property
    def exponent_code(self) -> str:
        return "<u1" if self.exponent <= 8 else "<u2"

    @property
    def planes(self) -> int:
        """Whole bytes of a residue."""
        return (1 + self.low) // 8

    @property
    def odd_bits(self) -> int:
        return (1 + self.low) % 8


LAYOUTS = {
    torch.bfloat16: Layout(np.uint16, 8, 5),
    torch.float16: Layout(np.uint16, 5, 8),
    torch.float32: Layout(np.uint32, 8, 21),
    torch.float64: Layout(np.uint64, 11, 50),
}


class LosslessCodec(ActivationCodec):
    """One byte more than raw if there is nothing to gain. Works on the host: rows on a GPU are copied there first."""

    name = "lossless"
    lossless = True

    def __init__(self) -> None:
        require_zstandard(self.name)

    def max_bytes(self, n: int, hidden: int, dtype: torch.dtype) -> int:
        return 1 + n * hidden * int(dtype.itemsize)

    def _encode(self, rows: torch.Tensor) -> bytes:
        rows = rows.cpu()
        layout = LAYOUTS[rows.dtype]
        words: Words = bits_of(rows).numpy().view(layout.word)
        means, symbols, escaped = symbols_of(words, layout)
        out = bytearray([_PLANES])
        out += means.astype(layout.exponent_code).tobytes()
        put_plane(out, symbols.tobytes(), trained=True)
        if len(escaped):
            put_plane(out, escaped.astype(layout.exponent_code).tobytes())
        _put_residue(out, words.reshape(-1), layout)
        raw_size = 1 + words.nbytes
        return bytes(out) if len(out) < raw_size else bytes([_RAW]) + row_bytes(rows)

    def _decode(self, data: memoryview, n: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
        if len(data) and data[0] == _RAW:
            return rows_from_bytes(data[1:], n, hidden, dtype)
        layout = LAYOUTS[dtype]
        start = 1 + n * np.dtype(layout.exponent_code).itemsize
        if len(data) < start or data[0] != _PLANES:
            raise CodecError(f"{self.name}: {len(data)} bytes do not begin like an encoding of {n} rows")
        means = np.frombuffer(data[1:start], layout.exponent_code)
        symbols, rest = take_plane(data[start:], n * hidden)
        fields, rest = _fields(symbols.reshape(n, hidden), means, rest, layout)
        words = fields.reshape(-1).astype(layout.word) << layout.word(layout.low)
        _add_residue(words, rest, layout)
        signed = words.view(words.dtype.str.replace("u", "i"))
        return torch.from_numpy(signed).view(dtype).view(n, hidden)


def symbols_of(words: Words, layout: Layout) -> tuple[Fields, ByteArray, Fields]:
    """Mean exponents `[n]`, symbols `[n, hidden]`, and the exponents that have no code, in their order."""
    fields = (words >> layout.word(layout.low)).astype(np.int16) & np.int16(layout.max_exponent << _TOP | 3)
    hidden = words.shape[1]
    means = ((2 * (fields >> _TOP).sum(axis=1, dtype=np.int64) + hidden) // (2 * hidden)).astype(np.int16)
    relative = fields - ((means - _MEAN) << _TOP)[:, None]
    symbols = relative.astype(np.uint8)
    special = np.flatnonzero((relative < _FIRST << _TOP) | (relative >= (_LAST + 1) << _TOP) | (fields <= 3))
    of_special = fields.reshape(-1)[special]
    symbols.reshape(-1)[special] = np.where(of_special <= 3, of_special, _ESCAPE << _TOP | of_special & 3)
    return means, symbols, of_special[of_special > 3] >> _TOP


def _fields(
    symbols: ByteArray, means: npt.NDArray[np.unsignedinteger[Any]], rest: memoryview, layout: Layout
) -> tuple[Fields, memoryview]:
    """Inverse of `symbols_of`: the fields `[n, hidden]`, and what of `rest` follows the escaped exponents.

    :raises CodecError: an exponent that the dtype does not have
    """
    # The minima keep everything within 16 bits; what they change is out of range before and after.
    offsets = np.minimum(means, 0xFFF).astype(np.int16) - _MEAN << _TOP
    fields = symbols.astype(np.int16) + offsets[:, None]
    special = np.flatnonzero(symbols < _FIRST << _TOP)
    of_special = symbols.reshape(-1)[special].astype(np.int16)
    escapes = of_special > 3
    count = int(escapes.sum())
    if count:
        plane, rest = take_plane(rest, count * np.dtype(layout.exponent_code).itemsize)
        exponents = np.minimum(plane.view(layout.exponent_code), 0x1FFF).astype(np.int16)
        of_special[escapes] = exponents << _TOP | of_special[escapes] & 3
    fields.reshape(-1)[special] = of_special
    low, high = int(fields.min()), int(fields.max())
    if low < 0 or high > layout.max_exponent << _TOP | 3:
        raise CodecError(f"exponents from {low >> _TOP} to {high >> _TOP}, at most {layout.max_exponent} exists")
    return fields, rest


def _put_residue(out: bytearray, words: Words, layout: Layout) -> None:
    word, low = layout.word, layout.low
    residue = words & word((1 << low) - 1) | words >> word(layout.exponent + _TOP + low) << word(low)
    for plane in range(layout.planes):
        put_plane(out, (residue >> word(8 * plane)).astype(np.uint8).tobytes())
    if layout.odd_bits:
        out += pack_bits((residue >> word(8 * layout.planes)).astype(np.uint8), layout.odd_bits)


def _add_residue(words: Words, rest: memoryview, layout: Layout) -> None:
    """Puts signs and low mantissa bits into `words` `[n × hidden]`, which hold only the rest.

    :raises CodecError: `rest` is malformed
    """
    word, low = layout.word, layout.low
    residue = np.zeros_like(words)
    for plane in range(layout.planes):
        values, rest = take_plane(rest, len(words))
        residue |= values.astype(word) << word(8 * plane)
    expected = packed_size(len(words), layout.odd_bits)
    if len(rest) != expected:
        raise CodecError(f"{len(rest)} bytes of odd bits for {len(words)} values, expected {expected}")
    if layout.odd_bits:
        residue |= unpack_bits(rest, len(words), layout.odd_bits).astype(word) << word(8 * layout.planes)
    words |= residue & word((1 << low) - 1)
    words |= residue >> word(low) << word(layout.exponent + _TOP + low)
