"""How fast candidates may leave: no faster than the slowest link passes them on."""

from __future__ import annotations

import time

from bloombee_spec.client.measured import RouteMeter

LINK_SHARE = 0.25  # of a lap, that one burst of candidates may occupy the slowest link


class Pace:
    """Rows in a link's queue cannot be taken back: what piles up there is what a correction has to wait for."""

    def __init__(self, meter: RouteMeter):
        self._meter = meter
        self._free_at = 0.0

    def pause(self) -> float:
        """Seconds until the slowest link has passed on what was sent; 0 when it is free."""
        return max(0.0, self._free_at - time.perf_counter())

    def sent(self, rows: int) -> None:
        if rows:
            self._free_at = max(time.perf_counter(), self._free_at) + rows * self._meter.row_pace_s

    def burst(self, most: int) -> int:
        """Rows to send in one go, at most `most`."""
        row_s = self._meter.row_pace_s
        return min(most, max(1, int(LINK_SHARE * self._meter.lap_s / row_s))) if row_s > 0 else most
