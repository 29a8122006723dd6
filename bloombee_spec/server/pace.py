"""A limit to how fast something is sent, so that it shares a link with what is waited for."""

from __future__ import annotations

import asyncio


class Pace:
    """Event loop only; several senders may share one.

    :param bits_per_s: 0: no limit
    """

    def __init__(self, bits_per_s: float):
        self._bits_per_s = bits_per_s
        self._free_at = 0.0

    async def spend(self, n_bytes: int) -> None:
        """After these bytes were sent: wait until more may be."""
        if self._bits_per_s:
            now = asyncio.get_running_loop().time()
            self._free_at = max(now, self._free_at) + 8.0 * n_bytes / self._bits_per_s
            await asyncio.sleep(self._free_at - now)
