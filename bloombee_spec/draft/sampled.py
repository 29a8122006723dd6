"""Drafts that are drawn instead of chosen: what a drafter's distribution is, for rules that compare it with the
target's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from bloombee_spec.draft.base import Drafter
from bloombee_spec.draft.coupling import couple
from bloombee_spec.draft.lending import LentDrafter

# (logits [vocab], tokens before the one in question) -> probabilities [vocab], by the target's options.
Shape = Callable[[torch.Tensor, Sequence[int]], torch.Tensor]


class Sampler(ABC):
    """A drafter's distribution along one stream. Never told the target's noise: draws must be independent of it."""

    @abstractmethod
    def start(self, prompt: Sequence[int]) -> None:
        """Begin a stream with these committed tokens."""

    @abstractmethod
    def observe(self, tokens: Sequence[int]) -> None:
        """Append newly committed tokens."""

    @abstractmethod
    def distribution(self, path: Sequence[int], shape: Shape) -> torch.Tensor | None:
        """Of the token after the committed ones and `path`: `[vocab]`, sum 1; None when it has nothing to say.

        :param shape: makes it of logits, if there are any
        """


@runtime_checkable
class Sampled(Protocol):
    """A drafter that has a distribution."""

    def sampler(self, vocab_size: int) -> Sampler: ...


def sampler_of(drafter: Drafter, vocab_size: int) -> Sampler:
    """The drafter's own, or its best proposal as a certainty."""
    lent: Any = drafter.drafter if isinstance(drafter, LentDrafter) else drafter
    return lent.sampler(vocab_size) if isinstance(lent, Sampled) else PointSampler(drafter, vocab_size)


class PointSampler(Sampler):
    """All on the token that the drafter proposes first: exact with any rule, since a proposal without randomness is a
    draw from a distribution with one token."""

    def __init__(self, drafter: Drafter, vocab_size: int):
        self._drafter, self._vocab = drafter, vocab_size

    def start(self, prompt: Sequence[int]) -> None:
        couple(self._drafter, None, 0.0)
        self._drafter.start(prompt)

    def observe(self, tokens: Sequence[int]) -> None:
        self._drafter.observe(tokens)

    def distribution(self, path: Sequence[int], shape: Shape) -> torch.Tensor | None:
        proposals = self._drafter.propose(path, 1, max_depth=1)
        if not proposals or not 0 <= proposals[0].token < self._vocab:
            return None
        q = torch.zeros(self._vocab, dtype=torch.float64)
        q[proposals[0].token] = 1.0
        return q
