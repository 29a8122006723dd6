"""The server side of a host of Petals' lineage: its module container with the plugin's stage in it."""

from __future__ import annotations

import inspect
import os
import random
import signal
import threading
from types import ModuleType
from typing import Any

from hivemind.moe.server.runtime import Runtime
from hivemind.utils.logging import get_logger

from bloombee_spec.server.config import SpecServerConfig
from bloombee_spec.server.families.base import UnsupportedModel
from bloombee_spec.server.server import LoadedBlocks, StageServer

logger = get_logger(__name__)


def make_server_class(
    host_server: ModuleType, base: type[Any], config: SpecServerConfig, mixin: type[StageContainer]
) -> type[Any]:
    """`base` (the host's `Server` or a subclass), serving plugin sessions too, on patched and unpatched hosts.

    :param host_server: the host's module that defines `Server` and `ModuleContainer`
    :param mixin: `StageContainer`, or a subclass for hosts that need one
    """
    host_container = host_server.ModuleContainer
    container = type("SpecModuleContainer", (mixin, host_container), {"spec_config": config})
    if hasattr(base, "container_class"):  # the host's files are patched with server-plugins
        return type("SpecServer", (_PoliteRun, base), {"container_class": container})
    classes = {"container_class": container, "host_container": host_container}
    return type("SpecServer", (_PoliteRun, _UnpatchedRun, base), classes)


class StageContainer:
    """Mixed into the host's container: one more pool in its runtime and one more service at its libp2p node."""

    spec_config: SpecServerConfig
    create_args: dict[str, Any]
    runtime: Any

    @classmethod
    def create(cls, **kwargs: Any) -> Any:
        bound = type(cls.__name__, (cls,), {"create_args": kwargs})
        return super(StageContainer, bound).create(**kwargs)  # type: ignore[misc]

    def __init__(self: Any, dht: Any, dht_prefix: str, module_backends: Any, *, start: bool, **kwargs: Any):
        super().__init__(dht, dht_prefix, module_backends, start=False, **kwargs)  # type: ignore[call-arg]
        self.spec: StageServer | None = None
        try:
            self.spec = StageServer(dht, self._loaded(module_backends, kwargs), self.spec_config)
            self.runtime.pools += (self.spec.pool,)
            self.spec.fork()
        except UnsupportedModel as e:
            logger.error(f"bloombee-spec cannot serve these blocks, the host serves them alone: {e}")
        if start:
            self.run_in_background(await_ready=True)

    def run(self: Any) -> None:
        if self.spec is not None:
            self.spec.start()
        super().run()  # type: ignore[misc]

    def is_healthy(self: Any) -> bool:
        healthy = super().is_healthy()  # type: ignore[misc]
        return healthy and (self.spec is None or self.spec.is_alive())

    def shutdown(self: Any) -> None:
        if self.spec is not None:
            self.spec.leave()
            self.spec.shutdown()
        super().shutdown()  # type: ignore[misc]

    def memory_cache(self, backend: Any) -> Any:
        """What sessions' KV is allocated from, with the interface of Petals' `MemoryCache`."""
        return backend.memory_cache

    def _loaded(self, backends: dict[str, Any], kwargs: dict[str, Any]) -> LoadedBlocks:
        args = self.create_args
        indices = list(args["block_indices"])
        ordered = [backends[uid] for uid in sorted(backends, key=lambda uid: int(uid.rsplit(".", 1)[1]))]
        if any(len(backend.module.module_shards) != 1 for backend in ordered):
            raise UnsupportedModel("tensor-parallel blocks are split over several devices")
        first = ordered[0]
        return LoadedBlocks(
            model=args["converted_model_name_or_path"],
            config=args["block_config"],
            blocks=[backend.module.module_shards[0] for backend in ordered],
            first_block=min(indices),
            n_blocks=args["block_config"].num_hidden_layers,
            memory_cache=self.memory_cache(first),
            device=first.module.devices[0],
            dtype=first.dtype,
            adapter=first._peft_module.using_adapter,
            adapters=tuple(args["server_info"].adapters),
            max_length=kwargs["inference_max_length"],
            hub={"token": args["token"], "revision": args["revision"], "cache_dir": args["cache_dir"]},
        )


class _PoliteRun:
    """SIGTERM ends the server as Ctrl-C does, so that it tells its clients and cleans up."""

    def run(self: Any) -> None:
        owner = os.getpid()

        def on_sigterm(number: int, _: Any) -> None:
            signal.signal(number, signal.SIG_DFL)
            if os.getpid() != owner:  # a child that was forked with this handler
                os.kill(os.getpid(), number)
                return
            raise KeyboardInterrupt

        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)
        super().run()  # type: ignore[misc]


class _UnpatchedRun:
    """`Server.run` of a host that names its container class by hand."""

    container_class: type[Any]
    host_container: type[Any]

    def run(self: Any) -> None:
        while True:
            arguments = {
                name: getattr(self, name)
                for function in (self.host_container.create, self.host_container.__init__, Runtime.__init__)
                for name in inspect.signature(function).parameters
                if hasattr(self, name)
            }
            arguments.update(block_indices=self._choose_blocks(), start=True)
            self.module_container = self.container_class.create(**arguments)
            try:
                self.module_container.ready.wait()
                while True:
                    if self.stop.wait(random.uniform(0, 2 * self.mean_balance_check_period)):
                        return
                    if not self.module_container.is_healthy():
                        logger.warning("One of subprocesses crashed, restarting the server")
                        break
                    if self._should_choose_other_blocks():
                        logger.info("Swarm is imbalanced, server will load other blocks")
                        break
            finally:
                self.module_container.shutdown()
            self._clean_memory_and_fds()
