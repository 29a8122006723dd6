"""What crosses the wire: frames of committed prefixes, candidate nodes, commits and rewinds, and control messages.

A frame is `[version:4 | kind:4] body checksum`. The checksum is CRC-16 for frames of up to 256 bytes, CRC-32 above, so
that a
commit of one token stays below 16 bytes. On a stream a frame is preceded by its length in 3 bytes, big endian.
Activation rows travel as opaque bytes of a named codec: a frame is decoded without touching them.
"""

from __future__ import annotations

import binascii
import zlib
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import msgpack

from bloombee_spec.tree import NodeSpec
from bloombee_spec.wire.node_list import MAX_TOKEN, is_consecutive, put_nodes, read_nodes
from bloombee_spec.wire.varint import FrameError, Reader, put_uint

__all__ = [
    "MAX_FRAME_BYTES",
    "MAX_LANES",
    "MAX_NODES",
    "MAX_TOKEN",
    "PROTOCOL_VERSION",
    "CommitFrame",
    "ControlFrame",
    "Encoded",
    "Frame",
    "FrameError",
    "NodesFrame",
    "PrefixFrame",
    "RewindFrame",
    "RoundFrame",
    "checksum_bytes",
    "decode",
    "encode",
    "kind_of",
]

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 8 << 20
MAX_LANES = 256
MAX_NODES = 4096  # nodes or prefix tokens in one frame
MAX_POSITION = 1 << 24
MAX_COUNTER = 1 << 40
_SHORT = 256


class Kind(IntEnum):
    CONTROL = 0
    PREFIX = 1
    NODES = 2
    COMMIT = 3
    REWIND = 4
    ROUND = 5


@dataclass(frozen=True, slots=True)
class PrefixFrame:
    """Committed tokens that flow down the ring: a prompt chunk, a new turn, an edited history.

    The receiver forgets everything from position `start` on, then appends `tokens`. `rows` holds activations of the
    last `n_rows`
    tokens (none on the client's link when the first stage embeds).

    :param last: the final chunk: the verifier may commit after it
    :param limit: the verifier commits no token at a position `>= limit`
    """

    lane: int
    epoch: int
    seq: int
    start: int
    tokens: tuple[int, ...]
    last: bool
    limit: int
    n_rows: int = 0
    rows: bytes | memoryview = b""


@dataclass(frozen=True, slots=True)
class NodesFrame:
    """Candidates, parents first, with one activation row each (or none at all when the first stage embeds).

    A frame with no nodes left is still sent: it answers `seq` and carries the counters.

    :param seq: number of the last client frame that this one answers
    :param computed: row computations that the stages so far spent since their last frame of this lane
    :param dropped: rows that they dropped as dead
    """

    lane: int
    epoch: int
    seq: int
    nodes: tuple[NodeSpec, ...]
    computed: int = 0
    dropped: int = 0
    n_rows: int = 0
    rows: bytes | memoryview = b""


@dataclass(frozen=True, slots=True)
class CommitFrame:
    """Committed tokens at `position`, `position + 1`, ...; without tokens it only answers `seq` (verifier to
    client)."""

    lane: int
    epoch: int
    position: int
    tokens: tuple[int, ...]
    seq: int = 0
    computed: int = 0
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class RewindFrame:
    """Client to every stage, out of band: keep `position` tokens, ignore frames and commits of older epochs."""

    lane: int
    epoch: int
    position: int


@dataclass(frozen=True, slots=True)
class RoundFrame:
    """One round of a rule that compares distributions, see `sampling/rounds.py`: client to last stage what was drafted
    from which distributions, and back what the target says to that.

    :param seq: the round, from 1 in each epoch
    """

    lane: int
    epoch: int
    seq: int
    body: bytes | memoryview


@dataclass(frozen=True, slots=True)
class ControlFrame:
    """A rare message (open, link, close, error, statistics): a flat mapping, validated by whoever handles it."""

    message: dict[str, Any]


