"""What one session shows about its stage: the incoming link, the way to its neighbours, waiting for others."""

from __future__ import annotations

import time

from bloombee_spec.plan.compute import ComputeProfile
from bloombee_spec.plan.links import LinkEstimate, LinkMeter
from bloombee_spec.wire.link_codec import LinkCodec
from bloombee_spec.wire.steering import Report
from bloombee_spec.wire.streams import STAMP_RANGE

REPORT_INTERVAL, REPORT_INTERVAL_MAX = 1.0, 16.0  # seconds; it doubles, for the first reports tell most
OFFSET_S = 10.0  # the sender's clock is unknown: the first frame counts as this old, and the delay is not used
GUESS_BPS = 100e6
ENOUGH_BYTES = 64 << 10  # a bandwidth is told after this much
WEIGHT = 0.1  # of a new sample in running means


class SessionMeter:
    """Event loop and runtime thread both write, each its own fields; a report reads whatever is there."""

    def __init__(self) -> None:
        self.next_rtt_s: float | None = None
        self.first_rtt_s: float | None = None
        self.queue_s = 0.0
        self._link = LinkMeter(LinkEstimate(OFFSET_S, GUESS_BPS))
        self._received = 0
        self._zero: int | None = None  # difference of the clocks, as the first frame showed it, in µs
        self._waiting_since: float | None = None
        self._computing = False
        self._reported, self._interval = 0.0, REPORT_INTERVAL

    # ---------------------------------------------------------------- event loop

    def frame_arrived(self, stamp: int, nbytes: int) -> None:
        """:param stamp: the sender's `stamp_now()` when it wrote the frame"""
        now = time.monotonic()
        shift = (int(now * 1e6) - stamp) % STAMP_RANGE
        if self._zero is None:
            self._zero = shift
        drift = (shift - self._zero + STAMP_RANGE // 2) % STAMP_RANGE - STAMP_RANGE // 2
        self._link.observe(now - OFFSET_S - drift * 1e-6, now, nbytes)
        self._received += nbytes

    def rows_arrived(self) -> None:
        """Rows that find nothing of their own session ahead of them: what they wait now is others' work."""
        if not self._computing and self._waiting_since is None:
            self._waiting_since = time.monotonic()

    def report(self, compute: ComputeProfile | None, codec: LinkCodec) -> Report | None:
        """None while the last one is recent."""
        now = time.monotonic()
        if now - self._reported < self._interval:
            return None
        self._interval = min(2 * self._interval, REPORT_INTERVAL_MAX) if self._reported else REPORT_INTERVAL
        self._reported = now
        known = self._received >= ENOUGH_BYTES
        points = () if compute is None else tuple(number for point in compute.points for number in point)
        return Report(
            next_rtt_s=self.next_rtt_s, first_rtt_s=self.first_rtt_s,
            bandwidth_bps=self._link.estimate.bandwidth_bps if known else None,
            queue_s=self.queue_s, compute=points, codec_costs=codec.costs,
        )  # fmt: skip

    # ---------------------------------------------------------------- runtime thread

    def forward_begins(self) -> None:
        self._computing = True
        since, self._waiting_since = self._waiting_since, None
        if since is not None:
            self.queue_s += WEIGHT * (time.monotonic() - since - self.queue_s)

    def forward_ended(self) -> None:
        self._computing = False
