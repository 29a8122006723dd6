"""What is fuzzed: for each decoder, how a valid encoding is made, what it may raise and how much it may allocate."""

from __future__ import annotations

import binascii
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgpack
import torch

from bloombee_spec.tree import NodeSpec
from bloombee_spec.wire import messages, steering
from bloombee_spec.wire.activations import WIRE_DTYPES, CodecError, get_codec
from bloombee_spec.wire.frames import (
    CommitFrame,
    ControlFrame,
    Frame,
    FrameError,
    NodesFrame,
    PrefixFrame,
    RewindFrame,
    RoundFrame,
    decode,
    encode,
)
from bloombee_spec.wire.ledger import Ledger
from bloombee_spec.wire.link_codec import LinkCodec
from bloombee_spec.wire.message import Message

CODECS = ("raw", "lossless", "int8", "tah4", "tah3", "tah-mixed")
SHAPES = ((1, 1), (1, 64), (2, 65), (3, 320), (1, 576), (5, 130), (16, 96))
SLACK = 64 << 10  # bytes that any decoder may take, whatever it is sent: tables, the error and its traceback


@dataclass(frozen=True)
class Case:
    """:param repair: makes checksums right again, so that damage gets past them
    :param bound: bytes that decoding so many may allocate at a time
    """

    valid: bytes
    decode: Callable[[bytes], object]
    error: type[Exception]
    bound: Callable[[int], int]
    repair: Callable[[bytes], bytes] | None = None


@dataclass(frozen=True)
class Target:
    """:param weight: batches of it to one of each of the others"""

    name: str
    make: Callable[[random.Random], Case]
    weight: int = 1


