"""Hosts of Petals' lineage, which differ in their package's name and in little else; extended by subclassing only."""

from __future__ import annotations

import copy
import inspect
import threading
import time
from collections.abc import Awaitable, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace
from importlib import import_module, metadata
from typing import Any

import torch
from hivemind.moe.client.remote_expert_worker import RemoteExpertWorker
from hivemind.p2p import PeerID
from hivemind.utils.logging import get_logger

from bloombee_spec.hosts.base import Host, NoRoute, Span
from bloombee_spec.hosts.container import StageContainer, make_server_class
from bloombee_spec.hosts.sessions import CLOSE_TIMEOUT, FailFast, aclose
from bloombee_spec.server.config import SpecServerConfig

logger = get_logger(__name__)

LOOK_S = 10.0  # longest wait for the swarm's records
BAN_S = 60.0  # longest time for which a server is avoided after one failure


class PetalsLikeHost(Host):
    """A subclass names the package, which is also the distribution's name, and bridges what its versions lack.

    :raises ImportError: the package cannot be imported as it is installed
    """

    container = StageContainer  # mixed into the host's module container

    def __init__(self) -> None:
        self.version = metadata.version(self.name)
        self._routing = self._module("client.routing.sequence_manager")
        self._server = self._module("server.server")
        self._session_class = self.extend_session(self._module("client.inference_session").InferenceSession)
        self._fail_fast_class = type("FailFastSession", (FailFast, self._session_class), {})

    def extend_session(self, base: type[Any]) -> type[Any]:
        """The host's session class, or a subclass with what this version's lacks."""
        return base

    def model_class(self, model_name: str, **kwargs: Any) -> type[Any]:
        hub = {
            k: v for k, v in kwargs.items() if k in ("token", "use_auth_token", "revision", "cache_dir", "dht_prefix")
        }
        config = self._module("utils.auto_config").AutoDistributedConfig.from_pretrained(model_name, **hub)
        for name, cls in vars(self._module("models")).items():
            causal = inspect.isclass(cls) and name.startswith("Distributed") and name.endswith("ForCausalLM")
            if causal and cls.config_class.model_type == config.model_type:
                return cls  # type: ignore[no-any-return]
        raise ValueError(f"{self.name} {self.version} has no causal LM for model type {config.model_type!r}")

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
        """As the host knows them now. After a failure it looks around again, which takes seconds where peers do not
        answer; that is waited for only if there is a block that nobody else serves."""
        manager = _manager(model)
        known = manager.state.sequence_info
        lacking = known.last_updated_time is None or not all(block.servers for block in known.block_infos)
        if lacking and not manager.ready.is_set():
            self._sequence(manager, 0, 1, mode="max_throughput")
        with manager.lock_changes:
            return {
                span.peer_id.to_base58(): (span.start, span.end)
                for span in known.spans_by_priority
                if span.peer_id in known.block_infos[span.start].servers  # else it failed since they were sorted
            }

    def look_again(self, model: Any) -> None:
        manager = _manager(model)
        manager.update(wait=False)
        manager.ready.wait(LOOK_S)

    def route(
        self, model: Any, peers: Sequence[str] | None, cache_tokens: int, start: int = 0, end: int | None = None
    ) -> list[Span]:
        with _restricting:
            manager = _manager(model) if peers is None else self._restricted(model, frozenset(peers))
            spans = self._sequence(manager, start, end, mode="min_latency", cache_tokens_needed=cache_tokens)
        return [Span(span.peer_id.to_base58(), span.start, span.end) for span in spans]

    def on_failure(self, model: Any, peer: str | None) -> None:
        if peer is not None:
            model.__dict__["_spec_failed_at"] = time.monotonic()
        manager = _manager(model)
        manager.on_request_failure(None if peer is None else PeerID.from_base58(peer))
        manager.update(wait=False)  # by itself it would go on routing over the peer for a minute
        with _restricting:
            _forget(_restricted_managers(model))

    def has_bans(self, model: Any) -> bool:
        failed_at: float = model.__dict__.get("_spec_failed_at", -BAN_S)
        return time.monotonic() - failed_at < BAN_S

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
        if timeout is None:
            return self._session_class(_manager(model), max_length)
        return self._fail_fast_class(_manager(model), max_length, timeout)

    def session_route(self, session: Any) -> list[Span]:
        spans = [one.span for one in session._server_sessions]
        return [Span(span.peer_id.to_base58(), span.start, span.end) for span in spans]

    def close_session(self, session: Any) -> None:
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
            _forget(managers)
            config = copy.copy(base.config)
            config.allowed_servers = sorted(peers)
            known = type(base.state.sequence_info).make_empty(base.block_uids)
            with base.lock_changes:
                if base.state.sequence_info.last_updated_time is not None:  # it need not ask the swarm again
                    known.update_([_among(peers, block) for block in base.state.sequence_info.block_infos])
            state = self._routing.SequenceManagerState(
                p2p=base.state.p2p, sequence_info=known, banned_peers=base.state.banned_peers
            )
            manager = self._routing.RemoteSequenceManager(config, base.block_uids, dht=base.dht, state=state)
            manager.ping_aggregator = base.ping_aggregator
            managers[peers] = manager
        return managers[peers]

    def _sequence(self, manager: Any, *blocks: int | None, **options: Any) -> Any:
        """:raises NoRoute: names the blocks without a server, and what the client asked for that narrows the choice"""
        try:
            return manager.make_sequence(*blocks, **options)
        except self._routing.MissingBlocksError:
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

    # ------------------------------------------------------------ server

    def server_class(self, config: SpecServerConfig, base: type[Any] | None = None) -> type[Any]:
        return make_server_class(self._server, base or self._server.Server, config, self.container)

    def serve(self, argv: Sequence[str], config: SpecServerConfig) -> None:
        from bloombee_spec.hosts.serve import run_host_command

        run_host_command(argv, self.server_class(config), f"{self.name}.cli.run_server")

    def _module(self, path: str) -> Any:
        return import_module(f"{self.name}.{path}")


def _manager(model: Any) -> Any:
    return model.transformer.h.sequence_manager


_restricting = (
    threading.Lock()
)  # calls of several threads replace the managers of a model, and must not while one is used


def _restricted_managers(model: Any) -> dict[frozenset[str], Any]:
    managers: dict[frozenset[str], Any] = model.__dict__.setdefault("_spec_restricted_managers", {})
    return managers


def _forget(managers: dict[frozenset[str], Any]) -> None:
    """A manager that is just looking around ends afterwards; nobody waits for it."""
    for manager in managers.values():
        threading.Thread(target=_quietly, args=(manager.shutdown,), daemon=True).start()
    managers.clear()


def _among(peers: frozenset[str], block: Any) -> Any:
    """The host's record of a block, with these servers only."""
    kept = {peer: info for peer, info in block.servers.items() if peer.to_base58() in peers}
    return replace(block, servers=kept)


def _quietly(call: Any) -> None:
    try:
        call()
    except Exception:
        logger.debug("Ignored while closing:", exc_info=True)
