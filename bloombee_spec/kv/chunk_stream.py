"""A transfer of a span's KV, chunk by chunk: the sender's cut, and the receiver's transaction.

The receiver stages chunks outside the session's buffer, in whatever order they come, and hands over once all of them
are there. A session's KV is either as it was or complete, never half written.
"""

from __future__ import annotations

import bisect
import enum
import itertools
import threading
from collections.abc import Collection
from dataclasses import dataclass

import torch

from bloombee_spec.kv.chunks import MAX_CHUNK_TOKENS, Chunk, decode_chunk, read_header
from bloombee_spec.kv.levels import EXACT_LEVELS, Level
from bloombee_spec.kv.span import SpanShape, import_columns
from bloombee_spec.wire.activations import CodecError

MAX_REFUSALS = 8  # of one transfer; then it is broken, so that nobody makes a receiver check rubbish for ever


class TransferRefused(CodecError):
    """A chunk, or the transfer as a whole, is not acceptable; the session's KV was not touched."""


class TransferState(enum.Enum):
    OPEN = "open"
    BROKEN = "broken"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, eq=False)
class Received:
    """A complete transfer of the tokens `start .. end-1`.

    :param chunks: in order of position, without gap or overlap
    """

    shape: SpanShape
    start: int
    end: int
    chunks: tuple[Chunk, ...]

    @property
    def lossless(self) -> bool:
        return all(chunk.level.lossless for chunk in self.chunks)

    @property
    def recompute(self) -> tuple[Chunk, ...]:
        """What must be recomputed before the KV is whole."""
        return tuple(chunk for chunk in self.chunks if chunk.kv is None)

    def write(self, buffer: torch.Tensor, arena: int) -> None:
        """Writes everything that travelled as KV into a lane's buffer; the columns of `recompute` stay as they are.

        :raises CodecError: the buffer has another shape or dtype, or too few columns; nothing is written
        """
        if self.shape != SpanShape.of(buffer) or self.end > buffer.shape[3] - arena:
            raise CodecError(f"{self.end} tokens of {self.shape} do not fit a buffer of {list(buffer.shape)}")
        for chunk in self.chunks:
            if chunk.kv is not None:
                import_columns(buffer, arena, chunk.start, chunk.kv)


def cut(start: int, end: int, tokens: int = MAX_CHUNK_TOKENS) -> list[tuple[int, int]]:
    """The tokens `start .. end-1` as chunks `(start, end)`, cut at multiples of `tokens`.

    :raises ValueError: a negative length, or chunks that are too long
    """
    if not 0 <= start <= end or not 1 <= tokens <= MAX_CHUNK_TOKENS:
        raise ValueError(f"cannot cut {start} .. {end} into chunks of {tokens} tokens")
    borders = [start, *range(start - start % tokens + tokens, end, tokens), end]
    return list(itertools.pairwise(borders)) if end > start else []


