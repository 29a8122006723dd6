"""The host's own inference sessions, opened and closed so that nothing waits for ever. BloomBee 0.1.3.

What they do by themselves: a failed step is repeated without end, always with an assertion error once the session is
past its first token, because the replacement starts at position 0; a server that cannot be dialled is blamed on nobody
and dialled again; closing can wait for ever, and a session that was not closed is closed by the garbage collector,
possibly on the very event loop that it then waits for.
"""

from __future__ import annotations

import asyncio
import copy
from typing import Any

from bloombee.client.inference_session import InferenceSession

STREAM_CLOSE_TIMEOUT = 4.0


class FailFastSession(InferenceSession):  # type: ignore[misc]
    """Raises at the first failure, once the server to blame is banned. Whoever uses it starts again with a new one,
    which is routed by what the swarm says then.

    :param timeout: seconds for a server to answer one step
    """

    def __init__(self, manager: Any, max_length: int, timeout: float):
        view = copy.copy(manager)  # shares what is known of the swarm, not the configuration
        view.config = copy.copy(manager.config)
        view.config.max_retries, view.config.request_timeout = 1, timeout
        super().__init__(view, max_length)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().step(*args, **kwargs)
        except Exception:
            self._sequence_manager.update(wait=False)  # a ban alone does not change the host's routes
            raise

    def _enter_server_sessions(self, chosen_spans: Any) -> Any:
        opened: list[Any] = []
        for span in chosen_spans:
            try:
                opened += super()._enter_server_sessions([span])
            except Exception:
                self._sequence_manager.on_request_failure(span.peer_id)
                self._server_sessions += opened  # `aclose` ends them with the rest
                raise
        return opened


async def aclose(session: Any) -> None:
    """End the session at all its servers at once; what does not end in time is cut off.

    For the event loop of the host's client.
    """
    opened, session._closed = list(session._server_sessions), True
    session._server_sessions.clear()
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