def targets() -> list[Target]:
    codecs = [Target(name, partial(_codec_case, name), 1 if name.startswith("tah") else 2) for name in CODECS]
    return [
        Target("frames", _frame_case, 4), Target("messages", _message_case, 3), *codecs,
        Target("link", partial(_link_case, "raw|lossless")),
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------------ frames


def _frame_case(rng: random.Random) -> Case:
    # a node of three bytes becomes an object with three numbers; values of msgpack are no smaller
    return Case(encode(_frame(rng)), decode, FrameError, lambda size: SLACK + 160 * size, lambda data: _checked(data))


def _frame(rng: random.Random) -> Frame:
    count = rng.choice((0, 1, 1, 3, 8, 40))
    lane, epoch, seq = rng.randrange(256), rng.randrange(9), rng.randrange(1 << 20)
    tokens = tuple(rng.randrange(rng.choice((100, 50_000, 1 << 24))) for _ in range(count))
    kind = rng.randrange(6)
    if kind == 0:
        n_rows = rng.choice((0, count))
        rows = rng.randbytes(n_rows * 8)
        return PrefixFrame(lane, epoch, seq, rng.randrange(9), tokens, rng.random() < 0.5, 99, n_rows, rows)
    if kind == 1:
        first = rng.randrange(1 << 16)
        step = rng.choice((1, 3))
        nodes = tuple(NodeSpec(first + step * i, rng.randrange(-9, first + i), t) for i, t in enumerate(tokens))
        n_rows = rng.choice((0, count))
        return NodesFrame(lane, epoch, seq, nodes, rng.choice((0, 7)), 0, n_rows, rng.randbytes(n_rows * 8))
    if kind == 2:
        return CommitFrame(lane, epoch, rng.randrange(1 << 12), tokens, rng.choice((0, seq)))
    if kind == 3:
        return RewindFrame(lane, epoch, rng.randrange(1 << 12))
    if kind == 4:
        return RoundFrame(lane, epoch, seq, rng.randbytes(count))
    return ControlFrame(_message(rng, rng.choice(_classes())))


def _checked(data: bytes, header: int | None = None) -> bytes:
    """The same bytes with a checksum that fits them, and a version and kind that exist now and then."""
    body = bytearray(data[: -2 if len(data) <= 258 else -4] or b"\x10")
    body[0] = body[0] & 0xF | 0x10 if header is None else header
    checksum = (
        binascii.crc_hqx(body, 0).to_bytes(2, "big") if len(body) <= 256 else zlib.crc32(body).to_bytes(4, "big")
    )
    return bytes(body) + checksum


# ---------------------------------------------------------------------------------------------------- messages


def _classes() -> list[type[Message]]:
    modules = (messages.__name__, steering.__name__)
    return sorted(
        (each for each in Message.__subclasses__() if each.__module__ in modules), key=lambda each: each.__name__
    )


def _message_case(rng: random.Random) -> Case:
    """Half of the time to the class that it names, as a stage does; else to one that expected something else."""
    kind = rng.choice(_classes())
    reader = kind if rng.random() < 0.5 else rng.choice(_classes())

    def read(data: bytes) -> object:
        frame = decode(data)
        if not isinstance(frame, ControlFrame):
            raise FrameError("not a control frame")
        return reader.from_wire(frame.message)

    valid = encode(ControlFrame(_message(rng, kind)))
    return Case(valid, read, FrameError, lambda size: SLACK + 320 * size, lambda data: _checked(data, 0x10))


def _message(rng: random.Random, kind: type[Message]) -> dict[str, Any]:
    """A mapping with this class's fields, most of them of the right type; rarely one that is accepted as it is."""
    hints = get_type_hints(kind)
    values = {field.name: _value(rng, hints[field.name], field.name) for field in fields(kind)}  # type: ignore[arg-type]
    if rng.random() < 0.2 and values:
        values[rng.choice(list(values))] = rng.choice((None, -1, 1 << 62, "x", b"", [], {}, [[]], float("nan"), True))
    if rng.random() < 0.1 and values:
        del values[rng.choice(list(values))]
    packed: dict[str, Any] = msgpack.unpackb(msgpack.packb({"kind": kind.__name__, **values}))
    return packed


def _value(rng: random.Random, hint: Any, name: str) -> Any:
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return None if rng.random() < 0.3 else _value(rng, get_args(hint)[0], name)
    if origin is tuple:
        if name == "traffic":
            ledger = Ledger()
            ledger.of("data", rng.randrange(4), outgoing=True).frames = rng.randrange(1 << 20)
            return list(ledger.to_wire())
        return [_value(rng, get_args(hint)[0], name) for _ in range(rng.choice((0, 1, 2, 6)))]
    if origin is dict:
        return rng.choice(({}, {"do_sample": True, "temperature": 0.7}, {"a": [1, {"b": b"c"}]}))
    if hint is bytes:
        return rng.randbytes(rng.choice((8, 16, 16, 16)))
    if hint is str:
        return rng.choice(("data", "commit", "raw", "raw|lossless", "QmPeer", "x" * rng.randrange(300)))
    if hint is bool:
        return rng.random() < 0.5
    return rng.random() * 9 if hint is float else rng.choice((0, 1, 2, 30, 1000, 1 << 40))


# ------------------------------------------------------------------------------------------------------ codecs


def _rows(rng: random.Random) -> torch.Tensor:
    """Rows with outlier channels, or random bits: NaN with payloads, infinities, denormals."""
    n, hidden = rng.choice(SHAPES)
    dtype = rng.choice(WIRE_DTYPES)
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    if rng.random() < 0.7:
        rows = torch.randn(n, hidden, generator=generator)
        rows[:, :: max(1, hidden // 3)] *= 50
        return rows.to(dtype)
    size = n * hidden * dtype.itemsize
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).view(dtype).view(n, hidden)


def _codec_case(name: str, rng: random.Random) -> Case:
    codec, rows = get_codec(name), _rows(rng)
    return _case(codec.encode(rows), codec.decode, rows, rng)


def _link_case(names: str, rng: random.Random) -> Case:
    link, rows = LinkCodec(names), _rows(rng)
    link.use(rng.choice(link.names))
    return _case(link.encode(rows), link.decode, rows, rng)


def _case(valid: bytes, decode_rows: Callable[..., torch.Tensor], rows: torch.Tensor, rng: random.Random) -> Case:
    """Mostly into the shape that was encoded."""
    shape = tuple(rows.shape) if rng.random() < 0.9 else (rng.randrange(4), rng.randrange(400))

    def read(data: bytes) -> None:
        found = decode_rows(data, *shape, rows.dtype)
        assert found.shape == shape and found.dtype == rows.dtype, f"rows {list(found.shape)} of {found.dtype}"

    values = shape[0] * shape[1]
    return Case(valid, read, CodecError, lambda size: SLACK + 8 * (values * 8 + size))
