"""The HTTP surface: routes of OpenAI's API, over a `Service`."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from bloombee_spec.api.disconnect import ClientGone, unless_gone
from bloombee_spec.api.errors import ApiError
from bloombee_spec.api.requests import read_request
from bloombee_spec.api.service import Service

MAX_BODY_BYTES = 4 << 20
CLIENT_CLOSED_REQUEST = 499  # nobody reads it


class EventStream(Response):
    """Sends events as they come, and notices when the client disconnects, even while none come.

    :param end: called in any case, once nothing more is sent
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], end: Callable[[], None]):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self.raw_headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        self._events, self._end = events, end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send_all(send))
        except (ClientGone, OSError):
            pass
        finally:
            self._end()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for data in self._events:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def make_app(make_service: Callable[[], Service]) -> FastAPI:
    """:param make_service: called in the server's event loop when it starts"""
    created = int(time.time())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.service = make_service()
        try:
            yield
        finally:
            await app.state.service.close()

    app = FastAPI(title="bloombee-spec", lifespan=lifespan)

    @app.exception_handler(ApiError)
    async def on_error(_: HttpRequest, error: ApiError) -> Response:
        return JSONResponse(error.body(), error.status, headers=error.headers)

    @app.exception_handler(HTTPException)
    async def on_http_error(_: HttpRequest, error: HTTPException) -> Response:
        return JSONResponse(ApiError(str(error.detail), status=error.status_code).body(), error.status_code)

    @app.exception_handler(ClientGone)
    async def on_gone(_: HttpRequest, error: ClientGone) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    @app.exception_handler(Exception)
    async def on_bug(_: HttpRequest, error: Exception) -> Response:
        return JSONResponse(ApiError(f"internal error: {type(error).__name__}", status=500).body(), 500)

    @app.get("/health")
    async def health(http: HttpRequest) -> dict[str, Any]:
        return {"status": "ok", **http.app.state.service.load()}

    def card(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": created, "owned_by": "swarm"}

    @app.get("/v1/models")
    async def models(http: HttpRequest) -> dict[str, Any]:
        return {"object": "list", "data": [card(http.app.state.service.name)]}

    @app.get("/v1/models/{name:path}")
    async def model(http: HttpRequest, name: str) -> dict[str, Any]:
        http.app.state.service.check_model(name)
        return card(name)

    @app.post("/v1/completions")
    async def completions(http: HttpRequest) -> Response:
        return await _answer(http, chat=False)

    @app.post("/v1/chat/completions")
    async def chat_completions(http: HttpRequest) -> Response:
        return await _answer(http, chat=True)

    return app


async def _answer(http: HttpRequest, *, chat: bool) -> Response:
    service: Service = http.app.state.service
    request = read_request(await _body(http), service.limits, chat=chat)
    service.check_model(request.model)
    if not request.stream:
        return JSONResponse(await unless_gone(http.receive, service.whole(request)))
    running, piece = await unless_gone(http.receive, service.first(request))
    return EventStream(service.events(request, running, piece), running.cancel)


async def _body(http: HttpRequest) -> Any:
    """
    :raises ApiError: too long, or no JSON
    """
    data = bytearray()
    async for part in http.stream():
        data += part
        if len(data) > MAX_BODY_BYTES:
            raise ApiError(f"the request body is longer than {MAX_BODY_BYTES} bytes", status=413)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as e:
        raise ApiError(f"the request body is not JSON: {e}") from None
