"""What a drafter returned, checked at the border: a custom one may contain mistakes."""

from __future__ import annotations

from collections.abc import Sequence

from bloombee_spec.draft.base import Proposal


def check_proposals(
    proposals: Sequence[Proposal], *, budget: int, max_depth: int, vocab_size: int, name: str = "drafter"
) -> None:
    """Siblings with the same token are allowed: they are one candidate.

    :raises ValueError: too many proposals, a parent that does not come earlier, a chain that is too deep, a token
        outside `0 .. vocab_size - 1` or a probability outside (0, 1]
    """
    if len(proposals) > budget:
        raise ValueError(f"{name} proposed {len(proposals)} tokens, at most {budget} were asked for")
    depths: list[int] = []
    for number, (parent, token, prob) in enumerate((each.parent, each.token, each.prob) for each in proposals):
        if not -1 <= parent < number:
            raise ValueError(f"{name}: the parent of proposal {number} is {parent}, it must come earlier (or be -1)")
        depths.append(1 if parent < 0 else depths[parent] + 1)
        if depths[number] > max_depth:
            raise ValueError(
                f"{name}: proposal {number} is {depths[number]} levels deep, at most {max_depth} were asked for"
            )
        if not 0 <= token < vocab_size:
            raise ValueError(f"{name}: proposal {number} is token {token}, the target has 0 .. {vocab_size - 1}")
        if not 0 < prob <= 1:
            raise ValueError(f"{name}: the probability of proposal {number} is {prob}, it must be in (0, 1]")
