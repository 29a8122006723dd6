"""Putting a question to a drafter, and what it has to learn before it can answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from bloombee_spec.client.candidates import Ask
from bloombee_spec.draft.base import Drafter, Proposal
from bloombee_spec.draft.coupling import couple
from bloombee_spec.sampling.noise import exponential_noise
from bloombee_spec.sampling.spec import SamplingSpec

Lesson = Callable[[Drafter], None]
"""Applied by the thread that asks the drafter, in order."""


def start_over(tokens: Sequence[int], sampling: Mapping[str, Any], row: int, vocab_size: int) -> Lesson:
    """A new history, and the target's rule: a drafter that can will propose by the noise that the target draws with.

    :param sampling: `SamplingSpec` on the wire; empty means greedy
    """
    spec = SamplingSpec.from_wire(dict(sampling)) if sampling else None

    def noise(position: int) -> torch.Tensor:
        assert spec is not None
        return exponential_noise(spec.seed, row, position, vocab_size)

    def lesson(drafter: Drafter) -> None:
        sampled = spec is not None and spec.do_sample
        couple(drafter, noise if sampled else None, spec.temperature if spec is not None and sampled else 0.0)
        drafter.start(tokens)

    return lesson


def go_on(tokens: Sequence[int]) -> Lesson:
    """Tokens that were committed."""
    return lambda drafter: drafter.observe(tokens)


def think(drafter: Drafter, lessons: Sequence[Lesson], ask: Ask, **options: Any) -> list[Proposal]:
    """Teach the drafter what was committed meanwhile, then put the question."""
    for lesson in lessons:
        lesson(drafter)
    return drafter.propose(ask.path, ask.room, max_depth=ask.depth, **options)


def layers(proposals: Sequence[Proposal]) -> int:
    """Depth of a tree of proposals."""
    depths: list[int] = []
    for proposal in proposals:
        depths.append(1 if proposal.parent < 0 else depths[proposal.parent] + 1)
    return max(depths, default=0)
