"""Putting a question to a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bloombee_spec.client.candidates import Ask
from bloombee_spec.draft.base import Drafter, Proposal


def think(
    drafter: Drafter, lessons: Sequence[tuple[bool, tuple[int, ...]]], ask: Ask, **options: Any
) -> list[Proposal]:
    """Teach the drafter what was committed meanwhile, then put the question."""
    for start_over, tokens in lessons:
        drafter.start(tokens) if start_over else drafter.observe(tokens)
    return drafter.propose(ask.path, ask.room, max_depth=ask.depth, **options)


def layers(proposals: Sequence[Proposal]) -> int:
    """Depth of a tree of proposals."""
    depths: list[int] = []
    for proposal in proposals:
        depths.append(1 if proposal.parent < 0 else depths[proposal.parent] + 1)
    return max(depths, default=0)
