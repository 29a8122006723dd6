"""BloomBee 0.1.3 (Petals' main branch renamed), extended by subclassing only: no attribute of the host changes."""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Awaitable, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from importlib import metadata
from typing import Any

import torch
from bloombee.client.routing import RemoteSequenceManager
from bloombee.client.routing.sequence_manager import MissingBlocksError, SequenceManagerState
from bloombee.server import server as host_server
from bloombee.utils.auto_config import AutoDistributedConfig
from hivemind.moe.client.remote_expert_worker import RemoteExpertWorker
from hivemind.moe.server.runtime import Runtime
from hivemind.p2p import PeerID
from hivemind.utils.logging import get_logger

from bloombee_spec.hosts.base import Host, NoRoute, Span
from bloombee_spec.server.config import SpecServerConfig
from bloombee_spec.server.families.base import UnsupportedModel
from bloombee_spec.server.server import LoadedBlocks, StageServer

logger = get_logger(__name__)

CLOSE_TIMEOUT = 5.0


class BloomBeeHost(Host):
    name = "bloombee"

    def __init__(self) -> None:
        self.version = metadata.version("bloombee")

    def model_class(self, model_name: str, **kwargs: Any) -> type[Any]:
        from bloombee.models.bloom import DistributedBloomForCausalLM
        from bloombee.models.falcon import DistributedFalconForCausalLM
        from bloombee.models.llama import DistributedLlamaForCausalLM
        from bloombee.models.mixtral import DistributedMixtralForCausalLM

        classes = (
            DistributedLlamaForCausalLM, DistributedBloomForCausalLM, DistributedFalconForCausalLM,
            DistributedMixtralForCausalLM,
        )  # fmt: skip
        hub = {
            k: v for k, v in kwargs.items() if k in ("token", "use_auth_token", "revision", "cache_dir", "dht_prefix")
        }
        config = AutoDistributedConfig.from_pretrained(model_name, **hub)
        for cls in classes:
            if cls.config_class.model_type == config.model_type:
                return cls  # type: ignore[no-any-return]
        raise ValueError(f"bloombee {self.version} has no causal LM for model type {config.model_type!r}")

    # ------------------------------------------------------------ client

    def p2p(self, model: Any) -> Any:
        return _manager(model).state.p2p

    def run(self, coroutine: Awaitable[Any], timeout: float | None = None) -> Any:
        future = RemoteExpertWorker.run_coroutine(coroutine, return_future=True)
        try:
            return future.result(timeout)
        except FutureTimeoutError:
            future.cancel()
            raise TimeoutError(f"no result within {timeout} s") from None
        except BaseException:
            future.cancel()
            raise

    def servers(self, model: Any) -> dict[str, tuple[int, int]]:
        manager = _ready(_manager(model))
        with manager.lock_changes:
            return {
                span.peer_id.to_base58(): (span.start, span.end)
                for span in manager.state.sequence_info.spans_by_priority
            }

    def route(self, model: Any, peers: Sequence[str] | None, cache_tokens: int) -> list[Span]:
        manager = _manager(model) if peers is None else self._restricted(model, frozenset(peers))
        spans = _sequence(manager, mode="min_latency", cache_tokens_needed=cache_tokens)
        return [Span(span.peer_id.to_base58(), span.start, span.end) for span in spans]

    def on_failure(self, model: Any, peer: str | None) -> None:
        for manager in (_manager(model), *_restricted_managers(model).values()):
            manager.on_request_failure(None if peer is None else PeerID.from_base58(peer))
            manager.update(wait=False)  # by itself it would go on routing over the peer for a minute

    def on_success(self, model: Any, peer: str) -> None:
        _manager(model).on_request_success(PeerID.from_base58(peer))

    def embed(self, model: Any, tokens: Sequence[int]) -> torch.Tensor:
        embeddings = model.transformer.word_embeddings
        with torch.inference_mode():
            ids = torch.tensor(tokens, device=embeddings.weight.device)
            return model.transformer.word_embeddings_layernorm(embeddings(ids))  # type: ignore[no-any-return]

    def logits(self, model: Any, hidden: torch.Tensor) -> torch.Tensor:
        head = model.get_output_embeddings()
        with torch.inference_mode():
            normed = model.transformer.ln_f(hidden.to(head.weight.device, model.dtype))
            return head(normed[None])[0].float()  # type: ignore[no-any-return]

    def new_session(self, model: Any, max_length: int, timeout: float | None = None) -> Any:
        from bloombee.client.inference_session import InferenceSession

        from bloombee_spec.hosts.sessions import FailFastSession

        if timeout is None:
            return InferenceSession(_manager(model), max_length)
        return FailFastSession(_manager(model), max_length, timeout)

    def session_route(self, session: Any) -> list[Span]:
        spans = [one.span for one in session._server_sessions]
        return [Span(span.peer_id.to_base58(), span.start, span.end) for span in spans]

    def close_session(self, session: Any) -> None:
        from bloombee_spec.hosts.sessions import aclose

        _quietly(lambda: self.run(aclose(session), CLOSE_TIMEOUT))

    def close(self, model: Any) -> None:
        for manager in _restricted_managers(model).values():
            _quietly(manager.shutdown)
        manager = _manager(model)
        _quietly(manager.shutdown)
        _quietly(lambda: RemoteExpertWorker.run_coroutine(manager.state.p2p.shutdown(), return_future=True).result(5))
        _quietly(manager.dht.shutdown)
        _quietly(lambda: manager.dht.join(5))

    def _restricted(self, model: Any, peers: frozenset[str]) -> Any:
        """The host's own routing over some of the servers: a second sequence manager with an allow list."""
        managers = _restricted_managers(model)
        if peers not in managers:
            base = _manager(model)
            for old in managers.values():
                _quietly(old.shutdown)
            managers.clear()
            config = copy.copy(base.config)
            config.allowed_servers = sorted(peers)
            state = SequenceManagerState(p2p=base.state.p2p, banned_peers=base.state.banned_peers)
            managers[peers] = RemoteSequenceManager(config, base.block_uids, dht=base.dht, state=state)
        return managers[peers]

    # ------------------------------------------------------------ server

    def server_class(self, config: SpecServerConfig) -> type[Any]:
        return make_server_class(host_server.Server, config)

    def serve(self, argv: Sequence[str], config: SpecServerConfig) -> None:
        from bloombee_spec.hosts.serve import run_host_command

        run_host_command(argv, self.server_class(config))


