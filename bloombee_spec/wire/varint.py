"""Little-endian base-128 varints over a bounded buffer."""

from __future__ import annotations

MAX_VARINT_BYTES = 6  # 42 bits: more than any id, token, position or counter needs


class FrameError(ValueError):
    """The bytes of a peer do not form a valid frame."""


def put_uint(out: bytearray, value: int) -> None:
    """:raises ValueError: negative or beyond 42 bits"""
    if not 0 <= value < 1 << (7 * MAX_VARINT_BYTES):
        raise ValueError(f"{value} does not fit a {MAX_VARINT_BYTES}-byte varint")
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def put_int(out: bytearray, value: int) -> None:
    """Zigzag: small magnitudes of either sign stay short."""
    put_uint(out, value << 1 if value >= 0 else (-value << 1) - 1)


class Reader:
    """Reads a frame's body; every read is checked against the end of the buffer."""

    def __init__(self, data: memoryview):
        self._data, self._at = data, 0

    def byte(self) -> int:
        if self._at >= len(self._data):
            raise FrameError("frame ends in the middle of a field")
        self._at += 1
        return self._data[self._at - 1]

    def take(self, size: int) -> memoryview:
        """The next `size` bytes."""
        if self._at + size > len(self._data):
            raise FrameError("frame ends in the middle of a field")
        self._at += size
        return self._data[self._at - size : self._at]

    def uint(self, limit: int) -> int:
        """:param limit: largest value that the caller accepts"""
        value = shift = 0
        for _ in range(MAX_VARINT_BYTES):
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                if value > limit:
                    raise FrameError(f"field holds {value}, at most {limit} is allowed")
                return value
            shift += 7
        raise FrameError("varint is too long")

    def int(self, limit: int) -> int:
        value = self.uint(2 * limit)
        return value >> 1 if value & 1 == 0 else -(value + 1 >> 1)

    def rest(self) -> memoryview:
        rest = self._data[self._at :]
        self._at = len(self._data)
        return rest

    def end(self) -> None:
        if self._at != len(self._data):
            raise FrameError(f"{len(self._data) - self._at} unexpected bytes at the end of a frame")
