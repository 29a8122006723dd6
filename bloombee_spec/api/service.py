"""Answers a request: a slot, a generation, and its text as one body or as a stream of events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bloombee_spec.api.errors import ApiError
from bloombee_spec.api.generation import Generation, Piece
from bloombee_spec.api.job import Job, Limits
from bloombee_spec.api.requests import Request
from bloombee_spec.api.responses import DONE, Answer, event, usage
from bloombee_spec.api.running import Running
from bloombee_spec.api.slots import Slots


class Service:
    """For one model and one event loop.

    :param name: how clients name the model
    :param slots: see `Slots`
    """

    def __init__(self, model: Any, tokenizer: Any, name: str, limits: Limits, slots: Slots):
        self.name, self.limits = name, limits
        self._model, self._tokenizer, self._slots = model, tokenizer, slots
        self._executor = ThreadPoolExecutor(slots.running, thread_name_prefix="generation")
        self._all: set[Running] = set()
        self._stopped: ApiError | None = None

    def load(self) -> dict[str, int]:
        """Requests that run and wait now."""
        return {"running": len(self._all), "waiting": self._slots.queued}

    def check_model(self, name: str) -> None:
        """:raises ApiError: 404, this is not the model that is served"""
        if name != self.name:
            raise ApiError(
                f"the model {name[:80]!r} does not exist; this server has {self.name!r}",
                status=404,
                param="model",
                code="model_not_found",
            )

    async def start(self, job: Job) -> Running:
        """Waits for a slot, which is free again when the worker has ended.

        :raises ApiError: 429, or the server is being stopped
        """
        await self._slots.acquire()
        if self._stopped is not None:
            self._slots.release()
            raise self._stopped
        running = Running(self._executor, lambda: Generation(self._model, self._tokenizer, job, self.limits))
        self._all.add(running)

        def ended(_: object) -> None:
            self._all.discard(running)
            self._slots.release()

        running.ended.add_done_callback(ended)
        return running

    async def whole(self, request: Request) -> dict[str, Any]:
        """The answer in one body."""
        running = await self.start(request.job)
        try:
            texts: list[tuple[str, str | None]] = [("", None)] * request.job.n
            while (piece := await running.next()) is not None:
                text, _ = texts[piece.choice]
                texts[piece.choice] = (text + piece.text, piece.finish)
            return Answer(request).whole(texts, _usage(running))
        finally:
            running.cancel()

    async def first(self, request: Request) -> tuple[Running, Piece | None]:
        """Starts a stream and waits for its first piece: what goes wrong until then has a status of its own."""
        running = await self.start(request.job)
        try:
            return running, await running.next()
        except BaseException:
            running.cancel()
            raise

    async def events(self, request: Request, running: Running, piece: Piece | None) -> AsyncIterator[bytes]:
        """A stream as server-sent events, from its first piece on; a failure on the way is an event too."""
        answer, begun = Answer(request), set[int]()
        try:
            while piece is not None:
                if piece.text or piece.finish is not None or piece.choice not in begun:
                    first = piece.choice not in begun
                    begun.add(piece.choice)
                    yield event(answer.chunk(piece.choice, piece.text, piece.finish, first))
                piece = await running.next()
            if request.usage:
                yield event(answer.usage_chunk(_usage(running)))
            yield DONE
        except ApiError as e:
            yield event(e.body())

    def stop(self) -> None:
        """Ends all generations, and begins no other."""
        self._stopped = ApiError("the server is being stopped", status=503, code="stopping")
        for running in self._all:
            running.cancel(self._stopped)

    async def close(self) -> None:
        """`stop`, and wait until the swarm has been told."""
        self.stop()
        waiting = [running.ended for running in self._all]
        await asyncio.gather(*waiting, return_exceptions=True)
        self._executor.shutdown(wait=False)


def _usage(running: Running) -> dict[str, int]:
    generation = running.generation
    assert generation is not None
    return usage(len(generation.prompt), generation.tokens)
