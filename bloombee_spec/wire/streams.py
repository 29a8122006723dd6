"""Frames over a pair of asyncio streams: lengths are checked before anything is read, every wait has an end, queues
are bounded."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque

from bloombee_spec.wire.frames import MAX_FRAME_BYTES, Encoded, Frame, FrameError, decode, encode
from bloombee_spec.wire.ledger import LENGTH_BYTES, STAMP_BYTES, Traffic

STAMP_RANGE = 1 << 8 * STAMP_BYTES
NOOP = bytes(LENGTH_BYTES)  # a frame of no length, which readers skip
# A TCP connection that was silent for its retransmission timeout (200 ms and more) starts again with a small window,
# and what exceeds that takes round trips more; measured by `benchmarks.keep_warm`.
FIRST_WINDOW, WARM_EVERY, WARM_FOR = 14_000, 0.1, 3.0  # bytes, seconds, seconds
MAX_NOOPS = 256  # in a row: many times what WARM_FOR allows


class StreamClosed(ConnectionError):
    """The peer ended the stream, or it broke."""


async def read_frame_bytes(reader: asyncio.StreamReader, timeout: float | None) -> bytes:
    """:raises StreamClosed: at the end of the stream
    :raises FrameError: the announced length is out of bounds
    :raises asyncio.TimeoutError: nothing complete arrived within `timeout` seconds
    """
    try:
        return await asyncio.wait_for(_read(reader), timeout)
    except asyncio.TimeoutError:  # an OSError too since Python 3.11
        raise
    except (asyncio.IncompleteReadError, ConnectionError, OSError) as e:
        raise StreamClosed(f"stream ended: {e!r}") from None


async def read_stamped_bytes(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """`(stamp, frame)` from a stream whose outbox is `stamped`; raises as `read_frame_bytes`, waits without end."""
    data = await read_frame_bytes(reader, None)
    if len(data) < STAMP_BYTES + 3:
        raise FrameError(f"a stamped frame of {len(data)} bytes")
    return int.from_bytes(data[:STAMP_BYTES], "big"), data[STAMP_BYTES:]


def stamp_now() -> int:
    """Microseconds of this machine's monotonic clock, modulo `STAMP_RANGE` (71 minutes)."""
    return int(time.monotonic() * 1e6) % STAMP_RANGE


async def read_frame(reader: asyncio.StreamReader, timeout: float | None, traffic: Traffic) -> Frame:
    """:param traffic: counts the frame; raises as `read_frame_bytes`"""
    data = await read_frame_bytes(reader, timeout)
    frame = decode(data)
    traffic.received(frame, len(data))
    return frame


async def _read(reader: asyncio.StreamReader) -> bytes:
    noops = 0
    while (head := await reader.readexactly(LENGTH_BYTES)) == NOOP:
        noops += 1
        if noops > MAX_NOOPS:
            raise FrameError(f"{noops} no-ops in a row")
    length = int.from_bytes(head, "big")
    if not 3 <= length <= MAX_FRAME_BYTES:
        raise FrameError(f"peer announced a frame of {length} bytes, at most {MAX_FRAME_BYTES} are allowed")
    return await reader.readexactly(length)


def framed(frame: Frame, traffic: Traffic) -> bytes:
    """A frame as it travels on a stream; `traffic` counts it."""
    data = encode(frame)
    traffic.sent(data)
    return framed_bytes(data)


def framed_bytes(data: bytes) -> bytes:
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


class Outbox:
    """Writes frames to one peer in order, from its own task.

    `put` never waits; once more than `max_bytes` are queued the peer counts as stuck and the outbox fails.
    Only to be used on the event loop's thread.

    :param stamped: every frame carries the time at which it was written, from which the receiver learns the link's
        bandwidth
    :param warm: while frames are large, and come again and again, no-ops in between keep TCP's window open
    :param traffic: what counts the frames, not the no-ops; by default one that starts at nothing
    """

    def __init__(
        self,
        writer: asyncio.StreamWriter,
        *,
        max_bytes: int,
        timeout: float,
        stamped: bool = False,
        warm: bool = False,
        traffic: Traffic | None = None,
    ):
        self._warm, self._warm_until, self._burst = warm, 0.0, 0
        self._writer, self._max_bytes, self._timeout, self._stamped = writer, max_bytes, timeout, stamped
        self._queue: deque[bytes] = deque()
        self._queued = 0
        self._wake = asyncio.Event()
        self._closing = False
        self.frames_sent = self.bytes_sent = 0
        self.traffic = Traffic() if traffic is None else traffic
        self.failure: BaseException | None = None
        self.task = asyncio.ensure_future(self._run())

    def put(self, frame: Frame) -> int:
        """:returns: bytes of the encoded frame
        :raises StreamClosed: the stream failed before, or the peer reads too slowly
        """
        return self.put_bytes(encode(frame))

    def put_bytes(self, data: bytes) -> int:
        if self.failure is not None or self._closing:
            raise StreamClosed(
                f"cannot send: {self.failure!r}" if self.failure else "cannot send: the stream is closed"
            )
        if self._queued + len(data) > self._max_bytes and self._queued:
            self.failure = StreamClosed(f"peer reads too slowly: {self._queued} bytes are queued")
            self.task.cancel()
            raise self.failure
        self._queue.append(data)
        self._queued += len(data)
        self.frames_sent += 1
        self.bytes_sent += len(data)
        if isinstance(data, Encoded):
            self.traffic.sent(data, self._stamped)
        self._wake.set()
        return len(data)

    async def room(self, queued: int, timeout: float) -> None:
        """Until at most so many bytes wait.

        :raises StreamClosed: the stream failed, or nothing left for `timeout` seconds
        """
        moved, before = time.monotonic(), self._queued
        while self._queued > queued:
            if self.failure is not None or time.monotonic() - moved > timeout:
                raise StreamClosed(f"cannot send: {self.failure or 'the peer takes nothing'}")
            await asyncio.sleep(0.005)
            if self._queued < before:
                moved, before = time.monotonic(), self._queued

    async def aclose(self, timeout: float = 2.0) -> None:
        """Send what is queued, then close; never raises and never waits longer than `timeout` seconds."""
        self._closing = True
        self._wake.set()
        with contextlib.suppress(asyncio.TimeoutError, asyncio.CancelledError, Exception):
            await asyncio.wait_for(asyncio.shield(self.task), timeout)
        self.task.cancel()
        with contextlib.suppress(Exception):
            self._writer.close()

    async def _run(self) -> None:
        try:
            while True:
                while self._queue:
                    data = self._queue.popleft()
                    self._queued -= len(data)
                    if self._stamped:
                        data = stamp_now().to_bytes(STAMP_BYTES, "big") + data
                    self._writer.write(framed_bytes(data))
                    self._burst += len(data)
                    if not self._queue:
                        await asyncio.wait_for(self._writer.drain(), self._timeout)
                if self._closing:
                    return
                self._wake.clear()
                await self._idle()
        except asyncio.CancelledError:
            raise
        except Exception as e:
            self.failure = StreamClosed(f"stream broke while sending: {e!r}")

    async def _idle(self) -> None:
        """Until there is something to send."""
        if self._burst > FIRST_WINDOW:
            self._warm_until = time.monotonic() + WARM_FOR
        self._burst = 0
        while self._warm and time.monotonic() < self._warm_until:
            try:
                await asyncio.wait_for(self._wake.wait(), WARM_EVERY)
                return
            except asyncio.TimeoutError:
                self._writer.write(NOOP)
                await asyncio.wait_for(self._writer.drain(), self._timeout)
        await self._wake.wait()
