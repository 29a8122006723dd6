"""One TCP connection through a relay: two sockets, and a pipe per direction that holds bytes until they arrive."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from benchmarks.wan_link import Link, SlowStart

if TYPE_CHECKING:
    from benchmarks.wan_relay import ConnectionCounts, Relay

logger = logging.getLogger(__name__)

_EOF = memoryview(b"")
_SINK_BUFFER_BYTES = 64 << 10


class Connection:
    """A client's socket, the socket to the server, and a pipe in each direction."""

    def __init__(self, relay: Relay, links: list[Link]) -> None:
        self.relay = relay
        self.pipes = [_Pipe(self, direction, link) for direction, link in enumerate(links)]
        self.client = _End(self, reads=self.pipes[0], writes=self.pipes[1])
        self.server = _End(self, reads=self.pipes[1], writes=self.pipes[0])
        self.counts: ConnectionCounts | None = None
        self._dialling: asyncio.Task[None] | None = None
        self._aborted = False

    def opened(self, end: _End) -> None:
        if self._aborted:
            end.abort()
        elif end is self.client:
            self.counts = self.relay.opened(end.peer_port)
            end.pause_reading()
            self._dialling = asyncio.get_running_loop().create_task(self._dial())

    async def _dial(self) -> None:
        loop = asyncio.get_running_loop()
        # The kernel has already answered the client's SYN; on a real link that answer takes a round trip.
        await asyncio.sleep(sum(pipe.link.shape.delay_s for pipe in self.pipes))
        try:
            await loop.create_connection(lambda: self.server, self.relay.host, self.relay.target_port)
        except OSError as error:
            logger.debug("Port %d cannot be reached: %s", self.relay.target_port, error)
            self.abort()
            return
        self.client.resume_reading()

    def lost(self) -> None:
        if self.client.closed and (self.server.closed or self.server.transport is None):
            self.abort()

    def finish_if_done(self) -> None:
        if all(pipe.finished for pipe in self.pipes):
            self.client.close()
            self.server.close()

    def thaw(self) -> None:
        for pipe in self.pipes:
            pipe.deliver()

    def abort(self) -> None:
        self._aborted = True
        if self._dialling is not None and self._dialling is not asyncio.current_task():
            self._dialling.cancel()
        for pipe in self.pipes:
            pipe.discard()
        for end in (self.client, self.server):
            end.abort()
        self.relay.forget(self)


class _End(asyncio.Protocol):
    """One socket of a connection: what it reads goes into `reads`, what arrives through `writes` is written to it."""

    def __init__(self, connection: Connection, reads: _Pipe, writes: _Pipe) -> None:
        self._connection = connection
        self._reads, self._writes = reads, writes
        reads.source, writes.sink = self, self
        self.transport: asyncio.Transport | None = None
        self.closed = False

    @property
    def peer_port(self) -> int:
        assert self.transport is not None
        peer = self.transport.get_extra_info("peername")
        return peer[1] if peer else 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=_SINK_BUFFER_BYTES)
        self._connection.opened(self)

    def data_received(self, data: bytes) -> None:
        self._reads.feed(data)

    def eof_received(self) -> bool:
        self._reads.feed_eof()
        return True  # the other direction stays open

    def pause_writing(self) -> None:
        self._writes.blocked = True

    def resume_writing(self) -> None:
        self._writes.blocked = False
        self._writes.deliver()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._writes.discard()
        self._reads.feed_eof(reset=exc is not None)
        self._connection.lost()

    def pause_reading(self) -> None:
        if self.transport is not None and not self.closed:
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if self.transport is not None and not self.closed:
            self.transport.resume_reading()

    def write(self, data: memoryview) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(data)

    def write_eof(self) -> None:
        if self.transport is not None and not self.transport.is_closing():
            try:
                self.transport.write_eof()
            except OSError:  # the peer has reset the connection, and the event loop does not know yet
                self.transport.abort()

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        if self.transport is not None and not self.closed:
            opened = self.transport.get_extra_info("socket")
            if opened.fileno() < 0:
                return
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # RST instead of FIN
            self.transport.abort()


