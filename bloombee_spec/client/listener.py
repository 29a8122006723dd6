"""Waiting for the ring: its next frame, or the certainty that nothing will come."""

from __future__ import annotations

import queue
import time

from bloombee_spec.client.ring import Ring
from bloombee_spec.client.stage_link import RingError
from bloombee_spec.wire.frames import Frame

PATIENCE_S, PATIENCE_LAPS = 2.0, 20.0  # of silence before the stages are asked
PATIENCE_PREFILL_S = 10.0
PING_TIMEOUT, PING_ROUND_TRIPS = 1.0, 10.0


class Listener:
    """:param stall_timeout: longest silence in seconds, whatever the stages answer when asked"""

    def __init__(self, ring: Ring, stall_timeout: float):
        self._ring, self._stall_timeout = ring, stall_timeout
        self._heard = 0.0  # monotonic time of the last event

    def begin(self) -> None:
        """Silence counts from now on."""
        self._heard = time.monotonic()

    def next(self, *, decoding: bool, pause: float = 0.0) -> Frame | None:
        """
        :param decoding: the prompt is through, so answers are due every lap
        :param pause: seconds to wait at most; 0: as long as it takes to doubt that the stages are there
        :returns: None when nothing came meanwhile
        :raises RingError: the ring broke; a stage is not there, or nothing came for `stall_timeout` seconds although
            all of them are
        """
        try:
            event = self._ring.events.get(timeout=pause or self._patience(decoding))
        except queue.Empty:
            if not pause:
                self._check_silence()
            return None
        self._heard = time.monotonic()
        if isinstance(event, RingError):
            raise event
        return event

    def _patience(self, decoding: bool) -> float:
        """Seconds of silence after which to ask whether all stages are there: many laps, as this ring's laps go."""
        longest = self._stall_timeout
        if not decoding or self._ring.meter is None:
            return min(longest, PATIENCE_PREFILL_S)
        return min(longest, max(PATIENCE_S, PATIENCE_LAPS * self._ring.meter.lap_s))

    def _check_silence(self) -> None:
        silence = time.monotonic() - self._heard
        for index in self._ring.silent_stages(PING_TIMEOUT + PING_ROUND_TRIPS * self._ring.meter.longest_rtt_s):
            peer = self._ring.spans[index].peer
            raise RingError(f"stage {index} at {peer} is silent: no answer for {silence:.0f} s", peer)
        if silence >= self._stall_timeout:
            raise RingError(f"no answer from the ring for {silence:.0f} s")