class SpanReceiver:
    """Collects the chunks of one transfer. Holds at most the KV of `limit - start` tokens.

    :param key: of this transfer, which only the session's client and the two servers know
    :param start: position of the first token to come
    :param limit: one past the last position that may come: what the session has room for
    :param levels: acceptable levels; exact ones only by default, for a lossy level never satisfies an exact session
    :param vocab: token ids are below this
    """

    def __init__(
        self,
        shape: SpanShape,
        key: bytes,
        *,
        start: int = 0,
        limit: int,
        levels: Collection[Level] = EXACT_LEVELS,
        vocab: int = 1 << 32,
        max_chunks: int | None = None,
    ):
        if not 0 <= start <= limit:
            raise ValueError(f"a transfer of positions {start} to {limit}")
        self.shape, self.start, self.limit = shape, start, limit
        self.state = TransferState.OPEN
        self.received_bytes = self.refused = 0
        # Short chunks are allowed (the tail of a text that still grows), but not a flood of them.
        self.max_chunks = 2 * -(-(limit - start) // MAX_CHUNK_TOKENS) + 64 if max_chunks is None else max_chunks
        self._key, self._levels, self._vocab = key, frozenset(levels), vocab
        self._chunks: list[Chunk] = []  # sorted by position
        self._lock = threading.Lock()  # chunks may come by several streams
        self.tokens = 0  # whose chunk is here

    def missing(self, end: int) -> list[tuple[int, int]]:
        """The gaps `(start, end)` in `start .. end-1`."""
        gaps, at = [], self.start
        for chunk in self._chunks:
            if chunk.start > at:
                gaps.append((at, min(chunk.start, end)))
            at = chunk.end
        if at < end:
            gaps.append((at, end))
        return [(low, high) for low, high in gaps if low < high]

    def accept(self, data: bytes | memoryview) -> Chunk:
        """Checks and stages one chunk, from any thread; the state is as before if it is refused.

        :raises TransferRefused: damaged, of another transfer, shape or level, out of bounds, or there already; or this
            transfer is over
        """
        with self._lock:
            return self._accept(data)

    def _accept(self, data: bytes | memoryview) -> Chunk:
        if self.state is not TransferState.OPEN:
            raise TransferRefused(f"the transfer is {self.state.value}: no further chunk is taken")
        try:
            chunk, place = self._checked(data)
        except CodecError as error:
            self.refused += 1
            if self.refused >= MAX_REFUSALS:
                self.abandon()
            raise TransferRefused(f"refused a chunk of a KV transfer: {error}") from error
        self._chunks.insert(place, chunk)
        self.tokens += chunk.tokens
        self.received_bytes += len(data)
        return chunk

    def finish(self, end: int) -> Received:
        """Ends the transfer, which must cover `start .. end-1` exactly; `end` is what the session's client says.

        :raises TransferRefused: something is missing (more chunks may still come), or came from beyond `end` (the
            transfer is broken)
        """
        if self.state is not TransferState.OPEN:
            raise TransferRefused(f"the transfer is {self.state.value}: it cannot be finished")
        if not self.start <= end <= self.limit:
            raise TransferRefused(f"a transfer of {self.start} to {self.limit} cannot end at {end}")
        if self._chunks and self._chunks[-1].end > end:
            beyond = self._chunks[-1].end
            self.abandon()
            raise TransferRefused(f"chunks reach to position {beyond}, but only {end} tokens are committed")
        if gaps := self.missing(end):
            raise TransferRefused(
                f"positions {gaps[0][0]} to {gaps[0][1]} are missing, and {len(gaps) - 1} other gaps"
            )
        received = Received(self.shape, self.start, end, tuple(self._chunks))
        self.state, self._chunks, self.tokens = TransferState.FINISHED, [], 0
        return received

    def abandon(self) -> None:
        """Gives up and frees what was staged."""
        if self.state is TransferState.OPEN:
            self.state, self._chunks, self.tokens = TransferState.BROKEN, [], 0

    def _checked(self, data: bytes | memoryview) -> tuple[Chunk, int]:
        """What costs nothing is checked before the sum, the sum before anything is decoded."""
        header = read_header(data, self.shape)
        end = header.start + header.tokens
        if header.level not in self._levels:
            raise CodecError(f"level {header.level.name}: this session takes {sorted(x.name for x in self._levels)}")
        if header.start < self.start or end > self.limit:
            raise CodecError(f"positions {header.start} to {end}, expected within {self.start} to {self.limit}")
        if len(self._chunks) >= self.max_chunks:
            raise CodecError(f"more than {self.max_chunks} chunks")
        place = bisect.bisect_left([chunk.start for chunk in self._chunks], header.start)
        before, after = self._chunks[:place][-1:], self._chunks[place:][:1]
        if (before and before[0].end > header.start) or (after and after[0].start < end):
            raise CodecError(f"positions {header.start} to {end} are here already, in whole or in part")
        chunk = decode_chunk(data, self.shape, self._key)
        if any(token >= self._vocab for token in chunk.ids):
            raise CodecError(f"token id {max(chunk.ids)}, the vocabulary has {self._vocab}")
        return chunk, place
