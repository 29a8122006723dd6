"""The timing model of an emulated access link: pure arithmetic over a clock that the caller supplies."""

from __future__ import annotations

import random
from dataclasses import dataclass

PACKET_BYTES = 1460
MIN_BUFFER_BYTES = 1 << 20
MAX_BUFFER_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class LinkShape:
    """One direction of an access link.

    :param delay_s: one-way delay, seconds
    :param jitter_s: an extra delay, uniform in [0, jitter_s], is drawn for each chunk; order is preserved
    :param bits_per_s: rate; None means unlimited
    :param shared: all connections queue behind each other (one access link); otherwise the rate holds for each of them
    :param idle_s: model TCP's slow start after so many seconds of silence (and at the start of a connection); None:
        off
    :param initial_window_bytes: what goes out in the first round trip of a slow start; the amount doubles in each next
        one
    :param buffer_bytes: a connection stops reading from its source while it holds more than this; None: twice the
        bandwidth-delay product, within [1 MiB, 16 MiB]
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    bits_per_s: float | None = None
    shared: bool = True
    idle_s: float | None = None
    initial_window_bytes: int = 14_000
    buffer_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.delay_s < 0 or self.jitter_s < 0:
            raise ValueError(f"delay and jitter must not be negative: {self}")
        if self.bits_per_s is not None and self.bits_per_s <= 0:
            raise ValueError(f"the rate must be positive, or None for unlimited: {self}")
        if self.idle_s is not None and (self.idle_s <= 0 or self.initial_window_bytes <= 0):
            raise ValueError(f"slow start needs a positive idle time and a positive initial window: {self}")
        if self.buffer_bytes is not None and self.buffer_bytes <= 0:
            raise ValueError(f"the buffer must be positive, or None for the default: {self}")

    @property
    def round_trip_s(self) -> float:
        """Round trip that slow start counts in: both directions are taken to have this delay."""
        return 2 * self.delay_s

    @property
    def piece_bytes(self) -> int | None:
        """Larger reads are cut into pieces: a millisecond of the link, at least one packet. None: unlimited rate.

        What one read returns may be several messages, and the first of them must not wait for the last.
        """
        return None if self.bits_per_s is None else max(PACKET_BYTES, int(self.bits_per_s / 8 * 1e-3))

    @property
    def buffer_limit(self) -> int:
        if self.buffer_bytes is not None:
            return self.buffer_bytes
        if self.bits_per_s is None:
            return MAX_BUFFER_BYTES
        product = self.bits_per_s / 8 * (self.delay_s + self.jitter_s)
        return int(min(max(2 * product, MIN_BUFFER_BYTES), MAX_BUFFER_BYTES))


class Link:
    """A serialising queue: a chunk occupies the link for size / rate, and arrives one delay after its last bit."""

    def __init__(self, shape: LinkShape, seed: int) -> None:
        self.shape = shape
        self._random = random.Random(seed)
        self._busy_until = 0.0

    def admit(self, now: float, size: int) -> float:
        """Put `size` bytes into the queue at time `now`; returns when the last of them arrives.

        Arrivals are in order as far as the queue goes; with jitter, the caller keeps each connection in order.
        """
        leaves = max(now, self._busy_until)
        if self.shape.bits_per_s is not None:
            leaves += size * 8 / self.shape.bits_per_s
        self._busy_until = leaves
        return leaves + self.shape.delay_s + self.shape.jitter_s * self._random.random()

    def next_seed(self) -> int:
        """A seed for the jitter of one more connection, when connections do not share the link."""
        return self._random.getrandbits(32)

    def reshape(self, shape: LinkShape) -> None:
        """Holds for what is admitted from now on; what is on its way keeps its arrival time."""
        self.shape = shape


class SlowStart:
    """TCP's congestion window of one connection and direction, as far as idle periods go.

    In a round trip at most a window of bytes leaves; when the window was used, it doubles for the next one. After
    `idle_s` of silence it is back at its initial size. There is no loss, hence no congestion avoidance: the link's
    rate is the ceiling.
    """

    def __init__(self, shape: LinkShape) -> None:
        self._window = shape.initial_window_bytes
        self._round_start = float("-inf")
        self._used = 0
        self._last_sent = float("-inf")

    def rounds(self, now: float, size: int, shape: LinkShape) -> list[tuple[float, int]]:
        """Split `size` bytes that are ready at `now` into (earliest departure, bytes), in order."""
        if shape.idle_s is None:
            return [(now, size)]
        if now - self._last_sent >= shape.idle_s:
            self._window, self._used, self._round_start = shape.initial_window_bytes, 0, now
        elif now >= self._round_start + shape.round_trip_s:
            self._next_round(now)
        parts: list[tuple[float, int]] = []
        while size > 0:
            if self._used >= self._window:
                self._next_round(self._round_start + shape.round_trip_s)
            part = min(size, self._window - self._used)
            self._used += part
            size -= part
            self._last_sent = max(now, self._round_start)
            parts.append((self._last_sent, part))
        return parts

    def _next_round(self, start: float) -> None:
        # A window that was hardly used says nothing about the path, and TCP does not grow it either.
        if 2 * self._used > self._window:
            self._window *= 2
        self._used = 0
        self._round_start = start
