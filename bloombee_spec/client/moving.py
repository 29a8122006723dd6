"""Other servers get ready to take a stage over: because its server leaves, or in case that it dies.

Everything here is preparation, beside decoding. Whatever fails, the ring goes on without it, and a new server gets
the missing rows from the stage before it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hivemind.utils.logging import get_logger

from bloombee_spec.client.info import StageInfo
from bloombee_spec.client.kept import Source
from bloombee_spec.client.prepared import OPEN_TIMEOUT, Prepared
from bloombee_spec.client.ring import Ring
from bloombee_spec.client.stage_link import RingMoved
from bloombee_spec.hosts.base import Host, NoRoute, Span

logger = get_logger(__name__)

POLL_S, LOOK_S = 0.05, 1.0  # how often a prepared session, or the swarm, is looked at
SHARE = 0.7  # of the time until a server leaves that preparing may take
LEFT_S = 2.0  # beyond its last moment, for which a server that announced to leave is not routed over
STANDBY_S, STANDBY_TOKENS = 0.5, 16  # how often standbys are looked after; from so many new tokens on they are filled
STANDBY_PAUSE_S = 5.0  # until one that failed is tried again

Texts = Callable[[], list[tuple[int, ...]]]


def leaving(model: Any) -> set[str]:
    """Servers that announced to leave, and may not have left yet."""
    until: dict[str, float] = model.__dict__.setdefault("_spec_leaving", {})
    return {peer for peer, end in until.items() if time.monotonic() < end}


@dataclass
class Mover:
    """
    :param infos: the plugin's servers now
    :param texts: by lane, the committed tokens now
    :param way: `auto`, `rows`, `kv`, or `none` to prepare nothing
    """

    host: Host
    model: Any
    ring: Ring
    infos: Callable[[], dict[str, StageInfo]]
    texts: Texts
    max_length: int
    adapter: str | None
    way: str = "auto"
    standby: dict[int, Prepared] = field(default_factory=dict)  # by stage

    def __post_init__(self) -> None:
        self._started: set[int] = set()

    # ---------------------------------------------------------------- a server leaves

    def leaves(self, index: int, seconds: float) -> None:
        """Stage `index` stops in so many seconds. Returns at once; ends as a `RingMoved` among the ring's events, or
        without one if no other server is there."""
        until = self.model.__dict__.setdefault("_spec_leaving", {})
        until[self.ring.spans[index].peer] = time.monotonic() + seconds + LEFT_S
        if index not in self._started:
            self._started.add(index)
            threading.Thread(target=self._move, args=(index, seconds), name="spec-move", daemon=True).start()

    def _move(self, index: int, seconds: float) -> None:
        old = self.ring.spans[index]
        end = time.monotonic() + SHARE * seconds
        while True:
            try:
                texts = self.texts()
                spans, infos = self._others(index, len(texts))
                break
            except (NoRoute, TimeoutError) as e:  # another one may just be starting up
                if time.monotonic() > end or self.ring.closed:
                    logger.warning(f"{old.peer} leaves, and nobody else serves blocks {old.start}:{old.end}: {e}")
                    return
            self.host.on_failure(self.model, None)  # makes the host's routing look again
            time.sleep(LOOK_S)
        sources: dict[Span, Source] = {}
        if len(spans) == 1 and self.way != "none" and self.ring.prefilled:
            try:
                preparing = self._prepare(
                    index, spans[0], infos[spans[0].peer], texts, max(0.0, end - time.monotonic())
                )
                sources = self.host.run(preparing, OPEN_TIMEOUT + seconds)
            except Exception as e:
                logger.info(f"The move from {old.peer} is not prepared: {e!r}")
        if not self.ring.closed:
            self.ring.events.put(RingMoved(old.peer, sources))

    def _others(self, index: int, lanes: int) -> tuple[list[Span], dict[str, StageInfo]]:
        """Other servers for the blocks of a stage.

        :raises NoRoute: there are none
        """
        old = self.ring.spans[index]
        away = leaving(self.model) | {old.peer}
        infos = {peer: info for peer, info in self.infos().items() if peer not in away}
        spans = self.host.route(self.model, list(infos), lanes * self.max_length, old.start, old.end)
        return spans, infos

    async def _prepare(
        self, index: int, span: Span, info: StageInfo, texts: Sequence[tuple[int, ...]], seconds: float
    ) -> dict[Span, Source]:
        """Under which name the new server holds the texts, as far as they arrived in time."""
        prepared = self.standby.get(index)
        if prepared is None or prepared.span != span:
            prepared = Prepared(self.ring, index, span, info, self.max_length)
            await prepared.open(self.host.p2p(self.model), len(texts), self.adapter)
        lengths = [len(text) - 1 for text in texts]
        deadline = time.monotonic() + min(seconds, await prepared.fill(texts, self.way))
        while time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
            if all(have >= n for have, n in zip(await prepared.look(), lengths)):
                break
        return {span: prepared.source}

    # ---------------------------------------------------------------- standby

    def keep_standbys(self) -> None:
        """Look after a second server for each stage until the ring is closed, in a thread of its own."""
        threading.Thread(target=self._keep_standbys, name="spec-standby", daemon=True).start()

    def _keep_standbys(self) -> None:
        not_before = [0.0] * len(self.ring.spans)
        while not self.ring.closed:
            time.sleep(STANDBY_S)
            for index in range(len(self.ring.spans) if self.ring.prefilled else 0):
                if self.ring.closed or index in self._started or time.monotonic() < not_before[index]:
                    continue
                try:
                    self._look_after(index)
                except Exception as e:
                    logger.debug(f"No standby for stage {index}: {e!r}")
                    self.standby.pop(index, None)
                    not_before[index] = time.monotonic() + STANDBY_PAUSE_S

    def _look_after(self, index: int) -> None:
        texts = self.texts()
        prepared = self.standby.get(index)
        if prepared is None:
            spans, infos = self._others(index, len(texts))
            if len(spans) != 1:
                raise NoRoute(f"no single server for stage {index}")
            prepared = Prepared(self.ring, index, spans[0], infos[spans[0].peer], self.max_length)
            opening = prepared.open(self.host.p2p(self.model), len(texts), self.adapter)
            self.host.run(opening, OPEN_TIMEOUT + 1)
            self.standby[index] = prepared
        held = self.host.run(prepared.look(), OPEN_TIMEOUT + 1)
        if not prepared.busy and any(len(text) - 1 - n >= STANDBY_TOKENS for text, n in zip(texts, held)):
            self.host.run(prepared.fill(texts, "auto" if self.way == "none" else self.way), OPEN_TIMEOUT)

    def replacement(self, peer: str | None) -> dict[Span, Source]:
        """What was held ready for the stages of a server that is gone."""
        return {
            prepared.span: prepared.source
            for index, prepared in self.standby.items()
            if self.ring.spans[index].peer == peer
        }