Frame = PrefixFrame | NodesFrame | CommitFrame | RewindFrame | RoundFrame | ControlFrame


class Encoded(bytes):
    """A frame as bytes, which remembers for the ledger what it is made of."""

    n_tokens = n_rows = row_bytes = 0


def encode(frame: Frame) -> Encoded:
    """:raises ValueError: a field is out of range"""
    out = bytearray()
    if isinstance(frame, PrefixFrame):
        out.append(PROTOCOL_VERSION << 4 | Kind.PREFIX)
        _put(out, frame.lane, frame.epoch, frame.seq, frame.start, frame.limit, len(frame.tokens), *frame.tokens)
        _put(out, frame.n_rows << 1 | frame.last)
        out += frame.rows
    elif isinstance(frame, NodesFrame):
        out.append(PROTOCOL_VERSION << 4 | Kind.NODES)
        _put_nodes(out, frame)
    elif isinstance(frame, CommitFrame):
        out.append(PROTOCOL_VERSION << 4 | Kind.COMMIT)
        _put(out, frame.lane, frame.epoch, frame.position, len(frame.tokens), *frame.tokens)
        if frame.seq or frame.computed or frame.dropped:
            _put(out, frame.seq, frame.computed, frame.dropped)
    elif isinstance(frame, RewindFrame):
        out.append(PROTOCOL_VERSION << 4 | Kind.REWIND)
        _put(out, frame.lane, frame.epoch, frame.position)
    elif isinstance(frame, RoundFrame):
        out.append(PROTOCOL_VERSION << 4 | Kind.ROUND)
        _put(out, frame.lane, frame.epoch, frame.seq)
        out += frame.body
    else:
        out.append(PROTOCOL_VERSION << 4 | Kind.CONTROL)
        out += msgpack.packb(frame.message, use_bin_type=True)
    checksum = (
        binascii.crc_hqx(out, 0).to_bytes(2, "big") if len(out) <= _SHORT else zlib.crc32(out).to_bytes(4, "big")
    )
    out += checksum
    if len(out) > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {len(out)} bytes exceeds the limit of {MAX_FRAME_BYTES}")
    encoded = Encoded(out)
    if isinstance(frame, (PrefixFrame, NodesFrame)):
        encoded.n_rows, encoded.row_bytes = frame.n_rows, len(frame.rows)
    if not isinstance(frame, (RewindFrame, RoundFrame, ControlFrame)):
        encoded.n_tokens = len(frame.nodes if isinstance(frame, NodesFrame) else frame.tokens)
    return encoded


def kind_of(data: bytes) -> int:
    """Of an encoded frame."""
    return data[0] & 0xF


def checksum_bytes(size: int) -> int:
    """Of an encoded frame of `size` bytes."""
    return 2 if size <= _SHORT + 2 else 4


