"""A drafter that knows the answer, for tests and benchmarks of everything but drafting.

It is handed the very text that the target is going to produce and errs on purpose, at a chosen rate. A figure that was
measured with it says how the rest of the system behaves at that acceptance, and nothing about drafting: its name says
so, "scripted(h=0.9)".
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import count

from bloombee_spec.draft.base import Drafter, Proposal, never

_MASK = (1 << 64) - 1


class Hostility(Enum):
    """Ways to misbehave. A drafter may never do more harm than waste work."""

    NONE = "none"
    RANDOM = "random"  # token ids drawn from the whole vocabulary, never the target's on purpose
    DUPLICATES = "duplicates"  # every proposal below a parent is the same token
    EMPTY = "empty"  # proposes nothing


@dataclass(frozen=True)
class Script:
    """How a scripted drafter errs and what it costs.

    :param acceptance: chance that the first proposal for a position is the target's own token (h)
    :param siblings: chance that the second, third, ... proposal is it; each parent gets `1 + len(siblings)` proposals
    :param depth: longest chain of proposals
    :param layer_seconds: time spent on each layer of a proposed tree, like a drafter that runs a model once per layer
    :param seed: which positions the errors fall on
    """

    acceptance: float
    siblings: tuple[float, ...] = ()
    depth: int = 64
    layer_seconds: float = 0.0
    seed: int = 0
    hostility: Hostility = Hostility.NONE

    def __post_init__(self) -> None:
        if min(self.chances) < 0 or sum(self.chances) > 1 + 1e-9:
            raise ValueError(f"acceptance and siblings are chances of distinct events, got {self.chances}")
        if self.depth < 1 or self.layer_seconds < 0:
            raise ValueError(f"need depth >= 1 and layer_seconds >= 0, got {self.depth} and {self.layer_seconds}")

    @property
    def chances(self) -> tuple[float, ...]:
        """Of each rank below one parent."""
        return (self.acceptance, *self.siblings)


class ScriptedDrafter(Drafter):
    """Replays `text`, in absolute positions, with errors that depend on (seed, position) only: never on timing, path
    or history.

    After an error at a position, proposals below it are wrong too; asked again from the committed text, it goes on
    rightly. The shape of its trees does not depend on where the errors are, since a real drafter does not know either.

    :param text: prompt and the target's continuation, token ids
    :param vocab_size: wrong tokens are drawn from `0 .. vocab_size - 1`
    """

    def __init__(self, text: Sequence[int], vocab_size: int, script: Script) -> None:
        if vocab_size < len(script.siblings) + 2:
            raise ValueError(
                f"a vocabulary of {vocab_size} is too small for {1 + len(script.siblings)} wrong proposals"
            )
        self.script = script
        self.name = f"scripted(h={script.acceptance:g})"
        if script.hostility is not Hostility.NONE:
            self.name = f"scripted({script.hostility.value})"
        self._text = list(text)
        self._vocab_size = vocab_size
        self._committed: list[int] = []

    def fork(self) -> ScriptedDrafter:
        """A drafter for another stream that produces the same text."""
        return ScriptedDrafter(self._text, self._vocab_size, self.script)

    def start(self, prompt: Sequence[int]) -> None:
        self._committed = list(prompt)

    def observe(self, tokens: Sequence[int]) -> None:
        self._committed.extend(tokens)

    def propose(
        self, path: Sequence[int], budget: int, *, max_depth: int = 64, interrupted: Callable[[], bool] = never
    ) -> list[Proposal]:
        if self.script.hostility is Hostility.EMPTY:
            return []
        position = len(self._committed) + len(path)
        depth = min(max_depth, self.script.depth, len(self._text) - position)
        shape = self._shape(budget, depth)
        layers = self._wait(max((depth for _, _, depth in shape), default=0), interrupted)
        right = self._follows(path)
        proposals: list[Proposal] = []
        on_text = {-1: right}  # proposal -> the chain down to it is the target's own
        kept = {
            -1: -1
        }  # number in the shape -> number in the proposals, without the layers that there was no time for
        for number, (parent, rank, depth) in enumerate(shape):
            if depth > layers:
                continue
            kept[number] = len(proposals)
            above = on_text[kept[parent]]
            token, right = self._token(position + depth - 1, rank, above)
            on_text[len(proposals)] = above and right
            proposals.append(Proposal(kept[parent], token, self._chance(rank)))
        return proposals

    def right_rank(self, position: int) -> int:
        """Which proposal for this position is the target's own token: 0 the first, 1 its first sibling, -1 none."""
        drawn = self._hash(position, 0) / (_MASK + 1)
        for rank, chance in enumerate(self.script.chances):
            drawn -= chance
            if drawn < 0:
                return rank
        return -1

    def _shape(self, budget: int, max_depth: int) -> list[tuple[int, int, int]]:
        """(parent, rank, depth) of the nodes of the best tree, by the chances that the script states."""
        ranks = range(len(self.script.chances))
        shape: list[tuple[int, int, int]] = []
        ages = count()
        frontier = [(-self._chance(rank), next(ages), -1, rank, 1) for rank in ranks if max_depth > 0]
        while frontier and len(shape) < budget:
            chain, _, parent, rank, depth = heapq.heappop(frontier)
            if depth < max_depth:
                for below in ranks:
                    heapq.heappush(frontier, (chain * self._chance(below), next(ages), len(shape), below, depth + 1))
            shape.append((parent, rank, depth))
        return shape

    def _wait(self, layers: int, interrupted: Callable[[], bool]) -> int:
        """Spend the time of each layer; returns how many were done before the interruption."""
        for layer in range(layers):
            if interrupted():
                return layer
            if self.script.layer_seconds:
                time.sleep(self.script.layer_seconds)
        return layers

    def _follows(self, path: Sequence[int]) -> bool:
        """Whether the path is what the script says for its positions."""
        position = len(self._committed)
        return self._text[position : position + len(path)] == list(path)

    def _token(self, position: int, rank: int, above: bool) -> tuple[int, bool]:
        """The proposal of that rank and whether it is the target's token; `above` tells the same of its parent."""
        truth = self._text[position]
        if self.script.hostility is Hostility.RANDOM:
            token = self._hash(position, 1 + rank) % self._vocab_size
            return token, token == truth
        if self.script.hostility is Hostility.DUPLICATES:
            rank = 0
        if above and rank == self.right_rank(position):
            return truth, True
        # Distinct wrong tokens: consecutive steps from a drawn one, the truth itself left out.
        offset = (self._hash(position, 0) // 3 + rank) % (self._vocab_size - 1)
        return (truth + 1 + offset) % self._vocab_size, False

    def _chance(self, rank: int) -> float:
        return max(self.script.chances[rank], 1e-6)

    def _hash(self, position: int, stream: int) -> int:
        """64 well-mixed bits of (seed, position, stream), by the finaliser of SplitMix64 (Steele et al., 2014)."""
        bits = 0
        for part in (self.script.seed, position, stream):
            bits = (bits + part + 0x9E3779B97F4A7C15) & _MASK
            bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
            bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _MASK
            bits ^= bits >> 31
        return bits
