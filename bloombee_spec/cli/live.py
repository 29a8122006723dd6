"""A line at the bottom of the terminal that goes on while text scrolls above it."""

from __future__ import annotations

import os
import shutil
import sys
from types import TracebackType

SAVE, RESTORE, CLEAR = "\x1b7", "\x1b8", "\x1b[2K"


class LiveLine:
    """A context manager. Does nothing where standard error is not a terminal.

    The last row is kept out of the scrolling region, so that what others print never reaches it.
    """

    def __init__(self) -> None:
        self.active = sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._rows = 0

    def __enter__(self) -> LiveLine:
        if self.active:
            self._rows = shutil.get_terminal_size().lines
            # A new line first, so that the cursor is not on the row that is taken away.
            self._write(f"\n{SAVE}\x1b[1;{max(self._rows - 1, 1)}r{RESTORE}\x1b[1A")
        return self

    def show(self, text: str) -> None:
        if self.active:
            width = shutil.get_terminal_size().columns
            self._write(f"{SAVE}\x1b[{self._rows};1H{CLEAR}{text[: width - 1]}{RESTORE}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.active:
            self._write(f"{SAVE}\x1b[{self._rows};1H{CLEAR}\x1b[r{RESTORE}")

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()
