"""Which servers speak the plugin's protocol, and a ring over the route that the host's own routing makes of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
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
SEEN_S = 300.0  # for which a server that had the plugin, and does not answer now, is thought to have it


class NoPluginRoute(RuntimeError):
    """Some block has no server with the plugin.

    :param passing: it had one a while ago, or the swarm knows of no server at all, which the host's clients wait for
    """

    def __init__(self, message: str, passing: bool = False):
        super().__init__(message)
        self.passing = passing


def plugin_servers(host: Host, model: Any) -> dict[str, StageInfo]:
    """Servers that answered `rpc_spec_info`, by base58 peer id; answers are kept for a minute per model."""
    known: dict[str, tuple[float, StageInfo | None]] = model.__dict__.setdefault("_spec_server_infos", {})
    seen: dict[str, tuple[float, StageInfo]] = model.__dict__.setdefault("_spec_seen", {})
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
            if info is not None:
                seen[peer] = (now, info)
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
    infos = _servers_of_all_blocks(host, model, config, lanes, max_length)
    kept = None if kept is None or not kept.sources else kept
    spans = _route(host, model, infos, lanes * max_length, kept)
    chosen = [infos[span.peer] for span in spans]
    has_head = chosen[-1].lm_head and spans[-1].end == model.config.num_hidden_layers
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


def _servers_of_all_blocks(
    host: Host, model: Any, config: SpecConfig, lanes: int, max_length: int
) -> dict[str, StageInfo]:
    """Servers with the plugin that can serve such a session, and stay; they are looked for twice.

    :raises NoPluginRoute: they lack blocks
    """

    def usable(infos: Mapping[str, StageInfo]) -> dict[str, StageInfo]:
        return {peer: info for peer, info in infos.items() if _fits(info, config, lanes, max_length, _adapter(model))}

    def look() -> tuple[dict[str, StageInfo], set[int]]:
        away = leaving(model)
        infos = {peer: i for peer, i in usable(plugin_servers(host, model)).items() if peer not in away}
        return infos, blocks - _covered((info.start, info.end) for info in infos.values())

    blocks = set(range(model.config.num_hidden_layers))
    infos, lacking = look()
    if not lacking:
        return infos
    now = time.monotonic()
    seen = {peer: info for peer, (when, info) in model._spec_seen.items() if now - when < SEEN_S}
    before = _covered((info.start, info.end) for info in usable(seen).values())
    asked = model.__dict__.get("_spec_looked_again", -NEGATIVE_LIFETIME)
    if lacking <= before or now - asked >= NEGATIVE_LIFETIME:
        # A server that was busy for a moment is not one without the plugin.
        model.__dict__["_spec_looked_again"] = now
        known = model._spec_server_infos
        known.update({peer: (-INFO_LIFETIME, None) for peer, (_, info) in list(known.items()) if info is None})
        host.look_again(model)
        infos, lacking = look()
    if lacking:
        served = _covered(host.servers(model).values())
        raise NoPluginRoute(
            f"blocks {min(lacking)}..{max(lacking)} have no server with the plugin "
            f"for {lanes} streams of {max_length} tokens",
            passing=lacking <= before | (blocks - served),
        )
    return infos


def _fits(info: StageInfo, config: SpecConfig, lanes: int, max_length: int, adapter: str | None) -> bool:
    return (
        info.max_lanes >= lanes and info.max_length >= max_length
        and (config.codec == "auto" or config.codec in info.codecs)
        and (adapter is None or adapter in info.adapters)
    )  # fmt: skip


def _covered(spans: Iterable[tuple[int, int]]) -> set[int]:
    return {block for start, end in spans for block in range(start, end)}


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
