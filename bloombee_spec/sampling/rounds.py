"""Rounds: how rules that compare the target's distribution p with the drafter's q work over a network.

The client draws a tree of candidates from q, one tree per lap. Stages compute its rows; the last one, which has the LM
head, answers with what its rule says to it (`RoundRule.answer`); the client makes the next tokens of that (`settle`)
and tells all stages. What p is, both sides learn from logits and options alone (`Distributions`).

All randomness of a round is keyed by (seed, row, committed tokens, purpose): nothing is used twice, a round that is
repeated on another route has the same result, and the same seed, drafter and settings give the same text. Unlike the
keyed rule, other drafts from the same seed give another text of the same law.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

import torch

from bloombee_spec.sampling.comparison import draw
from bloombee_spec.sampling.processors import Prefix, ProcessorStack, SamplingError
from bloombee_spec.sampling.spec import SamplingSpec
from bloombee_spec.wire.distributions import rounded
from bloombee_spec.wire.varint import FrameError, Reader

ROOT = -1
Target = Callable[[int], torch.Tensor]
"""Index of a candidate, or ROOT, to the target's distribution of the token after it: `[vocab]` float64, sum 1."""


class Purpose(Enum):
    """Who uses a round's randomness for what."""

    DRAFT = "draft"
    ACCEPT = "accept"
    RESAMPLE = "resample"


def round_rng(seed: int, row: int, length: int, purpose: Purpose) -> torch.Generator:
    """:param length: committed tokens when the round began, which no other round of this stream shares"""
    key = hashlib.blake2b(f"{seed} {row} {length} {purpose.value}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(key, "big") >> 1)


@dataclass(frozen=True)
class Draws:
    """Tokens that were drawn from one distribution: children of `parent`, an index or ROOT.

    :param nodes: index of each draw's candidate, in order; one token may be drawn twice
    :param q: `[vocab]` float64, sum 1: exactly what they were drawn from, as the other side reads it
    """

    parent: int
    nodes: tuple[int, ...]
    q: torch.Tensor


@dataclass(frozen=True)
class Draft:
    """A tree of candidates, parents first.

    :param parents: index of each one's parent, or ROOT
    :param draws: of each candidate that has children, in order; at the stage only as far as the rule sends them
    :param q_of_node: q of each candidate, where that is all the stage needs to know
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    draws: tuple[Draws, ...] = ()
    q_of_node: tuple[float, ...] = ()

    def path(self, index: int) -> tuple[int, ...]:
        """Tokens from the root's child down to this candidate; none for ROOT."""
        tokens: list[int] = []
        while index != ROOT:
            tokens.append(self.tokens[index])
            index = self.parents[index]
        return tuple(tokens[::-1])

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, len(self.tokens) - 1))


@dataclass(frozen=True)
class Outcome:
    """What a round commits: candidates by index, from the root down, and the token behind them."""

    accepted: tuple[int, ...]
    token: int


class RoundRule(ABC):
    """One rule: what goes up with the candidates, what comes down, and what either side does with it."""

    name: ClassVar[str]
    exact: ClassVar[bool] = True

    def widths(self, budget: int) -> tuple[int, ...]:
        """Draws below each candidate, by depth, for at most `budget` candidates: a chain unless the rule has more."""
        return (1,) * budget

    @abstractmethod
    def write_draft(self, out: bytearray, draft: Draft) -> None:
        """What the last stage has to know beside the candidates, which travel on their own."""

    @abstractmethod
    def read_draft(self, read: Reader, tokens: Sequence[int], parents: Sequence[int], vocab: int) -> Draft:
        """Inverse of `write_draft`, once the candidates are here.

        :raises FrameError: not a draft of this rule
        """

    @abstractmethod
    def answer(self, out: bytearray, draft: Draft, target: Target, rng: torch.Generator) -> None:
        """At the last stage, when all rows of the round are there."""

    @abstractmethod
    def settle(self, read: Reader, draft: Draft, vocab: int, rng: torch.Generator) -> Outcome:
        """At the client, which knows the whole draft.

        :raises FrameError: not an answer of this rule
        """


class Distributions:
    """Logits to probabilities under a call's options, for the target and for a drafter that samples as it does.

    :raises ValueError: an option names a token outside the vocabulary
    """

    def __init__(self, spec: SamplingSpec, vocab: int, device: torch.device | str = "cpu"):
        spec.check_vocabulary(vocab)
        self._stack, self._sampled, self._device = ProcessorStack.from_spec(spec, device), spec.do_sample, device

    def __call__(self, logits: torch.Tensor, prefix: Prefix) -> torch.Tensor:
        """
        :param logits: `[vocab]`; `prefix` the tokens before the one in question
        :returns: `[vocab]` float64 on the CPU; all on one token without sampling
        :raises SamplingError: NaN, or no token with a positive probability
        """
        scores = self._stack.scores(logits.to(self._device), prefix).to("cpu", torch.float64)
        peak, token = scores.max(dim=-1)
        if not bool(peak.isfinite()) or bool(logits.isnan().any()):
            raise SamplingError(f"no distribution: the largest score is {float(peak)}, or a logit is NaN")
        return torch.softmax(scores, dim=-1) if self._sampled else certain(int(token), len(scores))


def certain(token: int, vocab: int) -> torch.Tensor:
    """All on one token: also the q of a drafter that does not sample."""
    p = torch.zeros(vocab, dtype=torch.float64)
    p[token] = 1.0
    return p


def spec_of(sampling: Mapping[str, Any]) -> SamplingSpec:
    """:param sampling: `SamplingSpec` on the wire; empty means greedy"""
    return SamplingSpec.from_wire(dict(sampling)) if sampling else SamplingSpec(prompt_length=0)


def draw_draft(
    widths: Sequence[int], distribution: Callable[[tuple[int, ...]], torch.Tensor | None], rng: torch.Generator
) -> Draft:
    """Draw a tree. No candidate is left out for what it is: that would change the law of those that remain.

    :param distribution: path below the root -> the drafter's q after it, None where it has nothing to say
    """
    tokens: list[int] = []
    parents: list[int] = []
    draws: list[Draws] = []
    frontier: list[tuple[int, tuple[int, ...]]] = [(ROOT, ())]
    for width in widths:
        grown: list[tuple[int, tuple[int, ...]]] = []
        for parent, path in frontier:
            q = distribution(path)
            if q is None:
                continue
            q, nodes, known = rounded(q), [], dict[int, int]()
            for _ in range(width):
                token = int(draw(q[None], rng))
                if token not in known:
                    known[token] = len(tokens)
                    tokens.append(token)
                    parents.append(parent)
                    grown.append((known[token], (*path, token)))
                nodes.append(known[token])
            draws.append(Draws(parent, tuple(nodes), q))
        frontier = grown
    return Draft(tuple(tokens), tuple(parents), tuple(draws))


def only_chains(tokens: Sequence[int], parents: Sequence[int], **fields: Any) -> Draft:
    """:raises FrameError: the candidates are a tree"""
    draft = Draft(tuple(tokens), tuple(parents), **fields)
    if not draft.is_chain:
        raise FrameError("this rule verifies chains, not trees")
    return draft
