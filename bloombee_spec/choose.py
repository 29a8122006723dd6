"""From a rule on the wire to a function from logits to the next target token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from bloombee_spec.sampling.rule import KeyedRule
from bloombee_spec.sampling.spec import SamplingSpec

Chooser = Callable[[torch.Tensor, Sequence[int]], int]
"""(`[vocab]` logits of the root, committed tokens up to and including the root) to the next target token."""

GREEDY = SamplingSpec(prompt_length=0)


def make_chooser(
    sampling: Mapping[str, Any], row: int, vocab_size: int, device: torch.device | str = "cpu"
) -> Chooser:
    """:param sampling: `SamplingSpec` on the wire; empty means greedy
    :param row: row of the shared noise
    :raises ValueError: an option is unknown or out of range
    """
    spec = SamplingSpec.from_wire(dict(sampling)) if sampling else GREEDY
    rule = KeyedRule(spec, vocab_size, row=row, device=device)

    def choose(logits: torch.Tensor, committed: Sequence[int]) -> int:
        position = len(committed)
        token = rule.choose(logits.to(device), committed, position)
        rule.commit(position)
        return token

    return choose