def decode(data: bytes | memoryview) -> Frame:
    """:raises FrameError: not a frame of this protocol version, corrupted, truncated, or with a field out of range"""
    view = _checked_body(memoryview(data))
    version, kind = view[0] >> 4, view[0] & 0xF
    if version != PROTOCOL_VERSION:
        raise FrameError(f"peer speaks frame version {version}, this side speaks {PROTOCOL_VERSION}")
    read = Reader(view[1:])
    if kind == Kind.CONTROL:
        return ControlFrame(_unpack(read.rest()))
    lane, epoch = read.uint(MAX_LANES - 1), read.uint(MAX_POSITION)
    if kind == Kind.PREFIX:
        seq, start, limit = read.uint(MAX_COUNTER), read.uint(MAX_POSITION), read.uint(MAX_POSITION)
        tokens = tuple([read.uint(MAX_TOKEN) for _ in range(read.uint(MAX_NODES))])
        packed = read.uint(MAX_NODES * 2 + 1)
        if packed >> 1 > len(tokens):
            raise FrameError(f"{packed >> 1} rows for {len(tokens)} tokens")
        return PrefixFrame(lane, epoch, seq, start, tokens, bool(packed & 1), limit, packed >> 1, read.rest())
    if kind == Kind.NODES:
        return _read_nodes(read, lane, epoch)
    if kind == Kind.COMMIT:
        position = read.uint(MAX_POSITION)
        tokens = tuple([read.uint(MAX_TOKEN) for _ in range(read.uint(MAX_NODES))])
        rest = read.rest()
        counters = (0, 0, 0)
        if len(rest):
            tail = Reader(rest)
            counters = (tail.uint(MAX_COUNTER), tail.uint(MAX_COUNTER), tail.uint(MAX_COUNTER))
            tail.end()
        return CommitFrame(lane, epoch, position, tokens, *counters)
    if kind == Kind.REWIND:
        position = read.uint(MAX_POSITION)
        read.end()
        return RewindFrame(lane, epoch, position)
    if kind == Kind.ROUND:
        return RoundFrame(lane, epoch, read.uint(MAX_COUNTER), read.rest())
    raise FrameError(f"unknown frame kind {kind}")


def _put(out: bytearray, *values: int) -> None:
    for value in values:
        put_uint(out, value)


CONSECUTIVE, COUNTED, WITH_ROWS = 1, 2, 4  # flags of a nodes frame


def _put_nodes(out: bytearray, frame: NodesFrame) -> None:
    """:raises ValueError: rows for some of the nodes only"""
    nodes = frame.nodes
    if frame.n_rows not in (0, len(nodes)):
        raise ValueError(f"{frame.n_rows} rows for {len(nodes)} nodes")
    consecutive = is_consecutive(nodes)
    counted = bool(frame.computed or frame.dropped)
    flags = CONSECUTIVE * consecutive | COUNTED * counted | WITH_ROWS * bool(frame.n_rows)
    _put(out, frame.lane, frame.epoch, frame.seq, len(nodes), flags)
    put_nodes(out, nodes, consecutive)
    if counted:
        _put(out, frame.computed, frame.dropped)
    out += frame.rows


def _read_nodes(read: Reader, lane: int, epoch: int) -> NodesFrame:
    seq, count, flags = read.uint(MAX_COUNTER), read.uint(MAX_NODES), read.uint(7)
    nodes = read_nodes(read, count, bool(flags & CONSECUTIVE))
    computed, dropped = (read.uint(MAX_COUNTER), read.uint(MAX_COUNTER)) if flags & COUNTED else (0, 0)
    n_rows = count if flags & WITH_ROWS else 0
    return NodesFrame(lane, epoch, seq, nodes, computed, dropped, n_rows, read.rest())


def _checked_body(data: memoryview) -> memoryview:
    if not 3 <= len(data) <= MAX_FRAME_BYTES:
        raise FrameError(f"a frame has 3 .. {MAX_FRAME_BYTES} bytes, found {len(data)}")
    size = checksum_bytes(len(data))
    body, found = data[:-size], int.from_bytes(data[-size:], "big")
    expected = binascii.crc_hqx(body, 0) if size == 2 else zlib.crc32(body)
    if found != expected:
        raise FrameError("checksum mismatch: the frame was corrupted")
    return body


def _unpack(data: memoryview) -> dict[str, Any]:
    """Msgpack without extension types or timestamps: plain values only, sizes bounded by the frame itself."""
    limits = dict.fromkeys(("max_str_len", "max_bin_len", "max_array_len", "max_map_len"), len(data))
    try:
        message = msgpack.unpackb(data, raw=False, strict_map_key=True, max_ext_len=0, **limits)
    except Exception as e:  # msgpack raises half a dozen unrelated types on bad input
        raise FrameError(f"malformed control message: {e}") from None
    if not isinstance(message, dict):
        raise FrameError("a control message is a mapping")
    return message
