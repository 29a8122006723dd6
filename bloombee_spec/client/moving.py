"""Other servers get ready to take a stage over: because its server leaves, or in case that it dies.

Everything here is preparation, beside decoding. Whatever fails, the ring goes on without it, and a new server gets
the missing rows from the stage before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hivemind.utils.logging import get_logger

from bloombee_spec.client.info import StageInfo
from bloombee_spec.client.kept import Ready
from bloombee_spec.client.prepared import OPEN_TIMEOUT, Prepared
from bloombee_spec.client.ring import Ring
from bloombee_spec.client.stage_link import RingError, RingMoved
from bloombee_spec.hosts.base import Host, NoRoute, Span
from bloombee_spec.kv.levels import Level

logger = get_logger(__name__)

POLL_S, LOOK_S = 0.05, 1.0  # how often a prepared session, or the swarm, is looked at
SHARE = 0.7  # of the time until a server leaves that preparing may take
LEFT_S = 2.0  # beyond its last moment, for which a server that announced to leave is not routed over
STANDBY_S, STANDBY_TOKENS = 0.5, 16  # how often standbys are looked after; from so many new tokens on they are filled
STANDBY_PAUSE_S = 5.0  # until one that failed is tried again
STANDBY_SHARE = 0.25  # of a link, so that the text goes first

Texts = Callable[[], list[tuple[int, ...]]]


def leaving(model: Any) -> set[str]:
    """Servers that announced to leave, and may not have left yet."""
    until: dict[str, float] = model.__dict__.setdefault("_spec_leaving", {})
    return {peer for peer, end in list(until.items()) if time.monotonic() < end}


@dataclass
class Mover:
    """
    :param infos: the plugin's servers now
    :param texts: by lane, the committed tokens now
    :param way: `auto`, `rows`, `kv`, or `none` to prepare nothing
    :param quality: worst level of KV, `exact` or the name of a lossy one
    """

    host: Host
    model: Any
    ring: Ring
    infos: Callable[[], dict[str, StageInfo]]
    texts: Texts
    max_length: int
    adapter: str | None
    way: str = "auto"
    quality: str = "exact"
    standby: dict[int, Prepared] = field(default_factory=dict)  # by stage

    def __post_init__(self) -> None:
        self._started: set[int] = set()
        self._preparing: dict[int, list[Prepared]] = {}  # by stage, in place of its server that leaves
        self._worst = Level.LOSSLESS if self.quality == "exact" else Level[self.quality.upper()]

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
        left = end - time.monotonic()
        if self.way != "none" and self.ring.prefilled and left > 0:
            try:
                self.host.run(self._prepare(index, spans, infos, texts, left), left + 1)
            except Exception as e:
                logger.info(f"The move from {old.peer} is not prepared: {e!r}")
        if not self.ring.closed:
            self.ring.events.put(RingMoved(old.peer, self.replacement(old.peer)))

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
        self, index: int, spans: Sequence[Span], infos: Mapping[str, StageInfo], texts: Sequence[tuple[int, ...]],
        seconds: float,
    ) -> None:  # fmt: skip
        """Give the servers that share the stage's blocks from now on the texts, as far as they arrive in time."""
        deadline = time.monotonic() + seconds
        found = await asyncio.gather(
            *[
                asyncio.wait_for(self._prepare_one(index, span, infos[span.peer], texts, deadline), seconds)
                for span in spans
            ],
            return_exceptions=True,
        )
        for result in found:
            if isinstance(result, BaseException):
                logger.info(f"Part of the move is not prepared: {result!r}")

    async def _prepare_one(
        self, index: int, span: Span, info: StageInfo, texts: Sequence[tuple[int, ...]], deadline: float
    ) -> None:
        lengths = [len(text) - 1 for text in texts]
        prepared = self.standby.get(index)
        if prepared is None or prepared.span != span or prepared.stuck:
            prepared = self._new(index, span, info)
            await prepared.open(self.host.p2p(self.model), len(texts), self.adapter)
        self._preparing.setdefault(index, []).append(prepared)  # whatever it holds is of use
        ordered = False
        while any(have < n for have, n in zip(await prepared.look(), lengths)) and time.monotonic() < deadline:
            if not prepared.busy:
                if ordered or prepared.stuck:
                    return
                await prepared.fill(texts, self.way, deadline - time.monotonic())
                ordered = True
            await asyncio.sleep(POLL_S)

    def _new(self, index: int, span: Span, info: StageInfo) -> Prepared:
        return Prepared(self.ring, index, span, info, self.max_length, self._worst)

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
                    self._give_up(index)
                    not_before[index] = time.monotonic() + STANDBY_PAUSE_S

    def _look_after(self, index: int) -> None:
        texts = self.texts()
        prepared = self.standby.get(index)
        if prepared is None:
            spans, infos = self._others(index, len(texts))
            if len(spans) != 1:
                raise NoRoute(f"no single server for stage {index}")
            prepared = self._new(index, spans[0], infos[spans[0].peer])
            opening = prepared.open(self.host.p2p(self.model), len(texts), self.adapter)
            self.host.run(opening, OPEN_TIMEOUT + 1)
            self.standby[index] = prepared
        held = self.host.run(prepared.look(), OPEN_TIMEOUT + 1)
        if prepared.stuck:
            raise RingError(f"what {prepared.span.peer} was to be given did not come")
        if not prepared.busy and any(len(text) - 1 - n >= STANDBY_TOKENS for text, n in zip(texts, held)):
            way = "auto" if self.way == "none" else self.way
            self.host.run(prepared.fill(texts, way, share=STANDBY_SHARE), OPEN_TIMEOUT)

    def _give_up(self, index: int) -> None:
        prepared = self.standby.pop(index, None)
        if prepared is not None and index not in self._started:
            with contextlib.suppress(Exception):
                self.host.run(prepared.close(), OPEN_TIMEOUT)

    def replacement(self, peer: str | None) -> Ready:
        """What other servers hold ready for the stages of one that is gone, or leaves."""
        ready = Ready()
        for index, span in enumerate(self.ring.spans):
            if span.peer == peer:
                standby = self.standby.get(index)
                prepared = [*self._preparing.get(index, ())] or ([] if standby is None else [standby])
                ready.sources.update({each.span: each.source for each in prepared})
                ready.inexact += max((each.inexact for each in prepared), default=0)
        return ready
