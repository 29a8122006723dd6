"""What a stage remembers of its own output: the rows of committed tokens, from which a new next stage rebuilds its KV.

For a span of m layers such a row is `2·m·kv_heads/heads` times smaller than the KV that it regenerates.
"""

from __future__ import annotations

import tempfile
import threading

import numpy as np
import torch

MIN_ROWS = 128


class LogBudget:
    """Shared by the logs of one server: bytes in memory, then bytes on disk, then none.

    :param memory_bytes: kept in memory; `disk_bytes` in unnamed temporary files
    """

    def __init__(self, memory_bytes: int, disk_bytes: int):
        self._left = [memory_bytes, disk_bytes]
        self._lock = threading.Lock()

    def take(self, n: int) -> int | None:
        """Where `n` bytes may go: 0 memory, 1 disk, None nowhere."""
        with self._lock:
            for place, left in enumerate(self._left):
                if n <= left:
                    self._left[place] -= n
                    return place
        return None

    def give(self, place: int, n: int) -> None:
        with self._lock:
            self._left[place] += n

    @property
    def left(self) -> tuple[int, int]:
        return self._left[0], self._left[1]


class BoundaryLog:
    """Rows of one lane for the positions `first .. end-1`. Writers and readers hold the session's lock.

    :param max_length: positions that may come
    :param dtype: of the rows as they are computed, and kept
    """

    def __init__(self, hidden: int, max_length: int, dtype: torch.dtype, budget: LogBudget):
        self.first = self.end = 0
        self._hidden, self._max_length, self._dtype, self._budget = hidden, max_length, dtype, budget
        self._rows: torch.Tensor | None = None  # [capacity, hidden]; row i is position first + i
        self._taken: tuple[int, int] | None = None

    def put(self, start: int, rows: torch.Tensor) -> None:
        """Rows of the positions from `start` on replace whatever is there; a gap makes older ones useless.

        :param rows: `[n, hidden]`
        """
        if start > self.end or start < self.first:
            self.first = self.end = start
        self.end = start
        if self._room(start + len(rows) - self.first):
            assert self._rows is not None
            self._rows[start - self.first : start - self.first + len(rows)] = rows.to("cpu", self._dtype)
            self.end = start + len(rows)
        else:  # no budget: nothing before this can be replayed in one piece
            self.first = self.end = start + len(rows)

    def skip(self, end: int) -> None:
        """The KV of positions below `end` came from elsewhere, without rows."""
        self.first = self.end = end

    def truncate(self, end: int) -> None:
        self.end = min(self.end, end)
        self.first = min(self.first, self.end)

    def read(self, start: int, end: int) -> torch.Tensor:
        """A copy, `[end - start, hidden]`.

        :raises ValueError: not all of them are here
        """
        if not self.first <= start <= end <= self.end or (self._rows is None and end > start):
            raise ValueError(f"rows {start} to {end} are asked for, {self.first} to {self.end} are here")
        if self._rows is None:
            return torch.empty(0, self._hidden, dtype=self._dtype)
        return self._rows[start - self.first : end - self.first].clone()

    def close(self) -> None:
        self._rows = None
        self.first = self.end
        if self._taken is not None:
            self._budget.give(*self._taken)
            self._taken = None

    def _room(self, n: int) -> bool:
        """Make room for `n` rows."""
        have = 0 if self._rows is None else len(self._rows)
        if n <= have:
            return True
        capacity = min(self._max_length, max(n, 2 * have, MIN_ROWS))
        size = capacity * self._hidden * self._dtype.itemsize
        place = self._budget.take(size)
        if place is None:
            return False
        fresh = _allocate(capacity, self._hidden, self._dtype, on_disk=place == 1)
        if self._rows is not None:
            fresh[:have] = self._rows
        if self._taken is not None:
            self._budget.give(*self._taken)
        self._rows, self._taken = fresh, (place, size)
        return True


@torch.inference_mode(False)  # forwards write here, and commits between them
def _allocate(rows: int, hidden: int, dtype: torch.dtype, *, on_disk: bool) -> torch.Tensor:
    if not on_disk:
        return torch.empty(rows, hidden, dtype=dtype)
    with tempfile.TemporaryFile() as file:  # the mapping keeps it; nothing is left behind when the process ends
        size = rows * hidden * dtype.itemsize
        file.truncate(size)
        return torch.from_numpy(np.memmap(file, np.uint8, "r+", shape=(size,))).view(dtype).view(rows, hidden)
