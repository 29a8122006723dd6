"""Base of control messages: what a peer sent is checked field by field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from bloombee_spec.wire.frames import FrameError

T = TypeVar("T", bound="Message")


class Message:
    """Base of control messages; `to_wire` and `from_wire` are inverse, with the class name as the kind."""

    def to_wire(self) -> dict[str, Any]:
        return {
            "kind": type(self).__name__,
            **{k: list(v) if isinstance(v, tuple) else v for k, v in vars(self).items()},
        }

    @classmethod
    def from_wire(cls: type[T], message: Mapping[str, Any]) -> T:
        """:raises FrameError: another kind, a missing or unknown field, a wrong type, a value out of range"""
        if message.get("kind") != cls.__name__:
            raise FrameError(f"expected a message {cls.__name__}, found {str(message.get('kind'))[:40]}")
        hints = get_type_hints(cls)
        known = {field.name for field in fields(cls)}  # type: ignore[arg-type]
        unknown = set(message) - known - {"kind"}
        if unknown:
            raise FrameError(f"{cls.__name__}: unknown field {sorted(map(str, unknown))[0][:40]!r}")
        values = {}
        for name in known & set(message):
            values[name] = _checked(f"{cls.__name__}.{name}", message[name], hints[name])
        try:
            return cls(**values)
        except (TypeError, ValueError) as e:
            raise FrameError(f"{cls.__name__}: {e}") from None


def _checked(name: str, value: Any, hint: Any) -> Any:
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        options = get_args(hint)
        if value is None and type(None) in options:
            return None
        return _checked(name, value, next(option for option in options if option is not type(None)))
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise FrameError(f"{name} is not a list")
        return tuple(_checked(name, item, get_args(hint)[0]) for item in value)
    if origin is dict:
        if not isinstance(value, dict):
            raise FrameError(f"{name} is not a mapping")
        return value
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise FrameError(f"{name} is a {type(value).__name__}, expected {hint.__name__}")
    return value


def in_range(**bounds: tuple[int, int, int]) -> None:
    for name, (value, low, high) in bounds.items():
        if not low <= value <= high:
            raise ValueError(f"{name} is {value}, expected {low} .. {high}")
