"""Many servers in one process, a thread each: the cheapest swarm for a test. None of them can be killed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from benchmarks.wan import LinkShape, RelaySpec, WanRelays
from bloombee_spec.hosts.base import host_package

logger = logging.getLogger(__name__)

READY_POLL_S = 0.02
JOIN_TIMEOUT_S = 30.0
REAP_TIMEOUT_S = 5.0


class InProcessSwarm:
    """A bootstrap peer and `Server` objects whose `run()` has a thread each; a context manager.

    :param servers: block range (first, one past the last) of each server
    :param server_factory: takes the keyword arguments of the host's `Server`, returns a server; None: the host's own
    :param options: further keyword arguments for every server, stronger than the defaults
    :param wan: see `LocalSwarm`; the relays have a process of their own
    """

    def __init__(
        self,
        model: Path | str,
        servers: Sequence[tuple[int, int]],
        *,
        dht_prefix: str = "spec-local-hf",
        server_factory: Callable[..., Any] | None = None,
        wan: LinkShape | None = None,
        attn_cache_tokens: int = 4096,
        startup_timeout_s: float = 120.0,
        seed: int = 0,
        **options: Any,
    ) -> None:
        self.model, self.dht_prefix = str(model), dht_prefix
        self.ranges = list(servers)
        self.initial_peers: list[str] = []
        self.servers: list[Any] = []
        self.relays: WanRelays | None = None
        self._factory, self._wan, self._seed = server_factory, wan, seed
        self._options = {"attn_cache_tokens": attn_cache_tokens, **options}
        self._startup_timeout_s = startup_timeout_s
        self._threads: list[threading.Thread | None] = []
        self._failures: dict[int, BaseException] = {}
        self._children: list[list[psutil.Process]] = []
        self._bootstrap: Any = None

    def __enter__(self) -> InProcessSwarm:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop_server(self, index: int) -> None:
        """Shut one server down in order: it announces that it is offline and closes its peer."""
        server, thread = self.servers[index], self._threads[index]
        if server is None or thread is None:
            return
        self._threads[index] = None
        server.stop.set()
        thread.join(JOIN_TIMEOUT_S)
        server.shutdown()
        _reap(self._children[index])
        if thread.is_alive():
            raise RuntimeError(f"server {index} did not leave run() within {JOIN_TIMEOUT_S:.0f} s")

    def stop(self) -> None:
        """Shut everything down and kill the children that the servers leave behind. May be called twice."""
        for index in range(len(self.servers)):
            try:
                self.stop_server(index)
            except Exception:
                logger.exception("Server %d did not stop", index)
        if self._bootstrap is not None:
            self._bootstrap.shutdown()
            self._bootstrap.join(JOIN_TIMEOUT_S)
            self._bootstrap = None
        if self.relays is not None:
            self.relays.stop()
            self.relays = None

    def _start(self) -> None:
        from hivemind.dht import DHT

        from benchmarks.swarm import free_ports

        self._bootstrap = DHT(start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"], use_relay=False, use_auto_relay=False)
        self.initial_peers = [str(address) for address in self._bootstrap.get_visible_maddrs()]
        ports = free_ports(len(self.ranges))
        announced: Sequence[int] = ports
        if self._wan is not None:
            self.relays = WanRelays([RelaySpec(port, self._wan) for port in ports], seed=self._seed)
            announced = self.relays.__enter__().ports
        deadline = time.monotonic() + self._startup_timeout_s
        for index, (port, announced_port) in enumerate(zip(ports, announced)):
            self._start_server(index, port, announced_port, deadline)

    def _start_server(self, index: int, port: int, announced_port: int, deadline: float) -> None:
        known = set(psutil.Process().children(recursive=True))
        server = self._new_server(self.ranges[index], port, announced_port)
        thread = threading.Thread(target=self._run, args=(index, server), name=f"server{index}", daemon=True)
        self.servers.append(server)
        self._threads.append(thread)
        self._children.append([])
        thread.start()
        try:
            while not (server.module_container is not None and server.module_container.ready.is_set()):
                if index in self._failures:
                    raise RuntimeError(f"server {index} failed to start") from self._failures[index]
                if time.monotonic() >= deadline:
                    raise RuntimeError(f"server {index} was not ready in {self._startup_timeout_s:.0f} s")
                time.sleep(READY_POLL_S)
        finally:
            self._children[index] = [
                child for child in psutil.Process().children(recursive=True) if child not in known
            ]

    def _new_server(self, blocks: tuple[int, int], port: int, announced_port: int) -> Any:
        if self._factory is None:
            self._factory = import_module(f"{host_package()}.server.server").Server
        arguments = {
            "initial_peers": self.initial_peers,
            "dht_prefix": self.dht_prefix,
            "converted_model_name_or_path": self.model,
            "block_indices": f"{blocks[0]}:{blocks[1]}",
            "host_maddrs": [f"/ip4/127.0.0.1/tcp/{port}"],
            "announce_maddrs": [f"/ip4/127.0.0.1/tcp/{announced_port}"],
            "throughput": 100.0,
            "num_handlers": 1,
            "torch_dtype": "float32",
            "device": "cpu",
            "update_period": 30.0,
            "skip_reachability_check": True,
            "reachable_via_relay": False,
            "use_relay": False,
            "use_auto_relay": False,
        }
        return self._factory(**{**arguments, **self._options})

    def _run(self, index: int, server: Any) -> None:
        try:
            server.run()
        except BaseException as error:
            self._failures[index] = error
            logger.exception("Server %d failed", index)


def _reap(children: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(children, timeout=REAP_TIMEOUT_S)
    for process in alive:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            pass
    psutil.wait_procs(alive, timeout=REAP_TIMEOUT_S)
