"""A generation in a worker thread, seen from the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor

from hivemind.utils.logging import get_logger

from bloombee_spec.api.errors import ApiError
from bloombee_spec.api.generation import Generation, Piece
from bloombee_spec.client.relay import RelayError
from bloombee_spec.client.routing import NoPluginRoute
from bloombee_spec.client.stage_link import RingError
from bloombee_spec.hosts.base import NoRoute

logger = get_logger(__name__)


class Running:
    """Starts at once. Whoever holds it calls `cancel` when nobody wants more; when `ended` is done, a lap later at
    most, the swarm's servers have been told.

    :param make: opens the generation, in the worker
    """

    def __init__(self, executor: Executor, make: Callable[[], Generation]):
        self._loop = asyncio.get_running_loop()
        self._make = make
        self._cancelled = threading.Event()
        self._why: ApiError | None = None
        self._pieces: asyncio.Queue[Piece | Exception | None] = asyncio.Queue()  # as many as tokens, at most
        self.generation: Generation | None = None
        self.ended = self._loop.run_in_executor(executor, self._work)

    async def next(self) -> Piece | None:
        """The next piece, None at the end.

        :raises ApiError: the generation failed
        """
        item = await self._pieces.get()
        if isinstance(item, Exception):
            raise item
        return item

    def cancel(self, why: ApiError | None = None) -> None:
        """:param why: the end that `next` comes to, if somebody still waits"""
        self._why = self._why or why
        self._cancelled.set()

    def _work(self) -> None:
        try:
            if not self._cancelled.is_set():
                self._generate()
            self._tell(self._why)
        except Exception as e:
            self._tell(_as_api_error(e))

    def _generate(self) -> None:
        generation = self.generation = self._make()
        try:
            for piece in generation:
                self._tell(piece)
                if self._cancelled.is_set():
                    break
        finally:
            generation.close()
            _log(generation, self._cancelled.is_set())

    def _tell(self, item: Piece | Exception | None) -> None:
        try:
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, item)
        except RuntimeError:  # the loop is gone, and with it whoever wanted to know
            self._cancelled.set()


def _as_api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, (NoPluginRoute, NoRoute)):
        return ApiError(f"the swarm cannot serve this model now: {error}", status=503, code="no_route")
    if isinstance(error, (RingError, RelayError)):
        return ApiError(f"the swarm failed: {error}", status=503, code="swarm_failed")
    logger.exception("A generation failed", exc_info=error)
    return ApiError(f"the generation failed: {type(error).__name__}: {error}", status=500, code="internal_error")


def _log(generation: Generation, cancelled: bool) -> None:
    stats, seconds = generation.stats, generation.seconds
    speed = f", {generation.tokens / seconds:.1f} tok/s" if seconds > 0 else ""
    laps = f" in {stats.laps} laps, {stats.acceptance:.0%} drafted" if stats is not None else ""
    how = "cancelled after" if cancelled else "done:"
    logger.info(f"{how} {len(generation.prompt)} + {generation.tokens} tokens{laps}{speed}")
