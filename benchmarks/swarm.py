"""A whole swarm on this machine: a bootstrap peer and servers, a process each, behind an emulated WAN if wanted."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import FrameType, TracebackType

from benchmarks.inprocess_swarm import InProcessSwarm
from benchmarks.processes import LoggedProcess, StartupError
from benchmarks.wan import LinkShape, RelaySpec, WanRelays
from bloombee_spec.hosts.base import host_package

__all__ = ["InProcessSwarm", "LocalSwarm", "ServerSpec", "StartupError", "SwarmServer", "free_port", "split_blocks"]

RUN_SERVER = (sys.executable, "-m", f"{host_package()}.cli.run_server")
RUN_DHT = (sys.executable, "-m", f"{host_package()}.cli.run_dht")
DEFAULT_ARGS = (
    *("--torch_dtype", "float32", "--device", "cpu", "--throughput", "100.0", "--num_handlers", "2"),
    *("--skip_reachability_check", "--update_period", "5"),
)
READY = r"\[INFO\].* Started\b"  # the last line that the host's runtime logs before it takes requests
SHUTDOWN_GRACE_S = 15.0
REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """One server of a swarm.

    :param start: first block
    :param end: one past the last block
    :param command: what to run instead of the swarm's `server_command`
    :param extra_args: put behind the swarm's own arguments, so that they win
    :param link: shape of this server's access link, instead of the swarm's `wan`
    """

    start: int
    end: int
    command: tuple[str, ...] | None = None
    extra_args: tuple[str, ...] = ()
    link: LinkShape | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise ValueError(f"a server needs at least one block: {self.start}:{self.end}")


class SwarmServer:
    """A running server: where it listens (`port`), where others call it (`announced_port`), and its process."""

    def __init__(self, spec: ServerSpec, port: int, announced_port: int, process: LoggedProcess) -> None:
        self.spec, self.port, self.announced_port, self.process = spec, port, announced_port, process

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log_path(self) -> Path:
        return self.process.log_path

    @property
    def peer_id(self) -> str:
        """The libp2p identity, which a restart keeps."""
        match = re.search(r"Running a server on .*?/p2p/(\w+)", self.process.log())
        if match is None:
            raise RuntimeError(f"{self.process.name} has not announced its address in {self.log_path}")
        return match.group(1)


class LocalSwarm:
    """Starts the swarm on entry, waits until every server is ready, and leaves no process behind on exit.

    :param model: model directory
    :param servers: a `ServerSpec`, or just (first block, one past the last), for each server
    :param work_dir: for logs and peer identities; created when missing
    :param wan: the access link of every server, in both directions; None: no relays, except for servers with a link of
        their own
    :param extra_args: for all servers, after the defaults
    :param server_command: runs a server; takes the arguments of the host's `run_server`
    :param env: added to the environment of every process
    :param startup_timeout_s: for the whole swarm, and again for each `restart`
    """

    def __init__(
        self,
        model: Path | str,
        servers: Sequence[ServerSpec | tuple[int, int]],
        *,
        work_dir: Path | str,
        dht_prefix: str = "spec-local-hf",
        wan: LinkShape | None = None,
        attn_cache_tokens: int = 4096,
        extra_args: Sequence[str] = (),
        server_command: Sequence[str] = RUN_SERVER,
        env: Mapping[str, str] | None = None,
        startup_timeout_s: float = 240.0,
        seed: int = 0,
    ) -> None:
        self.model, self.dht_prefix = Path(model), dht_prefix
        self.specs = [spec if isinstance(spec, ServerSpec) else ServerSpec(*spec) for spec in servers]
        self.work_dir = Path(work_dir)
        self.initial_peers: list[str] = []
        self.servers: list[SwarmServer] = []
        self.relays: WanRelays | None = None
        self._links = [spec.link or wan for spec in self.specs]
        self._args = [*DEFAULT_ARGS, "--attn_cache_tokens", str(attn_cache_tokens), *extra_args]
        self._server_command = tuple(server_command)
        self._env = {**_environment(), **(env or {})}
        self._startup_timeout_s, self._seed = startup_timeout_s, seed
        self._bootstrap: LoggedProcess | None = None
        self._terminate_as_before = False

    def __enter__(self) -> LocalSwarm:
        self._exit_on_termination()
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

    def kill(self, index: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to all processes of a server; with SIGKILL, return when they are gone."""
        process = self.servers[index].process
        if number == signal.SIGKILL:
            process.kill()
        else:
            process.send_signal(number)

    def restart(self, index: int) -> None:
        """Start a server again (after stopping it), with the same ports and identity; wait until it is ready."""
        process = self.servers[index].process
        process.stop(SHUTDOWN_GRACE_S)
        process.start()
        process.wait_for_log(READY, time.monotonic() + self._startup_timeout_s)

    def stop(self) -> None:
        """End everything: SIGINT to each group, a grace period, SIGKILL for the rest. May be called twice."""
        servers = [server.process for server in self.servers]
        bootstrap = [self._bootstrap] if self._bootstrap is not None else []
        try:
            # Servers say goodbye to the DHT: its first peer goes last.
            for group in (servers, bootstrap):
                for process in group:
                    process.send_signal(signal.SIGINT)
                deadline = time.monotonic() + SHUTDOWN_GRACE_S
                for process in group:
                    process.wait(deadline)
        finally:
            for process in servers + bootstrap:
                process.kill()
            if self.relays is not None:
                self.relays.stop()
            if self._terminate_as_before:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                self._terminate_as_before = False

    def _start(self) -> None:
        deadline = time.monotonic() + self._startup_timeout_s
        self.work_dir.mkdir(parents=True, exist_ok=True)
        ports = free_ports(len(self.specs) + 1)
        self._bootstrap = self._start_bootstrap(ports.pop(), deadline)
        announced = self._start_relays(ports)
        for index, (spec, port, announced_port) in enumerate(zip(self.specs, ports, announced)):
            name = f"server{index}"
            command = self._command(spec, port, announced_port, self.work_dir / f"{name}.id")
            process = LoggedProcess(name, command, self.work_dir / f"{name}.log", self._env)
            self.servers.append(SwarmServer(spec, port, announced_port, process))
            process.start()
        for server in self.servers:
            server.process.wait_for_log(READY, deadline)

    def _start_bootstrap(self, port: int, deadline: float) -> LoggedProcess:
        command = [*RUN_DHT, "--host_maddrs", _maddr(port), "--identity_path", str(self.work_dir / "bootstrap.id")]
        self._bootstrap = process = LoggedProcess("bootstrap", command, self.work_dir / "bootstrap.log", self._env)
        process.start()
        match = process.wait_for_log(rf"--initial_peers\s+({re.escape(_maddr(port))}/p2p/\w+)", deadline)
        self.initial_peers = [match.group(1)]
        return process

    def _start_relays(self, ports: list[int]) -> Sequence[int]:
        if not any(self._links):
            return ports
        self.relays = WanRelays(
            [RelaySpec(port, link or LinkShape()) for port, link in zip(ports, self._links)], seed=self._seed
        )
        return self.relays.__enter__().ports

    def _command(self, spec: ServerSpec, port: int, announced_port: int, identity: Path) -> list[str]:
        return [
            *(spec.command or self._server_command),
            str(self.model),
            *("--dht_prefix", self.dht_prefix),
            *("--initial_peers", *self.initial_peers),
            *("--block_indices", f"{spec.start}:{spec.end}"),
            *("--host_maddrs", _maddr(port)),
            *("--announce_maddrs", _maddr(announced_port)),
            *("--identity_path", str(identity)),
            *self._args,
            *spec.extra_args,
        ]

    def _exit_on_termination(self) -> None:
        # `timeout` and job schedulers send SIGTERM, whose default would skip our clean-up.
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _raise_exit)
            self._terminate_as_before = True


def split_blocks(num_blocks: int, num_servers: int) -> list[tuple[int, int]]:
    """Consecutive ranges of nearly equal size, the larger ones first: 30 over 4 gives 8, 8, 7, 7."""
    if not 1 <= num_servers <= num_blocks:
        raise ValueError(f"cannot split {num_blocks} blocks over {num_servers} servers")
    size, larger = divmod(num_blocks, num_servers)
    starts = [i * size + min(i, larger) for i in range(num_servers + 1)]
    return list(pairwise(starts))


def free_ports(count: int) -> list[int]:
    """Distinct unused ports below the range that the kernel takes for outgoing connections."""
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return list(ports)


def free_port() -> int:
    for port in random.SystemRandom().sample(range(20_000, 32_000), 200):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port between 20000 and 32000")


def _environment() -> dict[str, str]:
    one_thread = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "MKL", "OPENBLAS", "NUMEXPR")}
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    quiet = {"HIVEMIND_COLORS": "0", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    return {**one_thread, **quiet, "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}


def _maddr(port: int) -> str:
    return f"/ip4/127.0.0.1/tcp/{port}"


def _raise_exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
