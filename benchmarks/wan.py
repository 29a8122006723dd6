"""An emulated WAN: one relay per server, all in one process of their own (or a thread, or a command).

A server is started with `--host_maddrs /ip4/127.0.0.1/tcp/A --announce_maddrs /ip4/127.0.0.1/tcp/B`, where B is its
relay's port: every libp2p connection that another peer opens to it then crosses the relay. A connection has the delay
and the rate of the relay of the peer that was called, in both directions; the caller's own relay is not involved.

    python -m benchmarks.wan --listen 41000 --target 31350 --delay-ms 25 --jitter-ms 0 --mbps 100
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.wan_link import LinkShape
from benchmarks.wan_relay import ConnectionCounts, Relay, RelayCounts, new_relay_loop

__all__ = ["ConnectionCounts", "LinkShape", "Relay", "RelayCounts", "RelaySpec", "WanRelays"]

REPLY_TIMEOUT_S = 30.0
PARENT_POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class RelaySpec:
    """One relay: the server's own port, and the shape of its link in each direction (`from_server` None: the same)."""

    target_port: int
    to_server: LinkShape
    from_server: LinkShape | None = None
    listen_port: int = 0


class WanRelays:
    """Starts the relays and controls them while they run; a context manager. Safe to use from several threads.

    :param in_process: run them in a thread of this process, where other threads can hold them up; by default they have
        a process of their own, which ends with this one
    :param seed: of the jitter; relay i uses seed + i
    """

    def __init__(self, specs: Sequence[RelaySpec], *, seed: int = 0, in_process: bool = False) -> None:
        self.specs = tuple(specs)
        self.seed = seed
        self.ports: tuple[int, ...] = ()
        self._channel: _Thread | _Process | None = None
        self._in_process = in_process

    def __enter__(self) -> WanRelays:
        self._channel = _Thread() if self._in_process else _Process()
        try:
            specs = [asdict(spec) for spec in self.specs]
            self.ports = tuple(self._ask({"op": "start", "specs": specs, "seed": self.seed}))
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    @property
    def pid(self) -> int:
        """Process that the relays run in."""
        return self._channel.process.pid if isinstance(self._channel, _Process) else os.getpid()

    def cut(self, index: int, silent: bool = False) -> None:
        """See `Relay.cut`."""
        self._ask({"op": "cut", "index": index, "silent": silent})

    def restore(self, index: int) -> None:
        """See `Relay.restore`."""
        self._ask({"op": "restore", "index": index})

    def set_shape(self, index: int, to_server: LinkShape | None = None, from_server: LinkShape | None = None) -> None:
        """Change one or both directions from now on; bytes that are on their way keep their arrival time."""
        shapes = [None if shape is None else asdict(shape) for shape in (to_server, from_server)]
        self._ask({"op": "shape", "index": index, "shapes": shapes})

    def counts(self, index: int) -> RelayCounts:
        return RelayCounts(**self._ask({"op": "counts", "index": index}))

    def connection_counts(self, index: int) -> list[ConnectionCounts]:
        """Of all connections through one relay, in the order in which they were opened."""
        return [ConnectionCounts(**counts) for counts in self._ask({"op": "connections", "index": index})]

    def _ask(self, request: dict[str, Any]) -> Any:
        if self._channel is None:
            raise RuntimeError("the relays are not running: use `with WanRelays(...) as relays`")
        if "index" in request and not 0 <= request["index"] < len(self.specs):
            raise IndexError(f"relay {request['index']} of {len(self.specs)}")
        return self._channel.ask(request)


class _Relays:
    """The relays of one event loop, behind a request/reply interface that works inside a process and across a pipe."""

    def __init__(self) -> None:
        self._relays: list[Relay] = []

    async def answer(self, request: dict[str, Any]) -> Any:
        if request["op"] == "start":
            return [await self._start(i + request["seed"], spec) for i, spec in enumerate(request["specs"])]
        if request["op"] == "stop":
            await asyncio.gather(*(relay.close() for relay in self._relays))
            return None
        relay = self._relays[request["index"]]
        if request["op"] == "counts":
            return asdict(relay.counts())
        if request["op"] == "connections":
            return [asdict(counts) for counts in relay.connection_counts()]
        if request["op"] == "cut":
            await relay.cut(silent=request["silent"])
        elif request["op"] == "restore":
            await relay.restore()
        elif request["op"] == "shape":
            relay.set_shape(*(shape and LinkShape(**shape) for shape in request["shapes"]))
        else:
            raise ValueError(f"unknown request {request['op']!r}")
        return None

    async def _start(self, seed: int, spec: dict[str, Any]) -> int:
        to_server = LinkShape(**spec["to_server"])
        from_server = LinkShape(**spec["from_server"]) if spec["from_server"] else to_server
        relay = Relay(spec["target_port"], to_server, from_server, seed)
        port = await relay.start(spec["listen_port"])
        self._relays.append(relay)
        return port