def _manager(model: Any) -> Any:
    return model.transformer.h.sequence_manager


def _ready(manager: Any) -> Any:
    if not manager.ready.is_set():
        _sequence(manager, 0, 1, mode="max_throughput")
    return manager


def _sequence(manager: Any, *blocks: int, **options: Any) -> Any:
    """:raises NoRoute: names the blocks without a server, and what the client asked for that narrows the choice"""
    try:
        return manager.make_sequence(*blocks, **options)
    except MissingBlocksError:
        pass
    with manager.lock_changes:
        missing = [i for i, spans in enumerate(manager.state.sequence_info.spans_containing_block) if not spans]
    blocks_text = f"blocks {missing[0]}..{missing[-1]}" if missing else "some block"
    adapter, allowed = manager.config.active_adapter, manager.allowed_servers
    raise NoRoute(
        f"no server is online for {blocks_text} of {manager.config.dht_prefix!r}"
        + (f" with adapter {adapter!r}" if adapter else "")
        + (f" among the {len(allowed)} allowed servers" if allowed is not None else "")
    )


def _restricted_managers(model: Any) -> dict[frozenset[str], Any]:
    managers: dict[frozenset[str], Any] = model.__dict__.setdefault("_spec_restricted_managers", {})
    return managers


def _quietly(call: Any) -> None:
    try:
        call()
    except Exception:
        logger.debug("Ignored while closing:", exc_info=True)


# ---------------------------------------------------------------- server


class SpecModuleContainer(host_server.ModuleContainer):
    """The host's container with one more pool in its runtime and one more service at its libp2p node."""

    spec_config: SpecServerConfig
    create_args: dict[str, Any]

    @classmethod
    def create(cls, **kwargs: Any) -> Any:
        bound = type(cls.__name__, (cls,), {"create_args": kwargs})
        return super(SpecModuleContainer, bound).create(**kwargs)  # type: ignore[misc]

    def __init__(self, dht: Any, dht_prefix: str, module_backends: Any, *, start: bool, **kwargs: Any):
        super().__init__(dht, dht_prefix, module_backends, start=False, **kwargs)
        self.spec: StageServer | None = None
        try:
            self.spec = StageServer(dht, self._loaded(module_backends, kwargs), self.spec_config)
            self.runtime.pools += (self.spec.pool,)
            self.spec.fork()
        except UnsupportedModel as e:
            logger.error(f"bloombee-spec cannot serve these blocks, the host serves them alone: {e}")
        if start:
            self.run_in_background(await_ready=True)

    def run(self) -> None:
        if self.spec is not None:
            self.spec.start()
        super().run()

    def is_healthy(self) -> bool:
        return super().is_healthy() and (self.spec is None or self.spec.is_alive())

    def shutdown(self) -> None:
        if self.spec is not None:
            self.spec.shutdown()
        super().shutdown()

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
            memory_cache=first.memory_cache,
            device=first.module.devices[0],
            dtype=first.dtype,
            adapter=first._peft_module.using_adapter,
            adapters=tuple(args["server_info"].adapters),
            max_length=kwargs["inference_max_length"],
            hub={"token": args["token"], "revision": args["revision"], "cache_dir": args["cache_dir"]},
        )


def make_server_class(base: type[Any], config: SpecServerConfig) -> type[Any]:
    """`base` (the host's `Server` or a subclass), serving plugin sessions too, on patched and unpatched hosts."""
    container = type("SpecModuleContainer", (SpecModuleContainer,), {"spec_config": config})
    if hasattr(base, "container_class"):  # patches/bloombee-0.1.3/server-plugins
        return type("SpecServer", (base,), {"container_class": container})
    return type("SpecServer", (_UnpatchedRun, base), {"container_class": container})


class _UnpatchedRun:
    """`Server.run` of a host that names its container class by hand."""

    container_class: type[Any]

    def run(self: Any) -> None:
        while True:
            arguments = {
                name: getattr(self, name)
                for function in (
                    host_server.ModuleContainer.create,
                    host_server.ModuleContainer.__init__,
                    Runtime.__init__,
                )
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
