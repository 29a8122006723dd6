"""What a stage remembers of its own output: the rows of committed tokens, from which a new next stage rebuilds its KV.

For a span of m layers such a row is `2·m·kv_heads/heads` times smaller than the KV that it regenerates. Rows are kept
in blocks: the last one raw, those that are full *sealed*, which is packed without loss, in the background.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from bloombee_spec.wire.activations import CodecError, CodecUnavailable, get_codec

logger = logging.getLogger(__name__)

ROWS = 64  # of a block. Shorter ones pack as well, and what is read or changed in part is unpacked whole
Job = Callable[[], None]


class LogBudget:
    """Shared by the logs of one server: bytes in memory, then bytes on disk, then none.

    :param memory_bytes: kept in memory; `disk_bytes` in unnamed temporary files
    :param later: runs the sealing of blocks, in any thread; by default in a background thread, one at a time
    """

    def __init__(self, memory_bytes: int, disk_bytes: int, later: Callable[[Job], None] | None = None):
        self._left = [memory_bytes, disk_bytes]
        self._lock = threading.Lock()
        self.later = later or _Background().run

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


class _Background:
    """Jobs one at a time, in order, in a thread that is there only while there are any."""

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()
        self._lock = threading.Lock()
        self._running = False

    def run(self, job: Job) -> None:
        with self._lock:
            self._jobs.append(job)
            if not self._running:
                threading.Thread(target=self._work, name="spec-log-sealer", daemon=True).start()
                self._running = True

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._running = False
                    return
                job = self._jobs.popleft()
            try:
                job()
            except Exception:
                logger.exception("A block of rows stays as it is")


@dataclass(eq=False, slots=True)
class _Block:
    """
    :param place: whose budget its `data.nbytes` are of
    :param data: `[rows, hidden]`, or, when sealed, `[bytes]`
    :param version: grows with each change of its rows, and when the block is dropped
    """

    place: int
    data: torch.Tensor
    sealed: bool = False
    version: int = 0


_NOTHING = torch.empty(0)  # of a dropped block, so that a job that still waits holds no memory


class BoundaryLog:
    """Rows of one lane for the positions `first .. end-1`. Writers and readers hold the session's lock; the log's own
    is for the sealing, which knows no session.

    :param max_length: positions that may come
    :param dtype: of the rows as they are computed, and kept
    """

    def __init__(self, hidden: int, max_length: int, dtype: torch.dtype, budget: LogBudget):
        self.first = self.end = 0
        self._hidden, self._max_length, self._dtype, self._budget = hidden, max_length, dtype, budget
        self._blocks: list[_Block] = []  # of ROWS positions each, from `first` on, which moves only when none are left
        self._lock = threading.Lock()
        self._closed = False

    @property
    def row_bytes(self) -> int:
        """Of one row as it is computed, and read."""
        return int(self._hidden * self._dtype.itemsize)

    def put(self, start: int, rows: torch.Tensor) -> None:
        """Rows of the positions from `start` on replace whatever is there; a gap makes older ones useless.

        :param rows: `[n, hidden]`
        :raises ValueError: beyond `max_length`
        """
        if start + len(rows) > self._max_length:
            raise ValueError(f"rows {start} to {start + len(rows)} for a log of {self._max_length}")
        rows = rows.to("cpu", self._dtype)
        with self._lock:
            if start > self.end or start < self.first:
                self._restart(start)
            self._cut(start)
            while len(rows):
                block = self._block_to_write()
                if block is None:  # no budget: nothing before this can be replayed in one piece
                    self._restart(self.end + len(rows))
                    return
                at = (self.end - self.first) % ROWS
                n = min(len(rows), len(block.data) - at)
                block.data[at : at + n] = rows[:n]
                block.version += 1
                self.end += n
                rows = rows[n:]
                if at + n == len(block.data):
                    self._budget.later(partial(self._seal, block, block.version))

    def skip(self, end: int) -> None:
        """The KV of positions below `end` came from elsewhere, without rows."""
        with self._lock:
            self._restart(end)

    def truncate(self, end: int) -> None:
        with self._lock:
            self._cut(end)

    def read(self, start: int, end: int) -> torch.Tensor:
        """A copy, `[end - start, hidden]`.

        :raises ValueError: not all of them are here
        """
        with self._lock:
            if not self.first <= start <= end <= self.end:
                raise ValueError(f"rows {start} to {end} are asked for, {self.first} to {self.end} are here")
            out, done = torch.empty(end - start, self._hidden, dtype=self._dtype), 0
            while done < len(out):
                index, at = divmod(start + done - self.first, ROWS)
                part = self._rows(index)[at : at + len(out) - done]
                out[done : done + len(part)] = part
                done += len(part)
            return out

    def close(self) -> None:
        """For good: a forward that still runs puts nothing here."""
        with self._lock:
            self._restart(self.end)
            self._closed = True

    # ---------------------------------------------------------------- blocks; the log's lock is held

    def _restart(self, position: int) -> None:
        self._cut(self.first)
        self.first = self.end = position

    def _cut(self, end: int) -> None:
        self.end = min(self.end, end)
        self.first = min(self.first, self.end)
        while len(self._blocks) > -(-(self.end - self.first) // ROWS):
            self._drop(self._blocks.pop())

    def _block_to_write(self) -> _Block | None:
        """The one of position `end`, unsealed; None when there is no budget for it."""
        index = (self.end - self.first) // ROWS
        sealed = self._blocks[index] if index < len(self._blocks) else None
        if sealed is not None and not sealed.sealed:
            return sealed
        block = self._new_block((self._length(index), self._hidden), self._dtype)
        if block is not None and sealed is not None:
            block.data.copy_(self._rows(index))
            self._blocks[index] = block
            self._drop(sealed)
        elif block is not None:
            self._blocks.append(block)
        return block

    def _new_block(self, shape: tuple[int, int], dtype: torch.dtype) -> _Block | None:
        size = shape[0] * self.row_bytes
        place = None if self._closed else self._budget.take(size)
        if place is None:
            return None
        try:
            return _Block(place, _allocate(shape, dtype, on_disk=place == 1))
        except (OSError, RuntimeError) as e:  # no file, no mapping: that is, no budget
            self._budget.give(place, size)
            logger.warning(f"Cannot keep {size} bytes of rows: {e}")
            return None

    def _rows(self, index: int) -> torch.Tensor:
        block = self._blocks[index]
        return _unpack(block.data, self._length(index), self._hidden, self._dtype) if block.sealed else block.data

    def _length(self, index: int) -> int:
        return min(ROWS, self._max_length - self.first - index * ROWS)

    def _drop(self, block: _Block) -> None:
        self._budget.give(block.place, block.data.nbytes)
        block.data = _NOTHING
        block.version += 1

    # ---------------------------------------------------------------- sealing, in the background

    def _seal(self, block: _Block, version: int) -> None:
        """Packs a block that became full as `version`; one that was changed or dropped since stays as it is."""
        with self._lock:
            if block.version != version:
                return
            rows = block.data
        packed = _pack(rows)  # without the lock, so that a forward never waits for it; rows may change meanwhile
        if packed is None:
            return
        data = _allocate((len(packed),), torch.uint8, on_disk=block.place == 1)
        data.copy_(torch.frombuffer(packed, dtype=torch.uint8))
        with self._lock:
            if block.version == version:
                block.data, block.sealed = data, True
                self._budget.give(block.place, rows.nbytes - data.nbytes)


def _pack(rows: torch.Tensor) -> bytearray | None:
    """The rows, exactly, in fewer bytes. None where there are none to gain, where the codec does not know the dtype
    (it knows bf16, fp16, fp32 and fp64), and where its library is not installed: such blocks stay raw.
    """
    try:
        packed = get_codec("lossless").encode(rows)
    except (CodecError, CodecUnavailable):
        return None
    return bytearray(packed) if len(packed) < rows.nbytes else None


def _unpack(packed: torch.Tensor, n: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    """Inverse of `_pack`: `[n, hidden]`."""
    return get_codec("lossless").decode(memoryview(packed.numpy()), n, hidden, dtype)


@torch.inference_mode(False)  # forwards write here, and commits between them
def _allocate(shape: tuple[int, ...], dtype: torch.dtype, *, on_disk: bool) -> torch.Tensor:
    if not on_disk:
        return torch.empty(shape, dtype=dtype)
    # The mapping keeps the file, without a name and, other than numpy's, without a descriptor: there are many blocks.
    with tempfile.NamedTemporaryFile() as file:
        size = torch.Size(shape).numel() * dtype.itemsize
        os.posix_fallocate(file.fileno(), 0, max(1, size))  # a full disk is an error here, not a signal later
        data = torch.from_file(file.name, shared=True, size=torch.Size(shape).numel(), dtype=dtype)
    return data.view(shape)