class _Thread:
    """The relays in a thread of this process."""

    def __init__(self) -> None:
        self._relays = _Relays()
        self._loop = new_relay_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="wan-relays", daemon=True)
        self._thread.start()

    def ask(self, request: dict[str, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(self._relays.answer(request), self._loop).result(REPLY_TIMEOUT_S)

    def close(self) -> None:
        try:
            self.ask({"op": "stop"})
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(REPLY_TIMEOUT_S)
            self._loop.close()


class _Process:
    """The relays in a process of their own: a JSON line per request to its input, one per reply from its output."""

    def __init__(self) -> None:
        root = str(Path(__file__).resolve().parent.parent)
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.wan", "--control"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
            text=True,
        )
        self._lock = threading.Lock()

    def ask(self, request: dict[str, Any]) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        with self._lock:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            ready, _, _ = select.select([self.process.stdout], [], [], REPLY_TIMEOUT_S)
            line = self.process.stdout.readline() if ready else ""
        if not line:
            raise RuntimeError(f"the relay process {self.process.pid} did not answer {request['op']!r}")
        reply = json.loads(line)
        if "error" in reply:
            raise RuntimeError(f"the relay process could not {request['op']}: {reply['error']}")
        return reply["result"]

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()  # it ends when its input does
        try:
            self.process.wait(REPLY_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


async def _serve_control(parent: int) -> None:
    loop, relays = asyncio.get_running_loop(), _Relays()
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    # A fork of the parent may keep the other end of the pipe open after its death.
    orphaned = loop.create_task(_wait_for_other_parent(parent))
    while True:
        reading = loop.create_task(lines.readline())
        await asyncio.wait({reading, orphaned}, return_when=asyncio.FIRST_COMPLETED)
        if orphaned.done() or not (line := reading.result()):
            break
        try:
            reply = {"result": await relays.answer(json.loads(line))}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), flush=True)
    for task in (reading, orphaned):
        task.cancel()
    await asyncio.gather(reading, orphaned, return_exceptions=True)
    await relays.answer({"op": "stop"})


async def _wait_for_other_parent(parent: int) -> None:
    while os.getppid() == parent:
        await asyncio.sleep(PARENT_POLL_S)


async def _serve_one(arguments: argparse.Namespace) -> None:
    shape = LinkShape(
        delay_s=arguments.delay_ms / 1000,
        jitter_s=arguments.jitter_ms / 1000,
        bits_per_s=arguments.mbps * 1e6 if arguments.mbps else None,
        idle_s=arguments.idle_s,
    )
    relay = Relay(arguments.target, shape, shape, arguments.seed)
    port = await relay.start(arguments.listen)
    print(f"Relaying port {port} to port {arguments.target}: {shape}", flush=True)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await stop.wait()
    print(relay.counts(), flush=True)
    await relay.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Delay and rate-limit the TCP connections to a local port")
    parser.add_argument("--listen", type=int, default=0, help="port to listen on (0: any free one)")
    parser.add_argument("--target", type=int, help="port to forward to")
    parser.add_argument("--delay-ms", type=float, default=25.0, help="one-way delay")
    parser.add_argument("--jitter-ms", type=float, default=0.0, help="extra delay, uniform between 0 and this")
    parser.add_argument("--mbps", type=float, default=100.0, help="rate in each direction, Mbit/s (0: unlimited)")
    parser.add_argument("--idle-s", type=float, help="model TCP slow start after so many seconds of silence")
    parser.add_argument("--seed", type=int, default=0, help="of the jitter")
    parser.add_argument("--control", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.control and arguments.target is None:
        parser.error("--target is required")
    loop = new_relay_loop()
    loop.run_until_complete(_serve_control(os.getppid()) if arguments.control else _serve_one(arguments))


if __name__ == "__main__":
    main()
