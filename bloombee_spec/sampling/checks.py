"""Checks of values that a peer may have sent.

Each returns the value in its canonical type or raises a ValueError that names it. Lengths are checked before anything
is copied. Booleans are not numbers here, and neither NaN nor infinity is in range.
"""

from __future__ import annotations

from typing import Any

MAX_TOKEN_ID = 2**24 - 1


class TooLong(ValueError):
    """A list that is longer than a peer may send."""


def boolean(name: str, value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError(f"{name} must be a boolean, got {_shown(value)}")
    return value


def integer(name: str, value: Any, low: int, high: int) -> int:
    if type(value) is not int:
        raise ValueError(f"{name} must be an integer, got {_shown(value)}")
    if not low <= value <= high:
        raise ValueError(f"{name} must be in {low} .. {high}, got {_shown(value)}")
    return value


def number(name: str, value: Any, low: float, high: float, *, below_high: bool = False) -> float:
    if type(value) is not int and type(value) is not float:
        raise ValueError(f"{name} must be a number, got {_shown(value)}")
    if not low <= value <= high or (below_high and value == high):
        raise ValueError(f"{name} must be in [{low}, {high}{')' if below_high else ']'}, got {_shown(value)}")
    return float(value)


def positive(name: str, value: Any) -> float:
    value = number(name, value, 0.0, 1e9)
    if value == 0:
        hint = " (for greedy decoding set do_sample=False)" if name == "temperature" else ""
        raise ValueError(f"{name} must be greater than 0, got 0{hint}")
    return float(value)


def sequence(name: str, value: Any, max_length: int) -> list[Any] | tuple[Any, ...]:
    if type(value) is not list and type(value) is not tuple:
        raise ValueError(f"{name} must be a list, got {_shown(value)}")
    if len(value) > max_length:
        raise TooLong(f"{name} has {len(value)} items, at most {max_length} are allowed")
    return value


def token_ids(name: str, value: Any, max_length: int) -> tuple[int, ...]:
    return tuple(integer(f"a token id in {name}", item, 0, MAX_TOKEN_ID) for item in sequence(name, value, max_length))


def token_sequences(name: str, value: Any, max_sequences: int, max_length: int) -> tuple[tuple[int, ...], ...]:
    words = tuple(
        token_ids(f"a sequence in {name}", word, max_length) for word in sequence(name, value, max_sequences)
    )
    if not all(words):
        raise ValueError(f"{name} contains an empty sequence")
    return words


def start_and_factor(name: str, value: Any, max_start: int) -> tuple[int, float]:
    pair = sequence(name, value, 2)
    if len(pair) != 2:
        raise ValueError(f"{name} must be (start, factor), got {len(pair)} items")
    return integer(f"the start in {name}", pair[0], 0, max_start), number(f"the factor in {name}", pair[1], 0.0, 100.0)


def _shown(value: Any) -> str:
    """Type and value of what was found, short whatever a peer sent."""
    if type(value) is int and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    if type(value) in (bool, int, float):
        return f"{type(value).__name__} {value}"
    return type(value).__name__
