"""A host session in a lap: blocking steps of the host, run beside each other, each with an end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bloombee_spec.client.chain import Chain
from bloombee_spec.hosts.base import Host

STEP_ROWS = 1024  # the host's servers refuse steps that are much longer; a longer prompt takes several


@dataclass(eq=False)
class Lap:
    """One round trip of a stream: rows for `committed[start:]` and for the chain behind them."""

    lane: int
    chain: Chain
    tokens: tuple[int, ...]
    start: int
    deadline: float = 0.0
    seconds: float = 0.0
    hidden: Any = None  # [len(chain) + 1, hidden]: the rows that are verified
    error: Exception | None = None

    @property
    def steps(self) -> int:
        return -(-len(self.tokens) // STEP_ROWS)


class Connection:
    """One host session. Its steps block, so each lap has a thread of its own; there are never two at a time."""

    def __init__(self, host: Host, model: Any, session: Any):
        self._host, self._model, self.session = host, model, session
        self._lock = threading.Lock()
        self._busy = self._closed = False

    def start(self, lap: Lap, delay: float, answer: Callable[[Lap], None]) -> None:
        """Run the lap after `delay` seconds and hand it over with its result, from another thread."""
        self._busy = True
        threading.Thread(target=self._run, args=(lap, delay, answer), name="relay-lap", daemon=True).start()

    def close(self) -> threading.Thread:
        """End the session; one that is in a lap ends after it. Returns the thread that does so, within seconds."""
        thread = threading.Thread(target=self._close, name="relay-close", daemon=True)
        thread.start()
        return thread

    def _close(self) -> None:
        with self._lock:
            self._closed, busy = True, self._busy
        if not busy:
            self._host.close_session(self.session)

    def _run(self, lap: Lap, delay: float, answer: Callable[[Lap], None]) -> None:
        time.sleep(delay)
        started = time.perf_counter()
        try:
            lap.hidden = self._step(lap)
        except Exception as e:
            lap.error = e
        lap.seconds = time.perf_counter() - started
        with self._lock:
            self._busy, closed = False, self._closed
        if closed:
            self._host.close_session(self.session)
        answer(lap)

    def _step(self, lap: Lap) -> torch.Tensor:
        if self.session.position > lap.start:
            self.session.position = lap.start
        outputs = []
        with torch.inference_mode():
            for at in range(0, len(lap.tokens), STEP_ROWS):
                rows = self._host.embed(self._model, lap.tokens[at : at + STEP_ROWS])
                outputs.append(self.session.step(rows[None])[0])
            return torch.cat(outputs[-2:])[-len(lap.chain) - 1 :]
