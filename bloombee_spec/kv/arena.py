"""Columns of a lane's KV buffer: `[arena | prefix]`, one contiguous slice per attention call.

Keys have no order, so the arena of live candidates lies in front of the committed prefix and is filled from its right
end:
a step with few candidates attends to a short slice, a step with none attends to the prefix alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


class Arena:
    """Free list over columns `0 .. size-1`; the rightmost free column is handed out first."""

    def __init__(self, size: int):
        self.size = size
        self._free = [-column for column in range(size)]
        heapq.heapify(self._free)
        self._used: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> frozenset[int]:
        return frozenset(self._used)

    @property
    def leftmost(self) -> int:
        """First column in use; `size` when none is."""
        return min(self._used, default=self.size)

    def take(self) -> int:
        """:raises IndexError: no column is free"""
        column = -heapq.heappop(self._free)
        self._used.add(column)
        return column

    def reserve(self, columns: Sequence[int]) -> None:
        """Take these columns, all of which are free."""
        taken = set(columns)
        self._free = [column for column in self._free if -column not in taken]
        heapq.heapify(self._free)
        self._used |= taken

    def give(self, column: int) -> None:
        """:raises KeyError: the column is not in use (a bookkeeping fault, never the peer's)"""
        self._used.remove(column)
        heapq.heappush(self._free, -column)
