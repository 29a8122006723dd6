"""How commands talk to a person."""

from __future__ import annotations

import sys


def fail(message: str) -> int:
    """One sentence on standard error; the exit status of a command that could not do its job."""
    print(f"bloombee-spec: {message}", file=sys.stderr)
    return 1


def say(message: str = "") -> None:
    print(message, flush=True)
