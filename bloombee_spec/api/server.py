"""uvicorn, which ends what runs in order when it is told to stop."""

from __future__ import annotations

import asyncio
import socket

import uvicorn
from fastapi import FastAPI

LAST_S = 15  # for the end of a generation that has been told to end: a lap, and the servers' goodbye


class ApiServer(uvicorn.Server):
    """
    :param grace: seconds that answers on their way have, once it is told to stop; then they end with an error
    """

    def __init__(self, app: FastAPI, grace: int):
        super().__init__(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=grace + LAST_S))
        self._app, self._grace = app, grace

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        end = asyncio.get_running_loop().call_later(self._grace, self._app.state.service.stop)
        try:
            await super().shutdown(sockets)
        finally:
            end.cancel()
