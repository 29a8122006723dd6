"""The client's stream to one stage of a ring."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from hivemind.p2p import PeerID

from bloombee_spec.client.kept import Ready
from bloombee_spec.hosts.base import Span
from bloombee_spec.server.dialer import STREAM_PROTOCOL, WRITE_TIMEOUT
from bloombee_spec.wire.frames import ControlFrame, FrameError
from bloombee_spec.wire.ledger import Traffic
from bloombee_spec.wire.messages import Open, Opened
from bloombee_spec.wire.steering import Failure, Statistics
from bloombee_spec.wire.streams import Outbox, read_frame

MAX_OUTBOX = 64 << 20


class RingError(RuntimeError):
    """The session broke. `peer` is the server to blame (None: unknown); `retriable` is false when another route cannot
    help."""

    def __init__(self, message: str, peer: str | None = None, retriable: bool = True):
        super().__init__(message)
        self.peer, self.retriable = peer, retriable


class RingMoved(RingError):
    """A server leaves and the ring can go on elsewhere; nobody is to blame.

    :param peer: who leaves; `ready` what other servers were prepared with
    """

    def __init__(self, peer: str, ready: Ready):
        super().__init__(f"{peer} leaves", peer)
        self.ready = ready


@dataclass(eq=False)
class StageLink:
    """The client's stream to one stage, and what came of it."""

    span: Span
    reader: asyncio.StreamReader
    box: Outbox
    opened: Opened
    task: asyncio.Task[None] | None = None
    linking_since: float = 0.0
    answered: bool = True  # the last ping
    received: Traffic = field(default_factory=Traffic)
    statistics: Statistics | None = None


async def open_stage(p2p: Any, request: Open, span: Span) -> StageLink:
    """:raises RingError: the server refuses, or grants less than it is asked for"""
    _, reader, writer = await p2p.call_binary_stream_handler(PeerID.from_base58(span.peer), STREAM_PROTOCOL)
    box = Outbox(writer, max_bytes=MAX_OUTBOX, timeout=WRITE_TIMEOUT)
    try:
        box.put(ControlFrame(request.to_wire()))
        answer = await read_frame(reader, None, received := Traffic())
        if not isinstance(answer, ControlFrame):
            raise FrameError("the answer to an open request is a control message")
        if answer.message.get("kind") == "Failure":
            reason = Failure.from_wire(answer.message).reason
            raise RingError(f"server {span.peer} refuses the session: {reason}", span.peer)
        granted = Opened.from_wire(answer.message)
        if granted.arena < request.arena:
            raise RingError(f"server {span.peer} grants {granted.arena} credits of {request.arena}", span.peer)
        return StageLink(span, reader, box, granted, received=received)
    except BaseException:
        await box.aclose(0.1)
        raise
