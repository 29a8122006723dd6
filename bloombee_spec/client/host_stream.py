"""Tokens of the host's own `generate`, pulled one by one: it pushes them into a streamer, from a thread of its own."""

from __future__ import annotations

import contextvars
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

END_TIMEOUT = 30.0  # seconds that closing waits for a step of the host that is on its way


class _Unwanted(Exception):
    """Unwinds the host's decode loop, and with it its session."""


class _Pushed:
    """A streamer: the first `put` is the prompt, each later one a token `[1]`."""

    def __init__(self) -> None:
        self.items: queue.Queue[int | BaseException | None] = queue.Queue()  # no more than max_new_tokens
        self.unwanted = False
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if self.unwanted:
            raise _Unwanted
        if self._prompt_seen:
            self.items.put(int(value.reshape(-1)[0]))
        self._prompt_seen = True

    def end(self) -> None: ...


def host_tokens(generate: Callable[[Any], Any]) -> Iterator[tuple[int, list[int]]]:
    """`(0, [token])` for each token of the one row.

    :param generate: decodes with the streamer that it is given; runs with the context variables of the first `next`
    :raises Exception: whatever `generate` raised
    """
    pushed = _Pushed()

    def work() -> None:
        try:
            generate(pushed)
            pushed.items.put(None)
        except BaseException as e:
            pushed.items.put(e)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(work,), name="host-stream", daemon=True)
    thread.start()
    try:
        while (item := pushed.items.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield 0, [item]
    finally:
        pushed.unwanted = True
        thread.join(END_TIMEOUT)
