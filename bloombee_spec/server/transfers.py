"""KV on its way between two servers, ordered by the session's client: out of a session, and into a prepared one."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Awaitable, Callable
from typing import Any

import torch
from hivemind.utils.logging import get_logger

from bloombee_spec.kv.buffer import move_columns
from bloombee_spec.kv.chunk_stream import Received, SpanReceiver, TransferRefused, cut
from bloombee_spec.kv.chunks import Depth, chunk_tokens, encode_chunk, max_chunk_bytes
from bloombee_spec.kv.levels import EXACT_LEVELS, Level
from bloombee_spec.kv.span import SpanShape, export_columns
from bloombee_spec.server.pace import Pace
from bloombee_spec.server.replay import MAX_QUEUED, STUCK_S, send_rows
from bloombee_spec.server.session import StageSession
from bloombee_spec.wire.activations import CodecError
from bloombee_spec.wire.frames import MAX_FRAME_BYTES, FrameError
from bloombee_spec.wire.ledger import DATA, KV
from bloombee_spec.wire.moving import Export, Import
from bloombee_spec.wire.streams import Outbox, StreamClosed, read_frame_bytes

logger = get_logger(__name__)

LANE = struct.Struct("<H")
CHUNK_TIMEOUT = 60.0
ANNOUNCE_TIMEOUT = 10.0  # the client's announcement may come by a slower way than the first chunk
MAX_TRANSFERS, MAX_ALL_TRANSFERS = 64, 256  # of one session, and of the server, waiting or under way
MARGIN = 1 << 10  # of a frame, beside the chunk
CHUNK_S = 0.5  # at the pace of the transfer: what goes first does not wait longer for the link

OnBuffer = Callable[[StageSession, int, Callable[[torch.Tensor], Any]], Awaitable[Any]]
Dial = Callable[[Export, str], Awaitable[Outbox]]


class Transfers:
    """Of one server. Event loop only; buffers are touched by the runtime thread.

    :param on_buffer: runs a function of a lane's KV buffer between two forwards
    :param dial: opens a stream to the prepared session that an export names
    :param bits_per_s: for everything that goes out, together
    """

    def __init__(self, model_blocks: int, vocab: int, on_buffer: OnBuffer, dial: Dial, bits_per_s: float = 0.0):
        self._model_blocks, self._vocab = model_blocks, vocab
        self._on_buffer, self._dial = on_buffer, dial
        self._pace = Pace(bits_per_s)
        self._expected: dict[tuple[bytes, int], dict[int, asyncio.Future[tuple[Import, SpanReceiver]]]] = {}
        self._tasks: dict[asyncio.Task[None], StageSession] = {}

    @property
    def under_way(self) -> int:
        """Transfers to other servers."""
        return len(self._tasks)

    def ended(self, session: StageSession) -> None:
        """Nothing more goes to it or comes from it."""
        self._expected.pop(session.key, None)
        for task in [task for task, source in self._tasks.items() if source is session]:
            task.cancel()

    # ---------------------------------------------------------------- out

    def export(self, session: StageSession, order: Export) -> None:
        """Start it; it ends by itself.

        :raises FrameError: what is ordered is not here
        """
        lanes = session.lanes
        if order.lane >= len(lanes):
            raise FrameError(f"lane {order.lane} of a session with {len(lanes)}")
        lane = lanes[order.lane]
        with session.lock:
            if order.what == "kv":
                first, end = 0, lane.filled
            elif lane.log is not None:
                first, end = lane.log.first, min(lane.log.end, lane.filled)
            else:
                first = end = lane.filled
        if not first <= order.start < order.end <= end:
            raise FrameError(f"{order.what} of {order.start} to {order.end} are ordered, {first} to {end} are here")
        if order.blocks and not session.open.start <= order.blocks[0] < order.blocks[1] <= session.open.end:
            raise FrameError(f"blocks {order.blocks} are ordered of {session.open.start} to {session.open.end}")
        if sum(other is session for other in self._tasks.values()) >= MAX_TRANSFERS:
            raise FrameError(f"{MAX_TRANSFERS} transfers of this session are under way")
        if len(self._tasks) >= MAX_ALL_TRANSFERS:
            raise FrameError(f"{MAX_ALL_TRANSFERS} transfers are under way")
        task = asyncio.ensure_future(self._export(session, order))
        self._tasks[task] = session
        task.add_done_callback(self._tasks.pop)

    async def _export(self, session: StageSession, order: Export) -> None:
        try:
            box = await self._dial(order, DATA if order.what == "rows" else KV)
        except Exception as e:
            logger.info(f"Cannot reach {order.peer} for a transfer: {e!r}")
            return
        patience = 0.1
        try:
            if order.what == "rows":
                paces = (self._pace, Pace(order.rate))
                most = int(order.rate * CHUNK_S / 8) or None
                await send_rows(session, order.lane, order.start, order.end, box, paces, most)
            else:
                await self._send_kv(session, order, box)
            await box.room(0, STUCK_S)
            patience = STUCK_S
        except (StreamClosed, CodecError, ValueError, RuntimeError) as e:  # the last one: the session ended
            logger.info(f"A transfer to {order.peer} ended early: {e}")
        finally:
            await box.aclose(patience)

    async def _send_kv(self, session: StageSession, order: Export, box: Outbox) -> None:
        lane, loop = session.lanes[order.lane], asyncio.get_running_loop()
        arena, (first, end_block) = session.open.arena, order.blocks or (session.open.start, session.open.end)
        depth, paces = Depth(first, self._model_blocks), (self._pace, Pace(order.rate))
        part = slice(first - session.open.start, end_block - session.open.start)
        shape = await self._on_buffer(session, order.lane, lambda buffer: SpanShape.of(buffer[:, part]))
        level, tokens = _level_and_tokens(shape, order)
        for start, end in cut(order.start, order.end, tokens):

            def copy(buffer: torch.Tensor, start: int = start, end: int = end) -> torch.Tensor:
                with session.lock:
                    moves = lane.take_moves()
                move_columns(buffer, moves)
                return export_columns(buffer[:, part], arena, start, end)

            kv = await self._on_buffer(session, order.lane, copy)
            data = await loop.run_in_executor(None, encode_chunk, kv, start, level, depth, order.key)
            await box.room(MAX_QUEUED, STUCK_S)
            box.put_bytes(LANE.pack(order.lane) + data)
            for pace in paces:
                await pace.spend(len(data))

    # ---------------------------------------------------------------- in

    async def expect(self, session: StageSession, order: Import) -> None:
        """:raises FrameError: the session is not a prepared one, or holds another number of tokens"""
        if not session.open.prepared or session.open.donor is None or order.lane >= len(session.lanes):
            raise FrameError("KV comes to the lanes of prepared sessions only")
        lane, limit = session.lanes[order.lane], order.start + len(order.tokens)
        if order.start != lane.filled or limit > lane.max_length or max(order.tokens, default=0) >= self._vocab:
            raise FrameError(f"KV of {order.start} to {limit} is announced; {lane.filled} tokens are here")
        announced = asyncio.get_running_loop().create_future()
        self._expected.setdefault(session.key, {})[order.lane] = announced  # at once: the first chunk may be here soon
        try:
            shape = await self._on_buffer(session, order.lane, SpanShape.of)
        except BaseException:
            announced.cancel()
            raise
        levels = set(Level if order.lossy else EXACT_LEVELS) - {Level.RECOMPUTE}
        most = 64 + len(order.tokens)
        receiver = SpanReceiver(shape, order.key, start=order.start, limit=limit, levels=levels, max_chunks=most)
        announced.set_result((order, receiver))

    async def serve(self, session: StageSession, reader: asyncio.StreamReader) -> None:
        """As `receive`; what is refused ends the stream, and the session stays as it was."""
        try:
            await self.receive(session, reader)
        except (CodecError, FrameError, asyncio.TimeoutError) as e:
            logger.info(f"A transfer from {session.open.donor} is refused: {e!r}")

    async def receive(self, session: StageSession, reader: asyncio.StreamReader) -> None:
        """Chunks of the donor until its stream ends; a lane's KV is written once all of it is here.

        :raises TransferRefused: a chunk that is not what the client announced; nothing was written
        """
        loop = asyncio.get_running_loop()
        while True:
            try:
                data = memoryview(await read_frame_bytes(reader, CHUNK_TIMEOUT))
            except StreamClosed:
                return
            (lane,) = LANE.unpack_from(data) if len(data) > LANE.size else (-1,)
            order, receiver = await self._announced(session, lane)
            await loop.run_in_executor(None, receiver.accept, data[LANE.size :])
            expected = self._expected.get(session.key, {})
            if receiver.tokens == len(order.tokens) and expected.pop(lane, None) is not None:
                await self._write(session, order, receiver.finish(receiver.limit))

    async def _announced(self, session: StageSession, lane: int) -> tuple[Import, SpanReceiver]:
        """:raises TransferRefused: the client does not speak of that lane"""
        deadline = time.monotonic() + ANNOUNCE_TIMEOUT
        while lane not in self._expected.get(session.key, {}) and time.monotonic() < deadline:
            if not 0 <= lane < len(session.lanes) or session.dead:
                break
            await asyncio.sleep(0.02)
        announced = self._expected.get(session.key, {}).get(lane)
        if announced is None:
            raise TransferRefused(f"KV for lane {lane}, which the client did not announce")
        return await asyncio.wait_for(asyncio.shield(announced), CHUNK_TIMEOUT)

    async def _write(self, session: StageSession, order: Import, received: Received) -> None:
        lane = session.lanes[order.lane]

        def write(buffer: torch.Tensor) -> None:
            with session.lock:
                if lane.filled != order.start or session.dead:
                    return
                received.write(buffer, session.open.arena)
                lane.fill(order.start, order.tokens)

        await self._on_buffer(session, order.lane, write)


def _level_and_tokens(shape: SpanShape, order: Export) -> tuple[Level, int]:
    """Of the chunks, so that each fits into a frame. Very wide spans do not at a lossy level: they travel as they are.

    :raises CodecError: one token's KV is longer than a frame
    """
    limit, level = MAX_FRAME_BYTES - MARGIN, Level(order.level)
    if max_chunk_bytes(shape, 1, level) > limit:
        level = Level.LOSSLESS
    if order.rate:
        limit = min(limit, max(int(order.rate * CHUNK_S / 8), max_chunk_bytes(shape, 1, level)))
    return level, chunk_tokens(shape, limit, level)
