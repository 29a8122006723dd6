"""Which servers speak the plugin's protocol, and a ring over the route that the host's own routing makes of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hivemind.utils.logging import get_logger

from bloombee_spec.client.codecs import agree
from bloombee_spec.client.info import StageInfo, fetch_info
from bloombee_spec.client.kept import Kept
from bloombee_spec.client.moving import Mover, leaving
from bloombee_spec.client.peers import recall
from bloombee_spec.client.ring import Ring
from bloombee_spec.config import SpecConfig
from bloombee_spec.hosts.base import Host, Span

logger = get_logger(__name__)

INFO_TIMEOUT = 5.0
INFO_LIFETIME = 60.0  # seconds after which a server is asked again
NEGATIVE_LIFETIME = 15.0  # a server without the plugin may be starting up


class NoPluginRoute(RuntimeError):
    """Some block has no server with the plugin."""


def plugin_servers(host: Host, model: Any) -> dict[str, StageInfo]:
    """Servers that answered `rpc_spec_info`, by base58 peer id; answers are kept for a minute per model."""
    known: dict[str, tuple[float, StageInfo | None]] = model.__dict__.setdefault("_spec_server_infos", {})
    servers = host.servers(model)
    now = time.monotonic()
    asked = [
        peer
        for peer in servers
        if peer not in known or now - known[peer][0] > (INFO_LIFETIME if known[peer][1] else NEGATIVE_LIFETIME)
    ]
    if asked:
        p2p = host.p2p(model)

        async def ask() -> list[StageInfo | None]:
            return await asyncio.gather(*[fetch_info(p2p, peer, INFO_TIMEOUT) for peer in asked])

        for peer, info in zip(asked, host.run(ask(), INFO_TIMEOUT + 5)):
            known[peer] = (now, info)
    return {peer: info for peer in servers if (info := known[peer][1]) is not None}


def open_ring(
    host: Host, model: Any, config: SpecConfig, *, lanes: int, max_length: int,
    kept: Kept | None = None, texts: Sequence[Sequence[int]] = (),
) -> Ring:  # fmt: skip
    """
    :param kept: what an earlier ring left; servers that hold KV stay. `texts` by lane, the tokens to begin with
    :raises NoPluginRoute: the plugin's servers do not cover all blocks, or their limits are too small for this session
    :raises RingError: a stage cannot be reached or refuses
    """
    n_blocks = model.config.num_hidden_layers
    infos = _usable(host, model, config, lanes, max_length)
    asked = model.__dict__.get("_spec_looked_again", -NEGATIVE_LIFETIME)
    due = kept is not None or time.monotonic() - asked >= NEGATIVE_LIFETIME
    if due and _uncovered(infos, n_blocks):  # a server that was busy for a moment is not one without the plugin
        model.__dict__["_spec_looked_again"] = time.monotonic()
        known = model._spec_server_infos
        known.update({peer: (-INFO_LIFETIME, None) for peer, (_, info) in list(known.items()) if info is None})
        host.look_again(model)
        infos = _usable(host, model, config, lanes, max_length)
    uncovered = _uncovered(infos, n_blocks)
    if uncovered:
        raise NoPluginRoute(
            f"blocks {uncovered[0]}..{uncovered[-1]} have no server with the plugin "
            f"for {lanes} streams of {max_length} tokens"
        )
    kept = None if kept is None or not kept.sources else kept
    spans = _route(host, model, infos, lanes * max_length, kept)
    chosen = [infos[span.peer] for span in spans]
    has_head = chosen[-1].lm_head and spans[-1].end == n_blocks
    rule = None if config.rule == "keyed" else config.rule
    if rule is not None and not has_head:
        raise NoPluginRoute(
            f"the rule {rule} needs the LM head at the last stage, which {spans[-1].peer} does not have"
        )
    ring = Ring.open(
        host, model, spans, chosen, lanes=lanes, max_length=max_length, arena=config.max_candidates,
        embed=chosen[0].embed and spans[0].start == 0 and not config.client_embeds,
        verify=has_head and rule is None and not config.client_verifies,
        codecs=agree(config, spans, chosen), adapter=_adapter(model), timeout=config.connect_timeout,
        direct_commits=config.direct_commits, rule=rule, kept=kept, texts=texts,
    )  # fmt: skip
    recall(ring.meter)
    return ring


def _usable(host: Host, model: Any, config: SpecConfig, lanes: int, max_length: int) -> dict[str, StageInfo]:
    """Servers with the plugin that can serve such a session, and stay."""
    adapter, away = _adapter(model), leaving(model)
    return {
        peer: info
        for peer, info in plugin_servers(host, model).items()
        if info.max_lanes >= lanes and info.max_length >= max_length and peer not in away
        and (config.codec == "auto" or config.codec in info.codecs)
        and (adapter is None or adapter in info.adapters)
    }  # fmt: skip


def _uncovered(infos: Mapping[str, StageInfo], n_blocks: int) -> list[int]:
    return [block for block in range(n_blocks) if not any(i.start <= block < i.end for i in infos.values())]


def _adapter(model: Any) -> str | None:
    """The LoRA adapter that the client asks for."""
    found: str | None = getattr(model.config, "active_adapter", None)
    return found


def watch_leaving(
    host: Host, model: Any, config: SpecConfig, ring: Ring, texts: Callable[[], list[tuple[int, ...]]], max_length: int
) -> None:
    """When a server of the ring announces that it leaves, prepare another one and move there; with `config.standby`,
    have another one ready for each."""
    mover = Mover(
        host, model, ring, lambda: plugin_servers(host, model), texts, max_length,
        _adapter(model), config.moving, config.churn_quality,
    )  # fmt: skip
    ring.mover = mover
    if config.standby:
        mover.keep_standbys()


def _route(host: Host, model: Any, infos: Mapping[str, StageInfo], cache_tokens: int, kept: Kept | None) -> list[Span]:
    """The host's own routing; around the spans that hold KV already, if there are any.

    :raises NoRoute: some block has no server
    """
    spans: list[Span] = []
    at, end = 0, model.config.num_hidden_layers
    for span in sorted(kept.sources if kept is not None else (), key=lambda span: span.start):
        info = infos.get(span.peer)
        if info is None or not (at <= span.start and info.start <= span.start and span.end <= info.end):
            continue
        if at < span.start:
            spans += host.route(model, list(infos), cache_tokens, at, span.start)
        spans.append(span)
        at = span.end
    return spans if at == end else spans + host.route(model, list(infos), cache_tokens, at, end)
