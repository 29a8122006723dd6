"""What outlives a session that lost a neighbour: the KV of its lanes with their books, kept for a while so that the
client's next session can go on with it.
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bloombee_spec.lane import Lane
from bloombee_spec.lane_rows import RowLog
from bloombee_spec.wire.messages import DIGEST_BYTES, Open

NewLog = Callable[[], RowLog]


@dataclass(eq=False)
class Holding:
    """
    :param ticket: the allocator's, of all lanes together; `handles` one cache handle per lane
    :param size: bytes of KV
    :param lanes: books of each lane
    """

    ticket: int
    handles: tuple[int, ...]
    size: int
    lanes: list[Lane]

    @classmethod
    def fresh(
        cls, opened: Open, ticket: int, handles: tuple[int, ...], size: int, new_log: NewLog | None = None
    ) -> Holding:
        """:param new_log: makes the log of a lane's rows, for a stage that has a next one"""
        lanes = [
            Lane(
                arena=opened.arena, max_length=opened.max_length, inject=opened.embed,
                log=new_log() if new_log is not None else None,
            )
            for _ in range(opened.lanes)
        ]  # fmt: skip
        return cls(ticket, handles, size, lanes)

    def resumed(self, lengths: Sequence[int], inject: bool, new_log: NewLog | None) -> Holding:
        """The same KV for another session, with books that start at the first `lengths` tokens of each lane (fewer
        where fewer are computed). The old books stay as they are, for a forward that still runs."""
        lanes = [
            Lane.resumed(lane, length, inject=inject, log=_log_of(lane, length, new_log))
            for lane, length in zip(self.lanes, lengths)
        ]
        return Holding(self.ticket, self.handles, self.size, lanes)

    def close(self) -> None:
        """The logs go; the KV itself is freed by ticket."""
        for lane in self.lanes:
            if lane.log is not None:
                lane.log.close()


def _log_of(lane: Lane, length: int, new_log: NewLog | None) -> RowLog | None:
    """The old log, handed over; a stage that became the last one needs none, one that was the last has none."""
    log, lane.log = lane.log, None
    if new_log is None:
        if log is not None:
            log.close()
        return None
    if log is None:
        log = new_log()
        log.skip(min(length, lane.filled))
    return log


def digest(tokens: Sequence[int]) -> bytes:
    """Of a lane's tokens, so that client and stage know that they mean the same text."""
    return hashlib.blake2b(struct.pack(f"<{len(tokens)}I", *tokens), digest_size=DIGEST_BYTES).digest()


@dataclass(eq=False)
class _Parked:
    client: str
    opened: Open
    holding: Holding
    timer: asyncio.TimerHandle


class ParkingLot:
    """Holdings without a session. Event loop only.

    :param free: gives a holding's memory back
    """

    def __init__(self, timeout: float, free: Callable[[Holding], None]):
        self._timeout, self._free = timeout, free
        self._parked: OrderedDict[tuple[bytes, int], _Parked] = OrderedDict()  # oldest first

    def __len__(self) -> int:
        return len(self._parked)

    def park(self, opened: Open, client: str, holding: Holding) -> None:
        key = (opened.session, opened.stage)
        timer = asyncio.get_running_loop().call_later(self._timeout, self._expire, key)
        self._parked[key] = _Parked(client, opened, holding, timer)

    def take(self, opened: Open, client: str) -> Holding | None:
        """What `opened` asks to go on with; None if it is not here, not this client's, or of another shape."""
        if opened.resume is None:
            return None
        parked = self._parked.get((opened.resume, opened.resume_stage))
        if parked is None or parked.client != client or not _same_shape(parked.opened, opened):
            return None
        del self._parked[(opened.resume, opened.resume_stage)]
        parked.timer.cancel()
        return parked.holding

    def evict(self) -> int | None:
        """Free the oldest one and tell its bytes; None when there is none."""
        return self._expire(next(iter(self._parked))) if self._parked else None

    def _expire(self, key: tuple[bytes, int]) -> int:
        parked = self._parked.pop(key, None)
        if parked is None:
            return 0
        parked.timer.cancel()
        self._free(parked.holding)
        return parked.holding.size


def _same_shape(old: Open, new: Open) -> bool:
    return all(
        getattr(old, name) == getattr(new, name)
        for name in ("start", "end", "lanes", "max_length", "arena", "adapter")
    )
