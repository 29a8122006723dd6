"""Errors as OpenAI's API words them, so that its clients raise the exception that fits."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """
    :param status: of HTTP
    :param param: field of the request that is at fault
    :param code: for programs, such as `context_length_exceeded`
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ):
        super().__init__(message)
        self.message, self.status, self.param, self.code, self.retry_after = message, status, param, code, retry_after

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}

    def body(self) -> dict[str, Any]:
        kinds = {429: "rate_limit_error", 503: "service_unavailable_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}
