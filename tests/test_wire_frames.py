"""Frames: exact round trips, small sizes, and nothing but FrameError for whatever else arrives."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import time
import tracemalloc
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloombee_spec.tree import NodeSpec, committed_ref
from bloombee_spec.wire import streams
from bloombee_spec.wire.frames import (
    MAX_FRAME_BYTES,
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
from bloombee_spec.wire.messages import Hello, Open
from bloombee_spec.wire.steering import Rule, Statistics
from bloombee_spec.wire.streams import Outbox, StreamClosed, read_frame_bytes

tokens = st.lists(st.integers(0, 1 << 24), max_size=20).map(tuple)
small = st.integers(0, 1 << 20)
nodes = st.lists(
    st.builds(NodeSpec, *[st.integers(-(1 << 30), 1 << 30)] * 2, st.integers(0, 1 << 24)),
    max_size=20,
).map(tuple)
lanes = st.integers(0, 255)


@st.composite
def frames(draw: Any) -> Frame:
    kind = draw(st.integers(0, 4))
    lane, epoch, seq = draw(lanes), draw(small), draw(small)
    rows = draw(st.binary(max_size=400))
    if kind == 0:
        given_tokens = draw(tokens)
        n_rows = draw(st.integers(0, len(given_tokens)))
        return PrefixFrame(lane, epoch, seq, draw(small), given_tokens, draw(st.booleans()), draw(small), n_rows, rows)
    if kind == 1:
        specs = draw(nodes)
        n_rows = draw(st.sampled_from((0, len(specs))))
        return NodesFrame(lane, epoch, seq, specs, draw(small), draw(small), n_rows, rows)
    if kind == 2:
        return CommitFrame(lane, epoch, draw(small), draw(tokens), seq, draw(small), draw(small))
    if kind == 3:
        return RoundFrame(lane, epoch, seq, rows)
    return RewindFrame(lane, epoch, draw(small))


@given(frames())
@settings(max_examples=400, deadline=None)
def test_round_trip(frame: Frame) -> None:
    found = decode(encode(frame))
    if isinstance(found, (PrefixFrame, NodesFrame)):
        assert bytes(found.rows) == bytes(frame.rows)  # type: ignore[union-attr]
        object.__setattr__(found, "rows", b"")
        object.__setattr__(frame, "rows", b"")
    assert found == frame


@given(frames(), st.data())
@settings(max_examples=300, deadline=None)
def test_damaged_frames_are_refused(frame: Frame, data: Any) -> None:
    raw = bytearray(encode(frame))
    if data.draw(st.booleans()):
        bit = data.draw(st.integers(0, len(raw) * 8 - 1))
        raw[bit // 8] ^= 1 << bit % 8
    else:
        del raw[data.draw(st.integers(0, len(raw) - 1)) :]
    with pytest.raises(FrameError):
        decode(bytes(raw))


def test_noise_is_refused_and_allocates_nothing() -> None:
    """Random bytes behind a right checksum reach the field readers; longer where the environment says so."""
    import binascii

    rng = random.Random(0)
    until = time.monotonic() + float(os.environ.get("FRAME_FUZZ_SECONDS", "3"))
    accepted = refused = 0
    tracemalloc.start()
    while time.monotonic() < until:
        for _ in range(500):
            body = bytes((0x10 | rng.randrange(6),)) + rng.randbytes(rng.randrange(1, 80))
            try:
                decode(body + binascii.crc_hqx(body, 0).to_bytes(2, "big"))
                accepted += 1
            except FrameError:
                refused += 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert refused > accepted > 0
    assert peak < 2 << 20


def test_client_link_carries_few_bytes() -> None:
    """At most 8 bytes per candidate up and 16 per committed token down, counters and checksum included."""
    chain = tuple(NodeSpec(5000 + i, 4999 + i, 127_000 + i) for i in range(3))
    assert len(encode(NodesFrame(3, 9, 7000, chain))) <= 3 * 8
    tree = tuple(NodeSpec(5000 + i, 5000 + i - 1 - i % 3, 127_000) for i in range(16))
    assert len(encode(NodesFrame(3, 9, 7000, tree))) <= 16 * 6
    after_miss = (NodeSpec(5000, committed_ref(8000), 1), *[NodeSpec(5001 + i, 5000 + i, 9) for i in range(3)])
    assert len(encode(NodesFrame(3, 9, 7000, after_miss))) <= 4 * 8
    assert len(encode(CommitFrame(3, 9, 8000, (127_000,), 7000, 60, 20))) <= 16


def test_control_messages_are_checked_field_by_field() -> None:
    hello = Hello(b"s" * 16, 1, "data")
    assert Hello.from_wire(decode(encode(ControlFrame(hello.to_wire()))).message) == hello  # type: ignore[union-attr]
    good = hello.to_wire()
    for bad in (
        {**good, "kind": "Open"},
        {**good, "extra": 1},
        {**good, "stage": "1"},
        {**good, "stage": True},
        {**good, "session": b"short"},
        {**good, "role": "root"},
        {key: value for key, value in good.items() if key != "role"},
    ):
        with pytest.raises(FrameError):
            Hello.from_wire(bad)
    with pytest.raises(FrameError):
        Rule.from_wire({"kind": "Rule", "lane": 999, "epoch": 1, "stop_tokens": [], "sampling": {}, "row": 0})
    statistics = Statistics(1, 2, 3, 0.5, 1.0, 4, 5)
    assert Statistics.from_wire(statistics.to_wire()) == statistics
    with pytest.raises(FrameError, match="only the first stage embeds"):
        opened = dict(
            session=b"s" * 16, stage=1, stages=2, start=0, end=2, lanes=1, max_length=8, arena=4, previous="a",
            next=None, verifier="b", listeners=(), embed=False, verify=True, codec="raw", codec_in="raw",
        )  # fmt: skip
        Open.from_wire({**Open(**opened).to_wire(), "embed": True})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "payload", [msgpack.ExtType(5, b"x"), [[]] * 3, "text", {1: 2}, {"a": msgpack.Timestamp(1)}], ids=str
)
def test_control_messages_are_plain_mappings(payload: Any) -> None:
    import binascii

    body = b"\x10" + msgpack.packb(payload)
    with pytest.raises(FrameError):
        decode(body + binascii.crc_hqx(body, 0).to_bytes(2, "big"))


# --- streams ------------------------------------------------------------------------------------------------------


async def _pair() -> tuple[asyncio.StreamReader, asyncio.StreamWriter, asyncio.StreamWriter]:
    here, there = socket.socketpair()
    _, writer = await asyncio.open_connection(sock=here)
    reader, other = await asyncio.open_connection(sock=there)
    return reader, writer, other


def test_an_announced_length_beyond_the_limit_is_refused_unread() -> None:
    async def run() -> None:
        reader, writer, other = await _pair()
        writer.write((MAX_FRAME_BYTES + 1).to_bytes(3, "big"))
        with pytest.raises(FrameError, match="at most"):
            await read_frame_bytes(reader, 5)
        writer.write((100).to_bytes(3, "big") + b"half")
        with pytest.raises(asyncio.TimeoutError):
            await read_frame_bytes(reader, 0.05)
        writer.close()
        with pytest.raises(StreamClosed):
            await read_frame_bytes(reader, 5)
        other.close()

    asyncio.run(run())


def test_a_peer_that_reads_too_slowly_ends_the_stream() -> None:
    async def run() -> None:
        _, writer, other = await _pair()
        box = Outbox(writer, max_bytes=1 << 16, timeout=5)
        with pytest.raises(StreamClosed, match="too slowly"):
            for _ in range(100):
                box.put_bytes(b"x" * 8192)
        with pytest.raises(StreamClosed):
            box.put_bytes(b"x" * 10)
        await box.aclose(0.1)
        other.close()

    asyncio.run(run())


def test_frames_arrive_in_order_and_whole() -> None:
    async def run() -> None:
        reader, writer, other = await _pair()
        box = Outbox(writer, max_bytes=1 << 20, timeout=5)
        sent = [bytes([i]) * (3 + i * 37) for i in range(50)]
        for data in sent:
            box.put_bytes(data)
        assert [await read_frame_bytes(reader, 5) for _ in sent] == sent
        assert box.frames_sent == 50 and box.bytes_sent == sum(map(len, sent))
        await box.aclose()
        with pytest.raises(StreamClosed):
            await read_frame_bytes(reader, 5)
        other.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("size", "warm", "kept"), [(20_000, True, True), (2_000, True, False), (20_000, False, False)]
)
def test_a_link_of_large_frames_is_kept_warm_for_a_while(
    size: int, warm: bool, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "WARM_EVERY", 0.01)
    monkeypatch.setattr(streams, "WARM_FOR", 0.1)

    async def run() -> int:
        reader, writer, other = await _pair()
        box = Outbox(writer, max_bytes=1 << 20, timeout=5, warm=warm)
        box.put_bytes(b"x" * size)
        await reader.readexactly(size + streams.LENGTH_BYTES)
        await asyncio.sleep(0.3)
        box.put_bytes(b"end")
        await box.aclose()
        rest = await reader.read()
        other.close()
        assert rest.endswith(streams.framed_bytes(b"end"))
        noops = rest[: -len(streams.framed_bytes(b"end"))]
        assert not any(noops), "something else than no-ops"
        return len(noops) // streams.LENGTH_BYTES

    noops = asyncio.run(run())
    assert (1 <= noops <= 11) if kept else noops == 0, "without end, or none"


def test_readers_skip_what_keeps_a_link_warm() -> None:
    async def run() -> bytes:
        reader = asyncio.StreamReader()
        reader.feed_data(3 * streams.NOOP + streams.framed_bytes(b"frame") + streams.NOOP)
        reader.feed_eof()
        frame = await read_frame_bytes(reader, 5)
        with pytest.raises(StreamClosed):
            await read_frame_bytes(reader, 5)
        return frame

    assert asyncio.run(run()) == b"frame"


def test_nobody_is_kept_busy_with_no_ops() -> None:
    async def run() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data((streams.MAX_NOOPS + 1) * streams.NOOP)
        with pytest.raises(FrameError, match="no-ops"):
            await read_frame_bytes(reader, 5)

    asyncio.run(run())
