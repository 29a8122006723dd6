"""Response bodies: whole answers, and chunks of a stream."""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from bloombee_spec.api.requests import Request

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Answer:
    """Identity of one answer; all its chunks carry the same.

    :param created: seconds since 1970
    """

    request: Request
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, texts: list[tuple[str, str | None]], usage: dict[str, int]) -> dict[str, Any]:
        """:param texts: text and finish reason of each choice"""
        choices = [
            {"index": i, "logprobs": None, "finish_reason": finish, **self._content(text)}
            for i, (text, finish) in enumerate(texts)
        ]
        return self._body("chat.completion", choices) | {"usage": usage}

    def chunk(self, choice: int, text: str, finish: str | None, first: bool = False) -> dict[str, Any]:
        """:param first: of this choice"""
        if self.request.chat:
            role = {"role": "assistant"} if first else {}
            content: dict[str, Any] = {"delta": {**role, **({"content": text} if text or first else {})}}
        else:
            content = {"text": text}
        body = {"index": choice, "logprobs": None, "finish_reason": finish, **content}
        usage = {"usage": None} if self.request.usage else {}
        return self._body("chat.completion.chunk", [body]) | usage

    def usage_chunk(self, usage: dict[str, int]) -> dict[str, Any]:
        return self._body("chat.completion.chunk", []) | {"usage": usage}

    def _content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}} if self.request.chat else {"text": text}

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chat = self.request.chat
        return {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{self.id}",
            "object": kind if chat else "text_completion",
            "created": self.created,
            "model": self.request.model,
            "choices": choices,
        }


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def event(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
