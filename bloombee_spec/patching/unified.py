"""Unified diffs, strictly: parse, reverse, apply. No fuzz, no offsets: a hunk fits exactly or the diff is refused."""

from __future__ import annotations

import re
from dataclasses import dataclass

NO_NEWLINE = b"\\ No newline at end of file"
_HUNK = re.compile(rb"@@ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@(?: .*)?\n")


class PatchError(Exception):
    """Something is not as expected and was refused. The text says what was found, what was changed and what to do."""


@dataclass(frozen=True, slots=True)
class Hunk:
    """Replaces `old`, found at line `old_start`, by `new`, which then starts at line `new_start`.

    Lines keep their terminators. Starts are zero-based (a unified diff counts from one).
    """

    old_start: int
    old: tuple[bytes, ...]
    new_start: int
    new: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class FileDiff:
    """The changes of one existing file. `path` is relative, with forward slashes, and stays below the root."""

    path: str
    hunks: tuple[Hunk, ...]


def split_lines(data: bytes) -> list[bytes]:
    """Lines with their terminators. Only a line feed ends one (`bytes.splitlines` also cuts at carriage returns)."""
    lines = [line + b"\n" for line in data.split(b"\n")]
    last = lines.pop()[:-1]
    return [*lines, last] if last else lines


def parse(text: bytes) -> tuple[FileDiff, ...]:
    """Parse a diff made of `--- a/PATH`, `+++ b/PATH` and hunks. Creation, deletion and renaming of files are refused.

    :raises PatchError: at the first line that is not exactly what the format allows, with its number
    """
    reader = _Reader(split_lines(text))
    diffs: list[FileDiff] = []
    while not reader.at_end():
        diffs.append(_parse_file(reader))
    if not diffs:
        raise PatchError("the diff is empty")
    paths = [diff.path for diff in diffs]
    for path in paths:
        if paths.count(path) > 1:
            raise PatchError(f"the diff changes {path} in two places: one section per file is expected")
    return tuple(diffs)


def reverse(diff: FileDiff) -> FileDiff:
    """The diff that undoes `diff`."""
    return FileDiff(diff.path, tuple(Hunk(h.new_start, h.new, h.old_start, h.old) for h in diff.hunks))


def apply(diff: FileDiff, source: bytes) -> bytes:
    """`source` with every hunk replaced.

    :raises PatchError: a hunk does not fit at exactly its line, or hunks overlap or are out of order
    """
    lines = split_lines(source)
    result: list[bytes] = []
    done = 0
    for number, hunk in enumerate(diff.hunks, start=1):
        if hunk.old_start < done:
            raise PatchError(f"{diff.path}: hunk {number} overlaps the one before it")
        end = hunk.old_start + len(hunk.old)
        if tuple(lines[hunk.old_start : end]) != hunk.old or hunk.old_start > len(lines):
            raise PatchError(f"{diff.path}: hunk {number} does not match the file at line {hunk.old_start + 1}")
        result += lines[done : hunk.old_start]
        if len(result) != hunk.new_start:
            raise PatchError(
                f"{diff.path}: hunk {number} lands on line {len(result) + 1}, not on {hunk.new_start + 1}"
            )
        result += hunk.new
        done = end
    result += lines[done:]
    if any(not line.endswith(b"\n") for line in result[:-1]):
        raise PatchError(f"{diff.path}: the diff removes a line feed in the middle of the file")
    return b"".join(result)


class _Reader:
    """A cursor over the lines of a diff that knows where it is, for error texts."""

    def __init__(self, lines: list[bytes]) -> None:
        self._lines = lines
        self._next = 0

    def at_end(self) -> bool:
        return self._next == len(self._lines)

    def peek(self) -> bytes:
        return b"" if self.at_end() else self._lines[self._next]

    def take(self) -> bytes:
        line = self.peek()
        self._next += 1
        return line

    def error(self, expected: str) -> PatchError:
        found = "the end of the diff" if self.at_end() else repr(self.peek()[:60])
        return PatchError(f"line {self._next + 1} of the diff: expected {expected}, found {found}")


def _parse_file(reader: _Reader) -> FileDiff:
    old = _parse_path(reader, b"--- a/")
    new = _parse_path(reader, b"+++ b/")
    if old != new:
        raise PatchError(f"the diff renames {old!r} to {new!r}: only changes of existing files are supported")
    hunks: list[Hunk] = []
    while reader.peek().startswith(b"@@"):
        hunks.append(_parse_hunk(reader))
    if not hunks:
        raise reader.error("a hunk (@@ -line,count +line,count @@)")
    return FileDiff(old, tuple(hunks))


def _parse_path(reader: _Reader, prefix: bytes) -> str:
    line = reader.peek()
    if not line.startswith(prefix) or not line.endswith(b"\n"):
        raise reader.error(f"'{prefix.decode()}PATH'")
    raw = line[len(prefix) : -1]
    if not re.fullmatch(rb"[A-Za-z0-9_.+-]+(/[A-Za-z0-9_.+-]+)*", raw):
        raise reader.error("a relative path of plain characters")
    path = raw.decode("ascii")
    if any(part in (".", "..") for part in path.split("/")):
        raise reader.error("a path that stays below the root (no '.' or '..')")
    reader.take()
    return path


def _parse_hunk(reader: _Reader) -> Hunk:
    header = _HUNK.fullmatch(reader.peek())
    if header is None:
        raise reader.error("a hunk header (@@ -line,count +line,count @@)")
    reader.take()
    old_line, old_count, new_line, new_count = (1 if group is None else int(group) for group in header.groups())
    old: list[bytes] = []
    new: list[bytes] = []
    while len(old) < old_count or len(new) < new_count:
        tag = reader.peek()[:1]
        if tag not in (b" ", b"-", b"+") or not reader.peek().endswith(b"\n"):
            raise reader.error("a complete line of the hunk that begins with ' ', '-' or '+'")
        line = reader.take()[1:]
        if reader.peek().startswith(NO_NEWLINE):
            reader.take()
            line = line[:-1]
        if tag != b"+":
            old.append(line)
        if tag != b"-":
            new.append(line)
    if len(old) != old_count or len(new) != new_count:
        raise reader.error(f"a hunk of {old_count} old and {new_count} new lines, as its header says; the end")
    return Hunk(_zero_based(old_line, old_count), tuple(old), _zero_based(new_line, new_count), tuple(new))


def _zero_based(line: int, count: int) -> int:
    """The format names the line *before* an empty side, and the first line of any other."""
    if count and not line:
        raise PatchError("a hunk with lines starts at line 1 at least")
    return line - 1 if count else line
