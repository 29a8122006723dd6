"""The host's own inference sessions, opened and closed so that nothing waits for ever. Mixed into the host's class.

What they do by themselves: a failed step is repeated without end, on BloomBee always with an assertion error once the
session is past its first token, because the replacement starts at position 0; a server that cannot be dialled is
blamed on nobody and dialled again; closing can wait for ever, and a session that was not closed is closed by the
garbage collector, possibly on the very event loop that it then waits for.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from typing import Any

import torch
from hivemind.moe.client.remote_expert_worker import RemoteExpertWorker

CLOSE_TIMEOUT = 5.0
STREAM_CLOSE_TIMEOUT = 4.0
REPLAY_ROWS = 1024  # the host's servers refuse steps that are much longer


class FailFast:
    """Raises at the first failure, once the server to blame is banned. Whoever uses it starts again with a new one,
    which is routed by what the swarm says then.

    :param timeout: seconds for a server to answer one step
    """

    def __init__(self: Any, manager: Any, max_length: int, timeout: float):
        view = copy.copy(manager)  # shares what is known of the swarm, not the configuration
        view.shutdown = lambda: None  # where collecting a manager shuts it down, that would end the shared thread
        view.config = copy.copy(manager.config)
        view.config.max_retries, view.config.request_timeout = 1, timeout
        super().__init__(view, max_length)  # type: ignore[call-arg]

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().step(*args, **kwargs)  # type: ignore[misc]
        except Exception:
            self._sequence_manager.update(wait=False)  # a ban alone does not change the host's routes
            raise

    def _enter_server_sessions(self: Any, chosen_spans: Any) -> Any:
        opened: list[Any] = []
        for span in chosen_spans:
            try:
                opened += super()._enter_server_sessions([span])  # type: ignore[misc]
            except Exception:
                self._sequence_manager.on_request_failure(span.peer_id)
                self._server_sessions += opened  # `aclose` ends them with the rest
                raise
        return opened


class ReplayOnRewind:
    """Goes back to an earlier position on servers that cannot: opens new sessions and computes the rows before it
    again.

    That costs a whole prefill, so it is for the rare step back and not for rejected candidates.
    """

    _altered = False  # some step had deep prompts or reordered the batch, which `history` does not tell

    def step(self: Any, inputs: Any, prompts: Any = None, hypo_ids: Any = None) -> Any:
        self._altered |= any(extra is not None and extra.numel() > 0 for extra in (prompts, hypo_ids))
        return super().step(inputs, prompts, hypo_ids)  # type: ignore[misc]

    @property
    def position(self: Any) -> int:
        """Tokens whose KV is at the servers. Can be set to a smaller value, from any thread but the event loop's."""
        return int(self._position)

    @position.setter
    def position(self: Any, value: int) -> None:
        if not 0 <= value <= self._position:
            raise ValueError(f"position {value} is not in 0..{self._position}")
        if value == self._position:
            return
        if self._altered:
            raise RuntimeError(
                "a session with deep prompts or a reordered batch cannot go back to an earlier position"
            )
        opened = list(self._server_sessions)
        rows = opened[0].history[:, :value]
        self._server_sessions.clear()
        self._position = 0
        RemoteExpertWorker.run_coroutine(_end_all(opened), return_future=True).result(CLOSE_TIMEOUT)
        with torch.inference_mode():
            for at in range(0, value, REPLAY_ROWS):
                self.step(rows[:, at : at + REPLAY_ROWS])


async def aclose(session: Any) -> None:
    """End the session at all its servers at once; what does not end in time is cut off.

    For the event loop of the host's client.
    """
    opened, session._closed = list(session._server_sessions), True
    session._server_sessions.clear()
    await _end_all(opened)


async def _end_all(opened: Sequence[Any]) -> None:
    try:
        await asyncio.gather(*[_end(one) for one in opened], return_exceptions=True)
    finally:
        for one in opened:  # its `__del__` has nothing left to do
            one._outputs_stream = one._inputs_queue = None
            one.closed = True


async def _end(one: Any) -> None:
    stream = one._outputs_stream
    if stream is None:
        return
    # The stream's own task lives until its reader ends: reading with a time limit ends both in every case.
    if one.stepped:
        await asyncio.wait_for(one._aclose_stream(), STREAM_CLOSE_TIMEOUT)
    else:
        await asyncio.wait_for(stream.__anext__(), 0.01)
