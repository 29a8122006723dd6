"""KV memory through the host's own cache accounting.

The host's `MemoryCache.allocate_cache` must be entered in another process than the one that computes, as its
connection handlers
do. A small forked child enters and leaves it on behalf of the servicer, which lives in the computing process. When
that process
dies, the child notices and exits; when the child dies, the host's health check restarts the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing as mp
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any

from hivemind.utils.logging import get_logger

logger = get_logger(__name__)

PARENT_CHECK_S = 1.0

Handles = tuple[int, ...]


class AllocationRefused(RuntimeError):
    """The server's attention cache has no room for this session."""


class CacheAllocator:
    """:param memory_cache: the host's cache, as its backends hold it

    Fork it (`start`) before the process grows event loops of its own.
    """

    def __init__(self, memory_cache: Any):
        context = mp.get_context("fork")
        self._here, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(memory_cache, there, self._here), daemon=True)
        self._there = there
        self._pending: dict[int, Callable[[tuple[bool, Any]], None]] = {}
        self._lock = threading.Lock()
        self._next = 0
        self._reader: threading.Thread | None = None

    def start(self) -> None:
        self._process.start()
        self._there.close()
        self._reader = threading.Thread(target=self._read, name="spec-allocator", daemon=True)
        self._reader.start()

    def is_alive(self) -> bool:
        return self._process.is_alive()

    async def allocate(self, descriptors: Sequence[Any], timeout: float) -> tuple[int, Handles]:
        """:returns: a ticket for `free`, and the cache handles
        :raises AllocationRefused: no room within `timeout` seconds, or the allocator is gone
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[tuple[bool, Any]] = loop.create_future()

        def done(result: tuple[bool, Any]) -> None:
            loop.call_soon_threadsafe(_settle, future, result)

        with self._lock:
            ticket, self._next = self._next, self._next + 1
            self._pending[ticket] = done
        try:
            self._send(("allocate", ticket, tuple(descriptors), timeout))
            ok, result = await asyncio.wait_for(future, timeout + 10)
        except BaseException as e:
            self._pending.pop(ticket, None)
            self.free(ticket)
            if isinstance(e, asyncio.TimeoutError):
                raise AllocationRefused(f"no answer from the cache allocator within {timeout + 10:.0f} s") from None
            raise
        if not ok:
            raise AllocationRefused(str(result))
        return ticket, result

    def free(self, ticket: int) -> None:
        with contextlib.suppress(AllocationRefused):  # nothing is left to free when the allocator is gone
            self._send(("free", ticket))

    def shutdown(self) -> None:
        # Other forked children hold copies of the pipe's end, so closing it here would not be seen as its end.
        with contextlib.suppress(AllocationRefused):
            self._send(("stop",))
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(5)

    def _send(self, message: tuple[Any, ...]) -> None:
        try:
            with self._lock:
                self._here.send(message)
        except (OSError, ValueError) as e:
            raise AllocationRefused(f"the cache allocator is gone: {e!r}") from None

    def _read(self) -> None:
        try:
            while True:
                ticket, ok, result = self._here.recv()
                done = self._pending.pop(ticket, None)
                if done is not None:
                    done((ok, result))
        except (EOFError, OSError):
            for done in list(self._pending.values()):
                done((False, "the cache allocator ended"))


def _settle(future: asyncio.Future[tuple[bool, Any]], result: tuple[bool, Any]) -> None:
    if not future.done():
        future.set_result(result)


def _serve(
    memory_cache: Any, pipe: multiprocessing.connection.Connection, parent_end: multiprocessing.connection.Connection
) -> None:
    parent_end.close()  # or the child would never see its parent go
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    asyncio.set_event_loop_policy(None)
    asyncio.run(_serve_async(memory_cache, pipe))


async def _serve_async(memory_cache: Any, pipe: multiprocessing.connection.Connection) -> None:
    loop = asyncio.get_running_loop()
    releases: dict[int, asyncio.Event] = {}
    holders: set[asyncio.Task[None]] = set()
    gone = asyncio.Event()

    async def hold(ticket: int, descriptors: Sequence[Any], timeout: float) -> None:
        release = releases[ticket]
        try:
            async with memory_cache.allocate_cache(*descriptors, timeout=timeout) as handles:
                pipe.send((ticket, True, tuple(handles)))
                await release.wait()
        except Exception as e:
            with contextlib.suppress(OSError):
                pipe.send((ticket, False, f"{type(e).__name__}: {e}"))
        finally:
            releases.pop(ticket, None)

    def on_message() -> None:
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            loop.remove_reader(pipe.fileno())
            gone.set()
            return
        if message[0] == "stop":
            gone.set()
        elif message[0] == "allocate":
            releases[message[1]] = asyncio.Event()
            task = asyncio.create_task(hold(*message[1:]))
            holders.add(task)
            task.add_done_callback(holders.discard)
        elif message[1] in releases:
            releases[message[1]].set()

    async def watch_parent() -> None:
        parent = os.getppid()
        while os.getppid() == parent:
            await asyncio.sleep(PARENT_CHECK_S)
        gone.set()

    loop.add_reader(pipe.fileno(), on_message)
    watch = asyncio.create_task(watch_parent())
    await gone.wait()
    watch.cancel()
    for release in releases.values():
        release.set()
    if holders:
        await asyncio.wait(holders, timeout=5)
