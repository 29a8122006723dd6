"""The activation-codec seam: how rows of hidden states become bytes on a link, and the registry of ways to do it.

A codec sees rows only. How many rows, of what width and dtype, is said by the frame around the bytes; so a decoder
always knows how much it may allocate before it reads the first byte.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

import numpy as np
import torch

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "bloombee_spec.codecs"
WIRE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
MAX_VALUES = 1 << 28  # of one encoding: 16k rows of 16k channels; a frame that claims more is refused unread

_BIT_DTYPES = {2: (torch.int16, "<i2"), 4: (torch.int32, "<i4"), 8: (torch.int64, "<i8")}


class CodecError(ValueError):
    """The bytes are not an encoding of what the frame says they are, or the rows cannot be encoded."""


class CodecUnavailable(RuntimeError):
    """The codec is unknown here, or a library that it needs is not installed; the message says what to do."""


class ActivationCodec(ABC):
    """Turns rows `[n, hidden]` into bytes and back. Stateless: one instance serves every link and every thread.

    Subclasses write `_encode`, `_decode` and `max_bytes`; the checks that all codecs share are made here, once.
    """

    name: str
    lossless: bool

    def encode(self, rows: torch.Tensor) -> bytes:
        """The bytes of `rows`.

        :param rows: `[n, hidden]`, any float dtype of WIRE_DTYPES, any stride, any device
        :raises CodecError: wrong rank or dtype, or more than MAX_VALUES values
        """
        rows = _checked_rows(rows)
        return self._encode(rows) if rows.numel() else b""

    def decode(self, data: bytes | memoryview, n: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
        """The rows of `data`, on the CPU: `[n, hidden]` of `dtype`.

        Allocates at most a small multiple of the rows' own bytes, whatever `data` holds.

        :raises CodecError: `data` is not a well-formed encoding of n × hidden values of `dtype`
        """
        view = memoryview(data).cast("B")
        self._check_size(len(view), n, hidden, dtype)
        if n * hidden == 0:
            return torch.empty(n, hidden, dtype=dtype)
        return self._decode(view, n, hidden, dtype)

    def _check_size(self, size: int, n: int, hidden: int, dtype: torch.dtype) -> None:
        check_shape(n, hidden, dtype)
        limit = self.max_bytes(n, hidden, dtype) if n * hidden else 0
        if size > limit:
            raise CodecError(f"{self.name}: {size} bytes for [{n}, {hidden}] {dtype}, expected at most {limit}")

    @abstractmethod
    def max_bytes(self, n: int, hidden: int, dtype: torch.dtype) -> int:
        """Upper bound of the size of an encoding of `[n, hidden]` values of `dtype`, in bytes."""

    @abstractmethod
    def _encode(self, rows: torch.Tensor) -> bytes:
        """`encode` of checked, contiguous, non-empty rows."""

    @abstractmethod
    def _decode(self, data: memoryview, n: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
        """`decode` of at most `max_bytes` bytes into a non-empty shape."""


class RawCodec(ActivationCodec):
    """The backend's own dtype, little endian: `n × hidden × itemsize` bytes."""

    name = "raw"
    lossless = True

    def max_bytes(self, n: int, hidden: int, dtype: torch.dtype) -> int:
        return int(n * hidden * dtype.itemsize)

    def _encode(self, rows: torch.Tensor) -> bytes:
        return row_bytes(rows)

    def _decode(self, data: memoryview, n: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
        return rows_from_bytes(data, n, hidden, dtype)


def check_shape(n: int, hidden: int, dtype: torch.dtype) -> None:
    """:raises CodecError: no codec carries this shape or dtype"""
    if dtype not in WIRE_DTYPES:
        raise CodecError(f"dtype {dtype} does not travel; expected one of {', '.join(map(str, WIRE_DTYPES))}")
    if n < 0 or hidden < 0 or n * hidden > MAX_VALUES:
        raise CodecError(f"shape [{n}, {hidden}] is outside the bounds of one encoding (at most {MAX_VALUES} values)")


def bits_of(rows: torch.Tensor) -> torch.Tensor:
    """The bit patterns of `rows` as signed integers of the same width, same shape."""
    return rows.view(_BIT_DTYPES[rows.dtype.itemsize][0])


def row_bytes(rows: torch.Tensor) -> bytes:
    """The values of contiguous `rows`, little endian."""
    bits = bits_of(rows).cpu().numpy().astype(_BIT_DTYPES[rows.dtype.itemsize][1], copy=False)
    return bytes(bits.tobytes())


def rows_from_bytes(data: memoryview, n: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    """Inverse of `row_bytes`.

    :raises CodecError: the size is not exactly that of n × hidden values
    """
    if len(data) != n * hidden * dtype.itemsize:
        raise CodecError(f"{len(data)} bytes for [{n}, {hidden}] {dtype}, expected {n * hidden * dtype.itemsize}")
    code = _BIT_DTYPES[dtype.itemsize][1]
    bits = np.frombuffer(data, dtype=code).astype(code.replace("<", "="), copy=True)
    return torch.from_numpy(bits).view(dtype).view(n, hidden)


def _checked_rows(rows: torch.Tensor) -> torch.Tensor:
    if rows.ndim != 2:
        raise CodecError(f"rows have shape {list(rows.shape)}, expected [n, hidden]")
    check_shape(rows.shape[0], rows.shape[1], rows.dtype)
    return rows.detach().contiguous()


# Own codecs are loaded by name when first used, so that a missing library hides one codec and nothing else.
_BUILTIN = {
    "raw": "bloombee_spec.wire.activations:RawCodec",
    "lossless": "bloombee_spec.wire.lossless:LosslessCodec",
    "int8": "bloombee_spec.wire.int8:Int8Codec",
    "tah4": "bloombee_spec.wire.hadamard:Tah4Codec",
    "tah3": "bloombee_spec.wire.hadamard:Tah3Codec",
    "tah-mixed": "bloombee_spec.wire.hadamard:TahMixedCodec",
}


@cache
def get_codec(name: str) -> ActivationCodec:
    """The codec of this name. Other packages add theirs under the entry-point group `bloombee_spec.codecs`.

    :raises CodecUnavailable: no such codec, or its library is missing
    """
    try:
        if name in _BUILTIN:
            module, attribute = _BUILTIN[name].split(":")
            factory: Callable[[], object] = getattr(import_module(module), attribute)
        elif name in _extensions():
            factory = _extensions()[name].load()
        else:
            raise CodecUnavailable(f"no activation codec is named {name!r}; here are {', '.join(codec_names())}")
    except ImportError as error:
        raise CodecUnavailable(f"the activation codec {name!r} cannot be loaded: {error}") from error
    codec = factory()
    if not isinstance(codec, ActivationCodec) or codec.name != name:
        raise CodecUnavailable(f"the entry point {name!r} does not make an ActivationCodec of that name")
    return codec


@cache
def codec_names() -> tuple[str, ...]:
    """The codecs that work on this machine, sorted: what a peer may offer."""
    return tuple(sorted(filter(_works, (*_BUILTIN, *_extensions()))))


def _works(name: str) -> bool:
    try:
        get_codec(name)
    except CodecUnavailable as error:
        logger.info("not offered: %s", error)
        return False
    return True


@cache
def _extensions() -> dict[str, EntryPoint]:
    found: Iterable[EntryPoint] = entry_points(group=ENTRY_POINT_GROUP)
    for entry in found:
        if entry.name in _BUILTIN:
            logger.warning("the codec %s of %s is left out: its name is taken", entry.name, entry.value)
    return {entry.name: entry for entry in found if entry.name not in _BUILTIN}
