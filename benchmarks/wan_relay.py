"""An unprivileged TCP relay that delays and rate-limits what crosses it: the access link of the server behind it."""

from __future__ import annotations

import asyncio
import select
import selectors
import socket
import sys
from dataclasses import dataclass

from benchmarks.wan_connection import Connection
from benchmarks.wan_link import Link, LinkShape

HOST = "127.0.0.1"
_FD_SETSIZE = 1024  # select() takes no higher descriptor


@dataclass(frozen=True, slots=True)
class RelayCounts:
    """What a relay has carried, in bytes read from the sender.

    :param held: bytes that it holds now
    :param peak_held: the most that one direction of one connection has held
    """

    to_server: int = 0
    from_server: int = 0
    connections: int = 0
    open_connections: int = 0
    held: int = 0
    peak_held: int = 0


@dataclass(slots=True)
class ConnectionCounts:
    """What one connection has carried, in bytes read from the sender; kept when it has ended.

    :param caller_port: where the other peer called from
    """

    caller_port: int
    to_server: int = 0
    from_server: int = 0


class Relay:
    """An access link: listens on a port, forwards connections to the server's own port. Lives in one event loop."""

    def __init__(self, target_port: int, to_server: LinkShape, from_server: LinkShape, seed: int = 0) -> None:
        self.host, self.target_port = HOST, target_port
        self.port = 0
        self.frozen = False
        self._links = (Link(to_server, 2 * seed), Link(from_server, 2 * seed + 1))
        self._connections: set[Connection] = set()
        self._of_connections: list[ConnectionCounts] = []
        self._listener: asyncio.Server | None = None
        self._reserved: socket.socket | None = None
        self._carried = [0, 0]
        self._accepted = 0
        self._peak_held = 0

    async def start(self, port: int = 0) -> int:
        """Listen on `port` (0: any free one); returns the port."""
        self.port = port
        await self._listen(_bound_socket(port))
        return self.port

    async def close(self) -> None:
        await self.cut()
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None

    async def cut(self, silent: bool = False) -> None:
        """Break the link.

        :param silent: keep the sockets open and deliver nothing, like a cable that was pulled; what was sent meanwhile
            arrives after `restore`. Otherwise all connections are reset and new ones are refused; the port stays
            reserved.
        """
        if silent:
            self.frozen = True
            return
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            self._reserved = _bound_socket(self.port)
        for connection in list(self._connections):
            connection.abort()
        await asyncio.sleep(0)

    async def restore(self) -> None:
        """Undo either kind of cut."""
        if self._reserved is not None:
            reserved, self._reserved = self._reserved, None
            await self._listen(reserved)
        if self.frozen:
            self.frozen = False
            for connection in list(self._connections):
                connection.thaw()

    def set_shape(self, to_server: LinkShape | None = None, from_server: LinkShape | None = None) -> None:
        for direction, shape in enumerate((to_server, from_server)):
            if shape is not None:
                self._links[direction].reshape(shape)
                for connection in self._connections:
                    connection.pipes[direction].link.reshape(shape)

    def counts(self) -> RelayCounts:
        held = sum(pipe.held for connection in self._connections for pipe in connection.pipes)
        to_server, from_server = self._carried
        return RelayCounts(to_server, from_server, self._accepted, len(self._connections), held, self._peak_held)

    def connection_counts(self) -> list[ConnectionCounts]:
        return self._of_connections

    async def _listen(self, bound: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(self._accept, sock=bound, backlog=256)
        self.port = self._listener.sockets[0].getsockname()[1]

    def _accept(self) -> asyncio.Protocol:
        self._accepted += 1
        links = [link if link.shape.shared else Link(link.shape, link.next_seed()) for link in self._links]
        connection = Connection(self, links)
        self._connections.add(connection)
        return connection.client

    def opened(self, caller_port: int) -> ConnectionCounts:
        self._of_connections.append(ConnectionCounts(caller_port))
        return self._of_connections[-1]

    def carried(self, counts: ConnectionCounts, direction: int, size: int, held: int) -> None:
        self._carried[direction] += size
        if direction == 0:
            counts.to_server += size
        else:
            counts.from_server += size
        self._peak_held = max(self._peak_held, held)

    def forget(self, connection: Connection) -> None:
        self._connections.discard(connection)


if sys.platform == "linux":

    class _PreciseSelector(selectors.EpollSelector):
        """epoll rounds its timeout up to whole milliseconds: wait for its descriptor in select() instead."""

        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            if timeout is not None and timeout > 0 and self.fileno() < _FD_SETSIZE:
                select.select([self.fileno()], [], [], timeout)
                timeout = 0
            return super().select(timeout)


def new_relay_loop() -> asyncio.AbstractEventLoop:
    """An event loop whose timers are good to a fraction of a millisecond."""
    return asyncio.SelectorEventLoop(_PreciseSelector() if sys.platform == "linux" else None)


def _bound_socket(port: int) -> socket.socket:
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((HOST, port))
    return bound
