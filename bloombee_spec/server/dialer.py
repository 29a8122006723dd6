"""Streams that a stage opens: to its neighbours in a ring, and to prepared sessions."""

from __future__ import annotations

import asyncio
import contextlib
import time

from hivemind.p2p import P2P, PeerID

from bloombee_spec.server.session import StageSession
from bloombee_spec.wire.frames import ControlFrame, FrameError
from bloombee_spec.wire.ledger import DATA, Traffic
from bloombee_spec.wire.messages import Hello
from bloombee_spec.wire.moving import Export
from bloombee_spec.wire.streams import Outbox, StreamClosed, framed, read_frame

STREAM_PROTOCOL = "bloombee_spec.stream.1"
HELLO_TIMEOUT = 30.0
WRITE_TIMEOUT = 60.0


class Dialer:
    """Event loop only; `p2p` is there once the service is attached.

    :param max_outbox: bytes queued towards one peer
    """

    def __init__(self, max_outbox: int):
        self.p2p: P2P | None = None
        self._max_outbox = max_outbox

    async def to_stage(self, session: StageSession, peer: str, stage: int, role: str) -> Outbox | None:
        """None once the session failed, because that stage cannot be reached."""
        traffic = session.ledger.of(role, stage, outgoing=True)
        try:
            reader, writer = await self._greet(peer, Hello(session.open.session, stage, role), traffic)
        except Exception as e:
            session.fail(f"stage {session.open.stage} cannot reach stage {stage} at {peer}: {e!r}", stage)
            return None
        data = role == DATA
        box = Outbox(
            writer, max_bytes=self._max_outbox, timeout=WRITE_TIMEOUT, stamped=data, warm=data, traffic=traffic
        )
        watch = asyncio.ensure_future(_watch(reader, session, role, stage))
        box.task.add_done_callback(lambda _: watch.cancel())
        return box

    async def to_prepared(self, order: Export, role: str) -> Outbox:
        """To the prepared session that an export names.

        :raises Exception: it cannot be reached
        """
        reader, writer = await self._greet(order.peer, Hello(order.session, order.stage, role), Traffic())
        try:
            await read_frame(reader, HELLO_TIMEOUT, Traffic())  # it expects us
        except BaseException:
            writer.close()
            raise
        return Outbox(writer, max_bytes=self._max_outbox, timeout=WRITE_TIMEOUT, stamped=role == DATA)

    async def _greet(
        self, peer: str, hello: Hello, traffic: Traffic
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """:param traffic: counts the greeting"""
        assert self.p2p is not None
        _, reader, writer = await asyncio.wait_for(
            self.p2p.call_binary_stream_handler(PeerID.from_base58(peer), STREAM_PROTOCOL), HELLO_TIMEOUT
        )
        writer.write(framed(ControlFrame(hello.to_wire()), traffic))
        return reader, writer


async def _watch(reader: asyncio.StreamReader, session: StageSession, role: str, stage: int) -> None:
    """The neighbour greets back, which times the round trip, and is silent from then on: an end means that it is
    gone."""
    began = time.monotonic()
    with contextlib.suppress(StreamClosed, FrameError, asyncio.TimeoutError, ConnectionError, OSError):
        traffic = session.ledger.of(role, stage, outgoing=False)
        if isinstance(await read_frame(reader, HELLO_TIMEOUT, traffic), ControlFrame):
            session.greeted(stage, time.monotonic() - began)
            await reader.read(1)
    session.lost(stage, f"stage {session.open.stage} lost stage {stage}")
