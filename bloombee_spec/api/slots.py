"""How many requests are served at a time, and how many may wait; the others hear at once that it is too much."""

from __future__ import annotations

import asyncio

from bloombee_spec.api.errors import ApiError

RETRY_AFTER_S = 2


class Slots:
    """For one event loop.

    :param running: requests that generate at a time
    :param waiting: requests that wait for one of these to end
    """

    def __init__(self, running: int, waiting: int):
        if running < 1 or waiting < 0:
            raise ValueError(f"{running} running and {waiting} waiting requests: expected at least 1 and 0")
        self.running, self.waiting = running, waiting
        self._free = asyncio.Semaphore(running)
        self._queued = 0

    @property
    def queued(self) -> int:
        """Requests that wait now."""
        return self._queued

    async def acquire(self) -> None:
        """
        :raises ApiError: 429, when all slots and all places in the queue are taken
        """
        if self._free.locked() and self._queued >= self.waiting:
            raise ApiError(
                f"{self.running} requests are running and {self._queued} waiting, which is the limit; try again soon",
                status=429,
                code="too_many_requests",
                retry_after=RETRY_AFTER_S,
            )
        self._queued += 1
        try:
            await self._free.acquire()
        finally:
            self._queued -= 1

    def release(self) -> None:
        self._free.release()
