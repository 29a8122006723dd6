"""Known tokens on their way to the stages, in chunks."""

from __future__ import annotations

from collections.abc import Sequence

from bloombee_spec.wire.frames import PrefixFrame


def prefix_frames(
    lane: int, epoch: int, tokens: Sequence[int], start: int, chunk: int, limit: int
) -> list[PrefixFrame]:
    """`tokens[start:]`, at most `chunk` per frame, without numbers (`seq`). In epoch 0, the text of an earlier ring,
    nothing is committed behind it."""
    return [
        PrefixFrame(lane, epoch, 0, at, tuple(tokens[at : at + chunk]), epoch > 0 and at + chunk >= len(tokens), limit)
        for at in range(start, len(tokens), chunk)
    ]
