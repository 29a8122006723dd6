"""The RPC surface of a stage, beside the host's own handlers: `rpc_spec_info`, and one framed stream per neighbour.

Streams are opened through libp2p, so the other side's peer id is authenticated. The first frame says what a stream is:
`Open` (a client's control stream, which owns the session: when it ends, the session ends) or `Hello` (activations from
the predecessor, commits from the verifier, KV from a donor).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import msgpack
from hivemind.p2p import P2P, P2PContext, ServicerBase
from hivemind.proto import runtime_pb2
from hivemind.utils.logging import get_logger

from bloombee_spec.plan.compute import ComputeProfile
from bloombee_spec.server.allocator import AllocationRefused
from bloombee_spec.server.dialer import HELLO_TIMEOUT, STREAM_PROTOCOL, WRITE_TIMEOUT, Dialer
from bloombee_spec.server.replay import replay
from bloombee_spec.server.session import StageSession
from bloombee_spec.server.transfers import Dial, Transfers
from bloombee_spec.wire.frames import ControlFrame, FrameError, decode
from bloombee_spec.wire.ledger import CLIENT, CLIENT_END, COMMIT, DATA, KV, Traffic
from bloombee_spec.wire.messages import Close, Hello, Link, Linked, Open, Opened
from bloombee_spec.wire.moving import Export, Import
from bloombee_spec.wire.steering import Failure, Ping, Pong, Rule, UseCodec
from bloombee_spec.wire.streams import (
    Outbox,
    StreamClosed,
    framed,
    read_frame,
    read_frame_bytes,
    read_stamped_bytes,
)

logger = get_logger(__name__)

OpenSession = Callable[[Open, str, Outbox], Any]


class SpecService(ServicerBase):
    """
    :param info: answers `rpc_spec_info`, a msgpack-able mapping
    :param open_session: coroutine function `(Open, client peer id, outbox) -> StageSession`; raises AllocationRefused
        or FrameError
    :param retire: called once when a session ended
    :param new_transfers: makes the server's `Transfers`, given how it reaches other servers
    :param wake: asks the stage to look at its sessions; `compute` what its forwards take, as measured
    """

    def __init__(
        self,
        *,
        info: Callable[[], dict[str, Any]],
        open_session: OpenSession,
        retire: Callable[[StageSession], None],
        wake: Callable[[], None],
        compute: Callable[[], ComputeProfile | None],
        sessions: dict[tuple[bytes, int], StageSession],
        new_transfers: Callable[[Dial], Transfers],
        idle_timeout: float,
        max_outbox: int,
    ):
        self._info, self._open_session, self._retire, self._wake = info, open_session, retire, wake
        self._compute = compute
        self._sessions, self._idle_timeout, self._max_outbox = sessions, idle_timeout, max_outbox
        self._linking: set[asyncio.Future[None]] = set()  # tasks need somebody who remembers them
        self._dialer = Dialer(max_outbox)
        self._transfers = new_transfers(self._dialer.to_prepared)

    async def attach(self, p2p: P2P) -> None:
        self._dialer.p2p = p2p
        await self.add_p2p_handlers(p2p)
        await p2p.add_binary_stream_handler(STREAM_PROTOCOL, self._on_stream)

    async def rpc_spec_info(self, request: runtime_pb2.ExpertUID, context: P2PContext) -> runtime_pb2.ExpertInfo:
        """Protocol version, blocks, heads, limits and measured compute time of this server."""
        return runtime_pb2.ExpertInfo(serialized_info=msgpack.packb(self._info()))

    # ---------------------------------------------------------------- streams

    async def _on_stream(self, stream: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = stream.peer_id.to_base58()
        try:
            first = await read_frame(reader, HELLO_TIMEOUT, traffic := Traffic())
            if not isinstance(first, ControlFrame):
                raise FrameError("a stream starts with a control message")
            if first.message.get("kind") == "Open":
                await self._serve_client(Open.from_wire(first.message), peer, reader, writer, traffic)
            else:
                await self._serve_peer(Hello.from_wire(first.message), peer, reader, writer, traffic)
        except (FrameError, StreamClosed, asyncio.TimeoutError) as e:
            logger.debug(f"Stream of {peer} ended: {e!r}")
        except Exception:
            logger.warning(f"Stream of {peer} failed", exc_info=True)
        finally:
            with contextlib.suppress(Exception):
                writer.close()

    async def _serve_client(
        self, opened: Open, peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, traffic: Traffic
    ) -> None:
        box = Outbox(writer, max_bytes=self._max_outbox, timeout=WRITE_TIMEOUT)
        session: StageSession | None = None
        try:
            try:
                session = await self._open_session(opened, peer, box)
            except (AllocationRefused, FrameError) as e:
                box.put(ControlFrame(Failure(str(e)).to_wire()))
                return
            assert session is not None
            session.ledger.keep(CLIENT, CLIENT_END, traffic, outgoing=False)
            session.ledger.keep(CLIENT, CLIENT_END, box.traffic, outgoing=True)
            held = session.held() if opened.resume is not None else ()
            box.put(ControlFrame(Opened(session.open.arena, session.max_prefill, *held).to_wire()))
            reading = asyncio.ensure_future(self._read_client(session, reader))
            closing = asyncio.ensure_future(session.closed.wait())
            try:
                await asyncio.wait({reading, closing}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                reading.cancel()
                closing.cancel()
                await asyncio.gather(reading, closing, return_exceptions=True)
        finally:
            if session is not None:
                self._transfers.ended(session)
                self._retire(session)
                for link in session.outgoing.links:
                    await link.aclose(0.5)
            await box.aclose()

    async def _read_client(self, session: StageSession, reader: asyncio.StreamReader) -> None:
        traffic = session.ledger.of(CLIENT, CLIENT_END, outgoing=False)
        try:
            while True:
                data = await read_frame_bytes(reader, self._idle_timeout)
                frame = decode(data)
                traffic.received(frame, len(data))
                if not isinstance(frame, ControlFrame):
                    session.accept(frame, CLIENT, len(data))
                    self._wake()
                    session.report(self._compute())
                elif frame.message.get("kind") == "Close":
                    session.keep = Close.from_wire(frame.message).keep
                    session.client_box.put(ControlFrame(session.statistics().to_wire()))
                    session.end()
                    return
                else:
                    await self._control(session, frame.message)
        except StreamClosed:
            session.keep = False  # the client is gone; whatever neighbours it lost, it lost because of that
            session.end()
        except asyncio.TimeoutError:
            session.fail(f"no frame from the client for {self._idle_timeout:.0f} s")
        except FrameError as e:
            session.fail(str(e))
        except Exception as e:
            logger.warning("Session failed", exc_info=True)
            session.fail(f"stage failed: {e!r}")

    async def _control(self, session: StageSession, message: dict[str, Any]) -> None:
        """:raises FrameError: an unknown message, or one that makes no sense here"""
        kind = message.get("kind")
        if kind == "Rule":
            session.set_rule(Rule.from_wire(message))
            self._wake()
        elif kind == "UseCodec":
            session.use_codec(UseCodec.from_wire(message).codec)
        elif kind == "Link":
            link = Link.from_wire(message)
            session.check_link(link)
            session.client_box.put(ControlFrame(Linked().to_wire()))  # at once: it times the round trip
            self._linking.add(linking := asyncio.ensure_future(self._link(session, link)))
            linking.add_done_callback(self._linking.discard)
        elif kind == "Ping":
            Ping.from_wire(message)
            held = session.filled if session.open.prepared else ()
            session.client_box.put(ControlFrame(Pong(held).to_wire()))
        elif kind == "Export":
            try:
                self._transfers.export(session, Export.from_wire(message))
            except FrameError as e:  # the client sees that nothing arrives, and the session goes on
                logger.info(f"A transfer is not possible: {e}")
        else:
            await self._transfers.expect(session, Import.from_wire(message))

    async def _link(self, session: StageSession, link: Link) -> None:
        """Open this stage's outgoing streams: activations to the next stage, commits to all listeners."""
        opened = session.open
        wanted = [(peer, stage, COMMIT) for stage, peer in enumerate(opened.listeners)]
        if opened.next is not None:
            wanted.append((opened.next, opened.stage + 1, DATA))
        dialled = await asyncio.gather(*[self._dialer.to_stage(session, *target) for target in wanted])
        boxes = [box for box in dialled if box is not None]
        if session.dead:  # meanwhile; dialling is not cancelled, since uvloop crashes when a connect is
            for box in boxes:
                await box.aclose(0.5)
        elif len(boxes) == len(wanted):
            next_box = boxes.pop() if opened.next is not None else None
            if next_box is not None:
                try:
                    await replay(session, next_box, link)
                except StreamClosed as e:
                    session.lost(opened.stage + 1, f"stage {opened.stage} cannot replay rows: {e}")
            session.outgoing.link(next_box, boxes)

    async def _serve_peer(
        self, hello: Hello, peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, traffic: Traffic
    ) -> None:
        session = self._sessions.get((hello.session, hello.stage))
        opened = None if session is None else session.open
        announced = {} if opened is None else {DATA: opened.previous, COMMIT: opened.verifier, KV: opened.donor}
        if session is None or announced[hello.role] != peer:
            raise FrameError(f"{peer} is not the announced sender of {hello.role} in this session")
        sender = session.open.stage - 1 if hello.role == DATA else session.open.stages - 1
        answered = Traffic()
        if hello.role != KV:  # the ledger is of the ring's own streams
            session.ledger.keep(hello.role, sender, traffic, outgoing=False)
            answered = session.ledger.of(hello.role, sender, outgoing=True)
        writer.write(framed(ControlFrame(Linked().to_wire()), answered))  # times the round trip
        closing = asyncio.ensure_future(session.closed.wait())
        if hello.role == KV:
            reading = asyncio.ensure_future(self._transfers.serve(session, reader))
        else:
            reading = asyncio.ensure_future(self._read_peer(session, hello.role, sender, reader))
        try:
            await asyncio.wait({reading, closing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            reading.cancel()
            closing.cancel()
            await asyncio.gather(reading, closing, return_exceptions=True)

    async def _read_peer(self, session: StageSession, role: str, sender: int, reader: asyncio.StreamReader) -> None:
        traffic = session.ledger.of(role, sender, outgoing=False)
        try:
            while True:
                if role == DATA:  # no timeout: the client's stream is what times a session out
                    stamp, data = await read_stamped_bytes(reader)
                    session.meter.frame_arrived(stamp, len(data))
                else:
                    data = await read_frame_bytes(reader, None)
                frame = decode(data)
                traffic.received(frame, len(data), stamped=role == DATA)
                session.accept(frame, role, len(data))
                self._wake()
                session.report(self._compute())
        except StreamClosed:
            if not session.open.prepared:  # there, whoever sent rows has simply sent them all
                session.lost(sender, f"stage {session.open.stage} lost stage {sender}")
        except FrameError as e:
            session.fail(f"stage {session.open.stage}: {e}")
