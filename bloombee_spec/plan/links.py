"""What a link costs: one-way delay and bandwidth, estimated from the frames that cross it anyway."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

MAX_DELAY_S = 600.0
BANDWIDTH_RANGE_BPS = (1e3, 1e13)
OUTLIER = 3.0  # samples further than this many mean absolute errors are pulled in
WINDOW = 64  # frames in which one is expected to have found the link free
MIN_SPREAD = 0.15  # relative spread of frame sizes from which a slope (bandwidth) can be read


@dataclass(frozen=True, slots=True)
class LinkEstimate:
    """One direction of a link.

    :param delay_s: one-way delay of an empty frame, seconds
    :param bandwidth_bps: bits per second
    :param samples: frames behind the estimate; 0 for a guess
    :raises ValueError: values that no link has
    """

    delay_s: float
    bandwidth_bps: float
    samples: int = 0

    def __post_init__(self) -> None:
        low, high = BANDWIDTH_RANGE_BPS
        if not 0 <= self.delay_s <= MAX_DELAY_S:
            raise ValueError(f"a delay of {self.delay_s} s is outside 0 .. {MAX_DELAY_S}")
        if not low <= self.bandwidth_bps <= high:
            raise ValueError(f"a bandwidth of {self.bandwidth_bps} bit/s is outside {low:g} .. {high:g}")
        if self.samples < 0:
            raise ValueError(f"{self.samples} samples")

    def time(self, nbytes: float) -> float:
        """Seconds from handing over a frame of `nbytes` to its arrival on an idle link."""
        return self.delay_s + 8.0 * nbytes / self.bandwidth_bps


class LinkMeter:
    """Running estimate of one direction of a link.

    Least squares with exponential forgetting over two kinds of frames: one that found the link free took `delay +
    8·bytes/bandwidth`; one that left while its predecessor still occupied the link came `8·bytes/bandwidth` after it,
    which says nothing about the delay. Outliers are pulled in to `OUTLIER` mean absolute errors, so that one stall
    does not rewrite the estimate and a lasting change does. While all frames have one size and none queues, only the
    delay moves: a bandwidth cannot be seen then.

    :param initial: from the last session with this peer, or a guess
    :param half_life: samples after which a sample counts half
    """

    def __init__(self, initial: LinkEstimate, half_life: float = 32.0):
        if half_life < 1:
            raise ValueError(f"half_life of {half_life} samples")
        self._keep = 0.5 ** (1.0 / half_life)
        self._delay, self._per_byte = initial.delay_s, 8.0 / initial.bandwidth_bps
        self._samples = initial.samples
        self._weight = self._bytes = self._transit = self._bytes2 = self._cross = (
            0.0  # frames that found the link free
        )
        self._queued_bytes2 = self._queued_cross = 0.0
        self._error = 0.25 * initial.delay_s + 1e-3
        self._last_arrival = -math.inf
        self._recent: deque[tuple[float, int]] = deque(maxlen=WINDOW)

    @property
    def estimate(self) -> LinkEstimate:
        low, high = BANDWIDTH_RANGE_BPS
        bandwidth = min(max(8.0 / max(self._per_byte, 8.0 / high), low), high)
        return LinkEstimate(min(max(self._delay, 0.0), MAX_DELAY_S), bandwidth, self._samples)

    def observe(self, sent_at: float, received_at: float, nbytes: int) -> None:
        """One frame: `sent_at` on the receiver's clock (the caller removes the offset), seconds; `nbytes` on the wire.

        Values that cannot be (a clock jump, a negative size) are ignored: they come from a peer.
        """
        if not (math.isfinite(sent_at) and math.isfinite(received_at) and 0 < nbytes <= 1 << 31):
            return
        if not 0 <= received_at - sent_at <= MAX_DELAY_S:
            return
        self._recent.append((received_at - sent_at, nbytes))
        floor = min(
            transit - self._per_byte * size for transit, size in self._recent
        )  # nobody is faster than the delay
        queued = sent_at + floor < self._last_arrival < received_at  # its predecessor had not left the sender yet
        taken = received_at - (self._last_arrival if queued else sent_at)
        predicted = self._per_byte * nbytes + (0.0 if queued else self._delay)
        self._last_arrival = max(self._last_arrival, received_at)
        self._learn(float(nbytes), predicted + self._pulled_in(taken - predicted), queued, floor)
        self._samples += 1

    def _pulled_in(self, error: float) -> float:
        bound = OUTLIER * self._error
        self._error += (min(abs(error), 4 * bound) - self._error) / 8
        self._error = max(self._error, 1e-5)
        return min(max(error, -bound), bound)

    def _learn(self, nbytes: float, taken: float, queued: bool, floor: float) -> None:
        keep = self._keep
        for name in ("_weight", "_bytes", "_transit", "_bytes2", "_cross", "_queued_bytes2", "_queued_cross"):
            setattr(self, name, keep * getattr(self, name))
        if queued:
            self._queued_bytes2 += nbytes * nbytes
            self._queued_cross += nbytes * taken
        else:
            self._weight += 1
            self._bytes += nbytes
            self._transit += taken
            self._bytes2 += nbytes * nbytes
            self._cross += nbytes * taken
        mean = self._bytes / self._weight if self._weight > 0 else 0.0
        spread = self._bytes2 - mean * self._bytes + self._queued_bytes2
        if spread > MIN_SPREAD**2 * (self._bytes2 + self._queued_bytes2):
            per_byte = (self._cross - mean * self._transit + self._queued_cross) / spread
            if per_byte > 0:
                self._per_byte = per_byte
        # A frame that queued bounds the delay from above only; without others that bound is all there is.
        sought = floor if queued else (self._transit - self._per_byte * self._bytes) / self._weight
        trust = 1.0 - keep if queued else self._weight / (self._weight + 1.0)
        self._delay = max(0.0, self._delay + trust * (sought - self._delay))
