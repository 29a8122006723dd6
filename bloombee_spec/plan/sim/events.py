"""Virtual time: events in order of their instant, ties in order of their making."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any


class Clock:
    """An event queue; `now` in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._queue: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._order = count()

    def at(self, instant: float, action: Callable[..., object], *args: Any) -> None:
        """Call `action(*args)` at `instant`, or now if that has passed."""
        heapq.heappush(self._queue, (max(instant, self.now), next(self._order), action, args))

    def after(self, seconds: float, action: Callable[..., object], *args: Any) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._order), action, args))

    def run(self, done: Callable[[], bool], limit: int = 50_000_000) -> None:
        """Until `done()`.

        :raises RuntimeError: nothing is left to happen, or more than `limit` events did: the stream has stalled
        """
        queue = self._queue
        while not done():
            if not queue:
                raise RuntimeError(f"the simulated stream stalled at {self.now:.3f} s: no event is left")
            if self.events >= limit:
                raise RuntimeError(f"the simulated stream is not done after {limit} events")
            self.now, _, action, args = heapq.heappop(queue)
            self.events += 1
            action(*args)
