"""A session at another server that is filled with what a stage of the ring holds, so that it can take the stage
over."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from collections.abc import Sequence
from typing import Any

from bloombee_spec.client.info import StageInfo
from bloombee_spec.client.kept import Source
from bloombee_spec.client.peers import known_bandwidth
from bloombee_spec.client.prefix import prefix_frames
from bloombee_spec.client.ring import Ring
from bloombee_spec.client.stage_link import RingError, StageLink, open_stage
from bloombee_spec.hosts.base import Span
from bloombee_spec.kv.chunks import KEY_BYTES
from bloombee_spec.kv.levels import Level
from bloombee_spec.plan.recovery import CHUNK, WAYS, Recovery
from bloombee_spec.wire.frames import ControlFrame, encode
from bloombee_spec.wire.messages import SESSION_BYTES, Close, Open
from bloombee_spec.wire.moving import MIN_RATE, Export, Import
from bloombee_spec.wire.steering import Ping, Pong
from bloombee_spec.wire.streams import StreamClosed, read_frame

OPEN_TIMEOUT = 10.0
GRACE_S, PATIENCE = 2.0, 3.0  # a transfer is given up after GRACE_S + PATIENCE times its estimate


class Prepared:
    """Event loop only. Its stream stays open until the ring is closed.

    :param span: blocks of stage `index`, or some of them, at the other server, of which `info` tells more
    :param worst: lossiest level at which KV may come
    """

    def __init__(
        self, ring: Ring, index: int, span: Span, info: StageInfo, max_length: int, worst: Level = Level.LOSSLESS
    ):
        self.span, self.index = span, index
        self._ring, self._info, self._max_length, self._worst = ring, info, max_length, worst
        self._session = secrets.token_bytes(SESSION_BYTES)
        self._first = span.start == ring.spans[index].start  # what the stage before it sends is for this span
        self._embeds = index == 0 and self._first and ring.embeds and info.embed
        self._link: StageLink | None = None
        self.held: tuple[int, ...] = ()
        self._talking = asyncio.Lock()  # one question at a time
        self._lossy: list[tuple[int, int, int]] = []  # lane, first position, end of KV ordered at a lossy level
        self._due: tuple[int, ...] = ()  # what was ordered, and when it should surely be there
        self._due_at = 0.0

    @property
    def busy(self) -> bool:
        """What was ordered is still on its way, as far as one can tell."""
        return self._lacks and time.monotonic() <= self._due_at

    @property
    def stuck(self) -> bool:
        """What was ordered did not come in time. It may still come, so that nothing else can be ordered."""
        return self._lacks and time.monotonic() > self._due_at

    @property
    def _lacks(self) -> bool:
        return any(have < due for have, due in zip(self.held, self._due))

    @property
    def inexact(self) -> int:
        """Tokens whose KV is there at a lossy level."""
        return sum(max(0, min(end, self.held[lane]) - start) for lane, start, end in self._lossy)

    @property
    def source(self) -> Source:
        return self._session, self.index

    async def open(self, p2p: Any, lanes: int, adapter: str | None) -> None:
        """:raises RingError: the server refuses
        :raises asyncio.TimeoutError: it does not answer
        """
        ring, index = self._ring, self.index
        request = Open(
            session=self._session, stage=index, stages=len(ring.spans), start=self.span.start, end=self.span.end,
            lanes=lanes, max_length=self._max_length, arena=ring.arena,
            previous=ring.spans[index - 1].peer if index else None, next=None, verifier=None, listeners=(),
            embed=self._embeds, verify=False, codec="raw", codec_in=ring.codecs.names[index], adapter=adapter,
            prepared=True, donor=ring.spans[index].peer,
        )  # fmt: skip
        self._link = await asyncio.wait_for(open_stage(p2p, request, self.span), OPEN_TIMEOUT)
        self.held = (0,) * lanes
        ring.prepared.append(self._link)
        if ring.closed:  # meanwhile: nobody else would close it
            await self.close()
            raise RingError("the ring is closed")

    async def close(self) -> None:
        """Give the session up."""
        if self._link is not None and self._link in self._ring.prepared:
            self._ring.prepared.remove(self._link)
            with contextlib.suppress(StreamClosed):
                self._link.box.put(ControlFrame(Close(False).to_wire()))
            await self._link.box.aclose(0.5)

    async def fill(
        self, texts: Sequence[Sequence[int]], way: str, deadline_s: float = math.inf, share: float = 1.0
    ) -> float:
        """Have it sent what it lacks of the texts' rows, all but the last one's.

        :param way: `rows`, `kv` or `auto`
        :param deadline_s: seconds until it should be there, for which the quality of KV may suffer as far as allowed
        :param share: of the link's bandwidth that the transfer may take
        :returns: seconds after which nothing more is to be hoped for
        """
        assert self._link is not None
        missing = [max(0, len(text) - 1 - n) for text, n in zip(texts, self.held)]
        recovery = self._recovery(sum(missing), share)
        rows_come = self._first and (self.index > 0 or self._embeds)  # else they would be the client's, or nobody's
        ways = [each for each in WAYS if way in (each, "auto") and (each == "kv" or rows_come)] or ["kv"]
        way, plan = recovery.choose(self._worst, deadline_s, tuple(ways))
        rate = (
            max(MIN_RATE, recovery.bandwidth_bps / sum(n > 0 for n in missing)) if share < 1 and any(missing) else 0.0
        )
        at = 0  # among the missing tokens of all lanes
        for lane, (text, start, n) in enumerate(zip(texts, self.held, missing)):
            if n == 0:
                continue
            if way == "kv":
                self._order_kv(lane, text, start, _runs(plan.levels, at, n), rate)
            elif self.index == 0:
                chunk = self._link.opened.max_prefill
                for frame in prefix_frames(lane, 0, text[: start + n], start, chunk, self._max_length):
                    self._link.box.put_bytes(encode(frame))
            else:
                order = Export("rows", self.span.peer, self._session, self.index, lane, start, start + n, rate=rate)
                self._ring.control(order, self.index - 1)
            at += n
        patience = GRACE_S + PATIENCE * plan.seconds
        self._due = tuple(n + more for n, more in zip(self.held, missing))
        self._due_at = time.monotonic() + patience
        return patience

    def _order_kv(
        self, lane: int, text: Sequence[int], start: int, runs: Sequence[tuple[Level, int]], rate: float
    ) -> None:
        """:param runs: level and number of tokens, from `start` on"""
        assert self._link is not None
        key, end = secrets.token_bytes(KEY_BYTES), start + sum(n for _, n in runs)
        lossy = any(not level.lossless for level, _ in runs)
        self._link.box.put(ControlFrame(Import(lane, start, tuple(text[start:end]), key, lossy).to_wire()))
        old = self._ring.spans[self.index]
        whole = (self.span.start, self.span.end) == (old.start, old.end)
        blocks = () if whole else (self.span.start, self.span.end)
        for level, n in runs:
            self._ring.control(
                Export(
                    "kv", self.span.peer, self._session, self.index, lane, start, start + n, key, int(level), blocks,
                    rate,
                ),
                self.index,
            )  # fmt: skip
            if not level.lossless:
                self._lossy.append((lane, start, start + n))
            start += n

    async def look(self) -> tuple[int, ...]:
        """By lane, the tokens that it holds now.

        :raises RingError: the server gave the session up
        """
        assert self._link is not None
        link = self._link
        async with self._talking:
            return await self._look(link)

    async def _look(self, link: StageLink) -> tuple[int, ...]:
        with contextlib.suppress(StreamClosed):
            link.box.put(ControlFrame(Ping().to_wire()))
            while isinstance(frame := await read_frame(link.reader, OPEN_TIMEOUT, link.received), ControlFrame):
                if frame.message.get("kind") == "Pong":
                    self.held = Pong.from_wire(frame.message).held
                    return self.held
                if frame.message.get("kind") == "Failure":
                    break
        raise RingError(f"{self.span.peer} gave the prepared session up", self.span.peer)

    def _recovery(self, tokens: int, share: float) -> Recovery:
        info, blocks = self._info, self.span.end - self.span.start
        rows = max(info.row_seconds) if info.row_seconds else 1
        row_s = blocks / max(1, info.end - info.start) * info.row_seconds.get(rows, 0.0) / rows
        bandwidth = known_bandwidth(info.peer) or self._ring.meter.bandwidth_into(self.index)
        return Recovery(
            tokens, info.row_bytes, blocks * info.kv_bytes, row_s, max(MIN_RATE, share * bandwidth),
            value_bytes=info.row_bytes // info.hidden,
        )  # fmt: skip


def _runs(levels: Sequence[Level], at: int, n: int) -> list[tuple[Level, int]]:
    """Levels of chunks, as runs `(level, tokens)` of the `n` tokens from number `at` on."""
    runs: list[tuple[Level, int]] = []
    for token in range(at, at + n):
        level = levels[token // CHUNK]
        if runs and runs[-1][0] == level:
            runs[-1] = (level, runs[-1][1] + 1)
        else:
            runs.append((level, 1))
    return runs
