"""What a link costs: one-way delay and bandwidth, estimated from the frames that cross it anyway."""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_DELAY_S = 600.0
BANDWIDTH_RANGE_BPS = (1e3, 1e13)
OUTLIER = 3.0  # samples further than this many mean absolute errors are pulled in
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

    Fits `transit = delay + 8·bytes/bandwidth` with exponential forgetting (weighted moments of bytes and transit). A
    frame that left while its predecessor still occupied the link is charged only from the moment the link was free.
    Outliers are pulled in to `OUTLIER` mean absolute errors, so that one stall does not rewrite the estimate and a
    lasting change does. While all frames have the same size only the delay moves: a slope cannot be seen then.

    :param initial: from the last session with this peer, or a guess
    :param half_life: samples after which a sample counts half
    """

    def __init__(self, initial: LinkEstimate, half_life: float = 32.0):
        if half_life < 1:
            raise ValueError(f"half_life of {half_life} samples")
        self._keep = 0.5 ** (1.0 / half_life)
        self._delay, self._per_byte = initial.delay_s, 8.0 / initial.bandwidth_bps
        self._samples = initial.samples
        self._weight = self._bytes = self._transit = self._bytes2 = self._cross = 0.0
        self._error = 0.25 * initial.delay_s + 1e-3
        self._last_arrival = -math.inf

    @property
    def estimate(self) -> LinkEstimate:
        low, high = BANDWIDTH_RANGE_BPS
        bandwidth = min(max(8.0 / max(self._per_byte, 8.0 / high), low), high)
        return LinkEstimate(min(max(self._delay, 0.0), MAX_DELAY_S), bandwidth, self._samples)

    def observe(self, sent_at: float, received_at: float, nbytes: int) -> None:
        """One frame: `sent_at` on the receiver's clock (the caller removes the offset), seconds; `nbytes` on the wire.

        Values that cannot be (a clock jump, a negative size) are ignored: they come from a peer.
        """
        if not (math.isfinite(sent_at) and math.isfinite(received_at) and 0 <= nbytes <= 1 << 31):
            return
        if not 0 <= received_at - sent_at <= MAX_DELAY_S:
            return
        start = max(sent_at, self._last_arrival - self._delay)  # the predecessor left the sender at arrival - delay
        self._last_arrival = max(self._last_arrival, received_at)
        predicted = self._delay + self._per_byte * nbytes
        error = max(received_at - start, 0.0) - predicted
        bound = OUTLIER * self._error
        self._error += (1 - self._keep) * (min(abs(error), 4 * bound) - self._error)
        self._error = max(self._error, 1e-5)
        self._fit(float(nbytes), predicted + min(max(error, -bound), bound))
        self._samples += 1

    def _fit(self, nbytes: float, transit: float) -> None:
        keep = self._keep
        self._weight = keep * self._weight + 1
        self._bytes = keep * self._bytes + nbytes
        self._transit = keep * self._transit + transit
        self._bytes2 = keep * self._bytes2 + nbytes * nbytes
        self._cross = keep * self._cross + nbytes * transit
        mean_bytes, mean_transit = self._bytes / self._weight, self._transit / self._weight
        variance = self._bytes2 / self._weight - mean_bytes * mean_bytes
        if variance > (MIN_SPREAD * mean_bytes) ** 2:
            slope = (self._cross / self._weight - mean_bytes * mean_transit) / variance
            if slope > 0:
                settled = min(1.0, self._weight / 4)
                self._per_byte += settled * (slope - self._per_byte)
                self._delay = max(0.0, mean_transit - self._per_byte * mean_bytes)
                return
        gain = max(1.0 - keep, 1.0 / (self._weight + 1))  # the first samples correct a guess quickly
        self._delay = max(0.0, self._delay + gain * (transit - self._per_byte * nbytes - self._delay))
