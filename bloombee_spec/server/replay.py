"""A stage sends the rows of an earlier session again, to a next stage that does not have their KV."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch

from bloombee_spec.server.pace import Pace
from bloombee_spec.server.session import StageSession
from bloombee_spec.wire.frames import encode
from bloombee_spec.wire.messages import Link
from bloombee_spec.wire.streams import Outbox

CHUNK_BYTES = 1 << 20  # of raw rows in one frame
MAX_QUEUED = 4 << 20  # bytes on their way; more are encoded as these leave
STUCK_S = 60.0


async def replay(session: StageSession, box: Outbox, link: Link) -> None:
    """Rows of each lane from `link.next_holds` up to `link.replay`, before anything else goes to the next stage.

    :raises StreamClosed: the next stage went away, or takes nothing for a minute
    """
    for index, (start, end) in enumerate(zip(link.next_holds, link.replay)):
        if end > start:
            await send_rows(session, index, start, end, box)


async def send_rows(
    session: StageSession, index: int, start: int, end: int, box: Outbox, paces: Sequence[Pace] = (),
    most: int | None = None,
) -> None:  # fmt: skip
    """
    :param most: bytes of raw rows in one frame, if fewer than usual
    :raises StreamClosed: as `replay`
    """
    size = min(CHUNK_BYTES, most or CHUNK_BYTES)
    loop, at = asyncio.get_running_loop(), start
    while not session.dead and (chunk := next_rows(session, index, at, end, size)) is not None:
        frame = await loop.run_in_executor(None, session.outgoing.refill_frame, index, at, *chunk)
        await box.room(MAX_QUEUED, STUCK_S)
        sent = box.put_bytes(encode(frame))
        at += len(chunk[0])
        for pace in paces:
            await pace.spend(sent)


def next_rows(
    session: StageSession, index: int, at: int, end: int, size: int = CHUNK_BYTES
) -> tuple[list[int], torch.Tensor] | None:
    """Tokens and logged rows from position `at` on, as many as fit into `size` bytes; None at `end`, or where the log
    ends (the text was edited meanwhile: what is behind that will come by itself)."""
    lane = session.lanes[index]
    with session.lock:
        if lane.log is None or not lane.log.first <= at < min(end, lane.log.end, lane.tree.length):
            return None
        most = max(1, min(session.max_prefill, size // lane.log.row_bytes))
        stop = min(end, lane.log.end, lane.tree.length, at + most)
        return lane.tree.committed[at:stop], lane.log.read(at, stop)
