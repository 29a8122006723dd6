"""Unified diffs fit exactly or are refused; hostile ones never name a file outside of the root."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloombee_spec.patching.unified import FileDiff, Hunk, PatchError, apply, parse, reverse

VALID = b"--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n one\n-two\n+2\n"


@pytest.mark.parametrize(
    "path",
    [
        b"../x",
        b"y/../../x",
        b"./x",
        b"/etc/x",
        b"y//x",
        b"y/",
        b"",
        b"C:/x",
        b"y\\x",
        b"x\0y",
        b"x y",
        b"~/x",
        b"\xff",
    ],
)
def test_hostile_paths_are_refused(path: bytes) -> None:
    with pytest.raises(PatchError):
        parse(VALID.replace(b"/x\n", b"/" + path + b"\n"))


@pytest.mark.parametrize(
    "diff",
    [
        b"",
        b"some words\n" + VALID,
        VALID + b"trailing words\n",
        VALID.replace(b"+++ b/x", b"+++ b/y"),
        VALID.replace(b"--- a/x", b"--- /dev/null"),
        VALID.replace(b"+++ b/x", b"+++ /dev/null"),
        VALID.replace(b"@@ -1,2 +1,2 @@\n", b"@@ -1,3 +1,2 @@\n"),
        VALID.replace(b"@@ -1,2 +1,2 @@\n", b"@@ -1,1 +1,2 @@\n"),
        VALID.replace(b"@@ -1,2 +1,2 @@\n", b"@@ -0,2 +1,2 @@\n"),
        VALID.replace(b"@@ -1,2 +1,2 @@\n", b"@@ -1,9999999999 +1,2 @@\n"),
        VALID.replace(b" one\n", b"one\n"),
        VALID.replace(b" one\n", b"\n"),
        VALID[:-1],
        b"--- a/x\n+++ b/x\n",
        VALID + VALID,
    ],
)
def test_malformed_diffs_are_refused(diff: bytes) -> None:
    assert parse(VALID), "the example that the cases are made from must be valid"
    with pytest.raises(PatchError):
        parse(diff)


@pytest.mark.parametrize("source", [b"one\ntoo\n", b"zero\none\ntwo\n", b"one\n", b"one\ntwo", b"one\r\ntwo\r\n", b""])
def test_a_hunk_fits_exactly_or_not_at_all(source: bytes) -> None:
    (diff,) = parse(VALID)
    assert apply(diff, b"one\ntwo\nthree\n") == b"one\n2\nthree\n"
    with pytest.raises(PatchError, match="does not match"):
        apply(diff, source)


def test_overlapping_or_shifted_hunks_are_refused() -> None:
    hunk = Hunk(0, (b"one\n",), 0, (b"1\n",))
    with pytest.raises(PatchError, match="overlaps"):
        apply(FileDiff("x", (hunk, hunk)), b"one\n")
    with pytest.raises(PatchError, match="lands on line"):
        apply(FileDiff("x", (Hunk(1, (b"two\n",), 2, (b"2\n",)),)), b"one\ntwo\n")


def test_a_missing_last_line_feed_is_part_of_the_content() -> None:
    (diff,) = parse(b"--- a/x\n+++ b/x\n@@ -1 +1 @@\n-one\n\\ No newline at end of file\n+one\n")
    assert apply(diff, b"one") == b"one\n"
    assert apply(reverse(diff), b"one\n") == b"one"
    with pytest.raises(PatchError):
        apply(diff, b"one\n")
    (middle,) = parse(b"--- a/x\n+++ b/x\n@@ -1 +1 @@\n-one\n+1\n\\ No newline at end of file\n")
    with pytest.raises(PatchError, match="middle of the file"):
        apply(middle, b"one\ntwo\n")


LINES = st.lists(
    st.sampled_from([b"a", b"b", b"", b"\r", b"-x", b"+x", b" x", b"@@ -1 +1 @@", b"\xff\x0c"]), max_size=12
)


@given(LINES, LINES, st.booleans(), st.booleans(), st.integers(0, 3))
def test_any_change_of_a_file_applies_and_reverts(
    old_lines: list[bytes], new_lines: list[bytes], old_open: bool, new_open: bool, context: int
) -> None:
    """Against diffs written by the standard library's difflib, an independent implementation."""
    import difflib

    def text(lines: list[bytes], open_end: bool) -> bytes:
        joined = b"".join(line + b"\n" for line in lines)
        return joined[:-1] if open_end and lines and lines[-1] else joined

    old, new = text(old_lines, old_open), text(new_lines, new_open)
    if old == new:
        return

    def split(data: bytes) -> list[bytes]:
        return re.findall(rb"[^\n]*\n|[^\n]+", data)

    lines = difflib.diff_bytes(difflib.unified_diff, split(old), split(new), b"a/f", b"b/f", n=context, lineterm=b"\n")
    diff_text = b"".join(
        line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n" for line in lines
    )
    (diff,) = parse(diff_text)
    assert apply(diff, old) == new
    assert apply(reverse(diff), new) == old
