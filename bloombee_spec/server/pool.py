"""One more pool for the host's `Runtime`, with results that stay in this process.

The host's own pools send tasks through a queue between processes, so a future that is awaited in the runtime's process
is never
set. This pool has the interface that `Runtime` expects (name, priority, batch_receiver, load_batch_to_runtime,
process_func,
send_outputs_from_runtime, send_exception_from_runtime, is_alive, start, join, terminate), and its only task is "look
what waits".
"""

from __future__ import annotations

import multiprocessing as mp
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from hivemind.utils.logging import get_logger

logger = get_logger(__name__)

INFERENCE_PRIORITY = 1.0  # what the host gives to inference steps of plain clients


class StagePool:
    """:param step: called in the runtime's thread after each `wake`; decides by itself what to compute"""

    def __init__(self, step: Callable[[], None], name: str = "spec"):
        self.name = name
        self._step = step
        self.batch_receiver, self._sender = mp.Pipe(duplex=False)
        self._lock = threading.Lock()
        self._woken_at: float | None = None
        self._running = False

    def wake(self) -> None:
        """Ask for a step; any number of calls before it starts ask for one."""
        with self._lock:
            if self._woken_at is None and not self._sender.closed:
                self._woken_at = time.monotonic()
                self._sender.send_bytes(b"\0")

    @property
    def priority(self) -> tuple[float, float]:
        return INFERENCE_PRIORITY, self._woken_at or float("inf")

    @property
    def empty(self) -> bool:
        return not self.batch_receiver.poll()

    def load_batch_to_runtime(
        self, timeout: float | None = None, device: Any = None
    ) -> tuple[int, list[torch.Tensor]]:
        with self._lock:
            self.batch_receiver.recv_bytes()
            self._woken_at = None
        return 0, []

    def process_func(self, *_: Any) -> tuple[torch.Tensor]:
        self._step()
        return (torch.empty(1),)  # the runtime asks outputs[0] for its batch size

    def send_outputs_from_runtime(self, uid: int, outputs: Any) -> None:
        pass

    def send_exception_from_runtime(self, uid: int, exception: BaseException) -> None:
        logger.error(f"Speculative step failed: {exception!r}")

    def start(self) -> None:
        self._running = True

    def is_alive(self) -> bool:
        return self._running

    def terminate(self) -> None:
        self._running = False

    shutdown = terminate

    def join(self, timeout: float | None = None) -> None:
        pass
