"""What the plugin needs from a host. Only modules of this package import one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any

import torch

from bloombee_spec.server.config import SpecServerConfig

# Both main branches call themselves 2.3.0.dev2, whatever the commit; docs/hosts.md names the tested ones.
SUPPORTED = {"bloombee": ("0.1.3", "2.3.0.dev2"), "petals": ("2.2.0.post1", "2.3.0.dev2")}
_ADAPTERS = {
    ("bloombee", "0.1.3"): "bloombee.BloomBeeHost",
    ("bloombee", "2.3.0.dev2"): "bloombee_main.BloomBeeMainHost",
    ("petals", "2.2.0.post1"): "petals.PetalsHost",
    ("petals", "2.3.0.dev2"): "petals.PetalsMainHost",
}  # modules of this package: each imports its host


class HostError(RuntimeError):
    """No host, or none that this version of the plugin knows; the message says what was found and what works."""


class NoRoute(RuntimeError):
    """Some block has no server that may be used."""


@dataclass(frozen=True)
class Span:
    """Consecutive blocks `start .. end-1` at one server; `peer` is its base58 peer id."""

    peer: str
    start: int
    end: int


class Host(ABC):
    """One implementation per host package. Models below are instances of the class that `model_class` returns."""

    name: str  # of the distribution, and of its package
    version: str
    can_rewind: bool  # its servers let an open session go back to an earlier position

    # ------------------------------------------------------------ client

    @abstractmethod
    def model_class(self, model_name: str, **kwargs: Any) -> type[Any]:
        """The host's distributed causal LM class for this checkpoint; `kwargs` as for its `from_pretrained`."""

    @abstractmethod
    def p2p(self, model: Any) -> Any:
        """The model's libp2p node, for use inside `run`."""

    @abstractmethod
    def run(self, coroutine: Awaitable[Any], timeout: float | None = None) -> Any:
        """Run on the host client's event loop, from any other thread.

        :raises TimeoutError: no result within `timeout` seconds; the coroutine is cancelled
        """

    @abstractmethod
    def servers(self, model: Any) -> dict[str, tuple[int, int]]:
        """Servers that the host's routing knows now: base58 peer id to its blocks `(start, end)`.

        :raises NoRoute: the first block has no server
        """

    @abstractmethod
    def look_again(self, model: Any) -> None:
        """Have the host's routing ask the swarm for its servers now, and wait until it did, at most some seconds."""

    @abstractmethod
    def route(
        self, model: Any, peers: Sequence[str] | None, cache_tokens: int, start: int = 0, end: int | None = None
    ) -> list[Span]:
        """The host's own routing over the blocks `start .. end-1` (all of them), restricted to `peers` when given.

        :raises NoRoute: some block has no server
        """

    @abstractmethod
    def on_failure(self, model: Any, peer: str | None) -> None: ...

    @abstractmethod
    def has_bans(self, model: Any) -> bool:
        """Whether a server that is missing may be one that the host's routing avoids for a while after a failure."""

    @abstractmethod
    def on_success(self, model: Any, peer: str) -> None: ...

    @abstractmethod
    def embed(self, model: Any, tokens: Sequence[int]) -> torch.Tensor:
        """`[n, hidden]` input rows of the first block."""

    @abstractmethod
    def logits(self, model: Any, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm and LM head of the client: `[n, hidden]` to `[n, vocab]` fp32."""

    @abstractmethod
    def new_session(self, model: Any, max_length: int, timeout: float | None = None) -> Any:
        """The host's own inference session, without I/O yet: `step`, `position`.

        :param timeout: instead of the host's own retries, raise at the first failure, or when a server has not
            answered
            for so many seconds
        """

    @abstractmethod
    def session_route(self, session: Any) -> list[Span]:
        """Where the session runs; empty before its first step."""

    @abstractmethod
    def close_session(self, session: Any) -> None:
        """Close it; bounded in time, never raises."""

    @abstractmethod
    def close(self, model: Any) -> None:
        """Stop the model's background threads and processes; never raises."""

    # ------------------------------------------------------------ server

    @abstractmethod
    def server_class(self, config: SpecServerConfig, base: type[Any] | None = None) -> type[Any]:
        """The host's `Server`, or its subclass `base`, extended with the plugin's service."""

    @abstractmethod
    def serve(self, argv: Sequence[str], config: SpecServerConfig) -> None:
        """The host's `run_server` command with these arguments, serving the extended class. Blocks."""


def installed_hosts() -> dict[str, str]:
    """Host packages found in this environment, with versions; nothing is imported."""
    found = {}
    for name in SUPPORTED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def supported_hosts() -> str:
    """Every host that this version works with, for messages."""
    return ", ".join(f"{name} {version}" for name, versions in SUPPORTED.items() for version in versions)


def host_package() -> str:
    """The package of the installed host; nothing is imported.

    :raises HostError: none is installed, or an unsupported version
    """
    found = installed_hosts()
    if not found:
        raise HostError(f"no swarm host is installed; bloombee-spec {_own_version()} works with {supported_hosts()}")
    for name, version in found.items():
        if version in SUPPORTED[name]:
            return name
    listed = ", ".join(f"{name} {version}" for name, version in found.items())
    raise HostError(f"found {listed}, which this version does not support; it works with {supported_hosts()}")


def load_host(package: str | None = None) -> Host:
    """The adapter of the installed host.

    :param package: the host to load where several are installed; None: the first supported one
    :raises HostError: none installed, an unsupported version, or one that cannot be imported
    """
    name = package or host_package()
    version = installed_hosts().get(name, "(not installed)")
    if version not in SUPPORTED.get(name, ()):
        raise HostError(f"{name} {version} is not supported by this version; it works with {supported_hosts()}")
    module, _, adapter = _ADAPTERS[name, version].partition(".")
    try:
        loaded: Host = getattr(import_module(f"bloombee_spec.hosts.{module}"), adapter)()
        return loaded
    except ModuleNotFoundError as e:
        raise HostError(f"{name} {version} is installed but cannot be imported ({e}); install what is missing") from e
    except ImportError as e:
        raise HostError(
            f"{name} {version} is installed but cannot be imported ({e}); run `bloombee-spec patch apply`, then "
            "`bloombee-spec doctor`"
        ) from e
    except AssertionError as e:  # how a host checks the version of transformers
        raise HostError(f"{name} {version} does not work in this environment: {e}") from e


def _own_version() -> str:
    import bloombee_spec

    return bloombee_spec.__version__