class _Pipe:
    """One direction of a connection: slow start, the link's queue, the flight time, then the receiving socket."""

    source: _End
    sink: _End

    def __init__(self, connection: Connection, direction: int, link: Link) -> None:
        self._connection, self._direction = connection, direction
        self.link = link
        self.held = 0  # bytes read from the source and not yet written to the sink
        self.blocked = False
        self.finished = False
        self._loop = asyncio.get_running_loop()
        self._slow_start = SlowStart(link.shape)
        self._gate: deque[tuple[float, memoryview]] = deque()
        self._flight: deque[tuple[float, memoryview]] = deque()
        self._gate_timer: asyncio.TimerHandle | None = None
        self._flight_timer: asyncio.TimerHandle | None = None
        self._paused = False
        self._ended = False
        self._reset = False

    def feed(self, data: bytes) -> None:
        if self.finished or self._ended:
            return
        self.held += len(data)
        counts = self._connection.counts
        assert counts is not None, "nothing is read before the caller's socket is open"
        self._connection.relay.carried(counts, self._direction, len(data), self.held)
        rest = memoryview(data)
        for departure, size in self._slow_start.rounds(self._loop.time(), len(data), self.link.shape):
            self._gate.append((departure, rest[:size]))
            rest = rest[size:]
        self._pass_gate()
        if self.held > self.link.shape.buffer_limit and not self._paused:
            self._paused = True
            self.source.pause_reading()

    def feed_eof(self, reset: bool = False) -> None:
        if self._ended and not reset:
            return
        self._ended = True
        self._reset = self._reset or reset
        if not self.sink.closed:
            self._gate.append((self._gate[-1][0] if self._gate else self._loop.time(), _EOF))
            self._pass_gate()

    def deliver(self) -> None:
        """Write what has arrived, and wake up for the next piece; with jitter, no piece overtakes another."""
        now = self._loop.time()
        while self._flight and self._flight[0][0] <= now and not self.blocked and not self._connection.relay.frozen:
            _, piece = self._flight.popleft()
            if piece is _EOF:
                self._finish()
                continue
            self.held -= len(piece)
            self.sink.write(piece)
        self._flight_timer = self._wake(self._flight_timer, self._flight, now, self.deliver)
        if self._paused and 2 * self.held <= self.link.shape.buffer_limit:
            self._paused = False
            self.source.resume_reading()

    def discard(self) -> None:
        """The receiving socket is gone."""
        self.finished = True
        self.held = 0
        self._gate.clear()
        self._flight.clear()
        for timer in (self._gate_timer, self._flight_timer):
            if timer is not None:
                timer.cancel()

    def _pass_gate(self) -> None:
        now = self._loop.time()
        while self._gate and self._gate[0][0] <= now:
            departure, data = self._gate.popleft()
            step = self.link.shape.piece_bytes or len(data) or 1
            pieces = [_EOF] if data is _EOF else [data[at : at + step] for at in range(0, len(data), step)]
            for piece in pieces:
                self._flight.append((self.link.admit(departure, len(piece)), piece))
        self._gate_timer = self._wake(self._gate_timer, self._gate, now, self._pass_gate)
        self.deliver()

    def _wake(
        self,
        timer: asyncio.TimerHandle | None,
        queue: deque[tuple[float, memoryview]],
        now: float,
        action: Callable[[], None],
    ) -> asyncio.TimerHandle | None:
        # What is due but still here waits for the sink or for `restore`, and both call `deliver`.
        due = queue[0][0] if queue else now
        if timer is not None and (timer.when() != due or due <= now):
            timer.cancel()
            timer = None
        if timer is None and due > now:
            timer = self._loop.call_at(due, action)
        return timer

    def _finish(self) -> None:
        self.finished = True
        if self._reset:
            self.sink.abort()
        else:
            self.sink.write_eof()
        self._connection.finish_if_done()
