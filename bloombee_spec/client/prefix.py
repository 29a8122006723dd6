"""Known tokens: how much of a text the stages have already, and the rest on its way to them, in chunks."""

from __future__ import annotations

from collections.abc import Sequence

from bloombee_spec.wire.frames import PrefixFrame


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens with which both begin."""
    return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def prefix_frames(
    lane: int, epoch: int, tokens: Sequence[int], start: int, chunk: int, limit: int
) -> list[PrefixFrame]:
    """`tokens[start:]`, at most `chunk` per frame, without numbers (`seq`). In epoch 0, the text of an earlier ring,
    nothing is committed behind it."""
    return [
        PrefixFrame(lane, epoch, 0, at, tuple(tokens[at : at + chunk]), epoch > 0 and at + chunk >= len(tokens), limit)
        for at in range(start, len(tokens), chunk)
    ]
