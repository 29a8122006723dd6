"""A server announces that it leaves: what it holds goes to another one while decoding goes on, then the ring moves.

Everything here is preparation. Whatever fails, the ring moves without it, and the new server gets the missing rows
from the stage before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hivemind.utils.logging import get_logger

from bloombee_spec.client.info import StageInfo
from bloombee_spec.client.kept import Source
from bloombee_spec.client.peers import known_bandwidth
from bloombee_spec.client.prefix import prefix_frames
from bloombee_spec.client.ring import Ring
from bloombee_spec.client.stage_link import RingError, RingMoved, StageLink, open_stage
from bloombee_spec.hosts.base import Host, NoRoute, Span
from bloombee_spec.kv.chunks import KEY_BYTES
from bloombee_spec.plan.recovery import Recovery
from bloombee_spec.wire.frames import ControlFrame, encode
from bloombee_spec.wire.messages import SESSION_BYTES, Open
from bloombee_spec.wire.moving import Export, Import
from bloombee_spec.wire.steering import Ping, Pong
from bloombee_spec.wire.streams import StreamClosed, read_frame

logger = get_logger(__name__)

POLL_S = 0.05
OPEN_TIMEOUT = 10.0
PATIENCE = 3.0  # times the estimate of a transfer, after which the ring moves without it
LEFT_S = 2.0  # beyond its last moment, for which a server that announced to leave is not routed over

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

    def __post_init__(self) -> None:
        self._started: set[int] = set()

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
        try:
            infos = {peer: info for peer, info in self.infos().items() if peer not in leaving(self.model)}
            texts = self.texts()
            spans = self.host.route(self.model, list(infos), len(texts) * self.max_length, old.start, old.end)
        except (NoRoute, TimeoutError) as e:
            logger.warning(f"{old.peer} leaves, and nobody else serves blocks {old.start}:{old.end}: {e}")
            return
        sources: dict[Span, Source] = {}
        if len(spans) == 1 and self.way != "none" and self.ring.prefilled:
            try:
                preparing = self._prepare(index, spans[0], infos[spans[0].peer], texts, 0.7 * seconds)
                sources = self.host.run(preparing, OPEN_TIMEOUT + seconds)
            except Exception as e:
                logger.info(f"The move from {old.peer} is not prepared: {e!r}")
        if not self.ring.closed:
            self.ring.events.put(RingMoved(old.peer, sources))

    async def _prepare(
        self, index: int, span: Span, info: StageInfo, texts: Sequence[tuple[int, ...]], seconds: float
    ) -> dict[Span, Source]:
        """Under which name the new server holds the texts, all but the last token."""
        ring, session = self.ring, secrets.token_bytes(SESSION_BYTES)
        lengths = [max(0, len(text) - 1) for text in texts]
        embed = index == 0 and ring.embeds and info.embed
        request = Open(
            session=session, stage=index, stages=len(ring.spans), start=span.start, end=span.end, lanes=len(texts),
            max_length=self.max_length, arena=ring.arena, previous=ring.spans[index - 1].peer if index else None,
            next=None, verifier=None, listeners=(), embed=embed, verify=False, codec="raw",
            codec_in=ring.codecs.names[index], adapter=self.adapter, prepared=True, donor=ring.spans[index].peer,
        )  # fmt: skip
        link = await asyncio.wait_for(open_stage(self.host.p2p(self.model), request, span), OPEN_TIMEOUT)
        ring.prepared.append(link)  # stays open until the ring is closed
        plan = self._plan(index, info, sum(lengths))
        way = self.way if self.way != "auto" else plan.best
        if way == "rows" and index == 0 and not embed:
            way = "kv"  # the rows would be the client's own embeddings
        for lane, (text, n) in enumerate(zip(texts, lengths)):
            if n == 0:
                continue
            if way == "kv":
                key = secrets.token_bytes(KEY_BYTES)
                link.box.put(ControlFrame(Import(lane, 0, text[:n], key).to_wire()))
                order = Export("kv", span.peer, session, index, lane, 0, n, key)
                ring.control(order, index)
            elif index == 0:
                for frame in prefix_frames(lane, 0, text[:n], 0, link.opened.max_prefill, self.max_length):
                    link.box.put_bytes(encode(frame))
            else:
                ring.control(Export("rows", span.peer, session, index, lane, 0, n), index - 1)
        deadline = time.monotonic() + min(seconds, 2.0 + PATIENCE * plan.seconds(way))
        while time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
            if all(have >= n for have, n in zip(await _held(link), lengths)):
                break
        return {span: (session, index)}  # whatever has arrived by now

    def _plan(self, index: int, info: StageInfo, tokens: int) -> Recovery:
        old, blocks = self.ring.infos[index], self.ring.spans[index].end - self.ring.spans[index].start
        rows = max(info.row_seconds) if info.row_seconds else 1
        share = blocks / max(1, info.end - info.start)
        row_s = share * info.row_seconds.get(rows, 0.0) / rows
        bandwidth = known_bandwidth(info.peer) or self.ring.meter.bandwidth_into(index)
        return Recovery(tokens, old.row_bytes, blocks * info.kv_bytes, row_s, bandwidth)


async def _held(link: StageLink) -> tuple[int, ...]:
    """:raises RingError: the new server gave up"""
    link.box.put(ControlFrame(Ping().to_wire()))
    with contextlib.suppress(StreamClosed):
        while isinstance(frame := await read_frame(link.reader, OPEN_TIMEOUT, link.received), ControlFrame):
            if frame.message.get("kind") == "Pong":
                return Pong.from_wire(frame.message).held
            if frame.message.get("kind") == "Failure":
                break
    raise RingError(f"{link.span.peer} gave the prepared session up", link.span.peer)
