"""Reads fields of a JSON object one by one, and refuses those that nobody asked for: nothing is ignored silently."""

from __future__ import annotations

from typing import Any

from bloombee_spec.api.errors import ApiError


class Fields:
    """:param body: a JSON object
    :raises ApiError: it is none
    """

    def __init__(self, body: Any):
        if not isinstance(body, dict):
            raise ApiError(f"the request body must be a JSON object, got {shown(body)}")
        self._body = body
        self._read: set[str] = set()

    def take(self, name: str) -> Any:
        """The value, None where it is absent or null."""
        self._read.add(name)
        return self._body.get(name)

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self.take(name)
        if value is None:
            return None
        if type(value) is not int:
            raise ApiError(f"{name} must be an integer, got {shown(value)}", param=name)
        if not low <= value <= high:
            raise ApiError(f"{name} must be in {low} .. {high}, got {shown(value)}", param=name)
        return value

    def number(self, name: str, low: float, high: float, default: float) -> float:
        value = self.take(name)
        if value is None:
            return default
        if type(value) not in (int, float):
            raise ApiError(f"{name} must be a number, got {shown(value)}", param=name)
        if not low <= value <= high:  # NaN neither
            raise ApiError(f"{name} must be in {low:g} .. {high:g}, got {shown(value)}", param=name)
        return float(value)

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self.take(name)
        if value is None:
            return default
        if type(value) is not bool:
            raise ApiError(f"{name} must be true or false, got {shown(value)}", param=name)
        return value

    def text(self, name: str) -> str | None:
        value = self.take(name)
        if value is not None and type(value) is not str:
            raise ApiError(f"{name} must be a string, got {shown(value)}", param=name)
        return value

    def unused(self, name: str, *harmless: Any) -> None:
        """A field of OpenAI's that is not served: only a value that asks for nothing is accepted."""
        value = self.take(name)
        if value is not None and not any(type(value) is type(one) and value == one for one in harmless):
            raise ApiError(f"{name}={shown(value)} is not supported here", param=name, code="unsupported_parameter")

    def finish(self) -> None:
        """:raises ApiError: a field was not read by anybody"""
        unknown = sorted(set(self._body) - self._read)
        if unknown:
            listed = ", ".join(repr(name[:40]) for name in unknown[:5])
            raise ApiError(f"unrecognized request arguments: {listed}", param=None, code="unknown_parameter")


def shown(value: Any) -> str:
    """What was found, short whatever a client sent."""
    if type(value) is int and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    if value is None or type(value) in (bool, int, float):
        return "null" if value is None else str(value).lower()
    if type(value) is str and len(value) <= 40:
        return repr(value)
    return "a long string" if type(value) is str else "a list" if type(value) is list else "an object"
