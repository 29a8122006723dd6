"""Several drafters, one tree: the cheap ones first, each trusted as far as its earlier proposals came true."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from bloombee_spec.draft.base import Drafter, Proposal, never
from bloombee_spec.draft.coupling import NoiseSource, couple
from bloombee_spec.draft.lending import fork


@dataclass(frozen=True)
class MixConfig:
    """How a mixture weighs its drafters.

    :param enough: later drafters are not asked when the tree is full and its least likely chain is at least this
        likely
    :param memory: outcomes that a calibration remembers
    :param prior: how many certain proposals that came true a fresh calibration is worth
    :param depths: calibrations are kept apart for depths 1 .. `depths`; deeper proposals share the last one
    :param awaited: proposals whose outcome is awaited, at most; beyond it all of them are forgotten
    """

    enough: float = 0.5
    memory: float = 200.0
    prior: float = 8.0
    depths: int = 8
    awaited: int = 4096

    def __post_init__(self) -> None:
        if not 0 < self.enough <= 1 or self.memory < 1 or self.prior <= 0 or self.depths < 1 or self.awaited < 1:
            raise ValueError(f"need 0 < enough <= 1, memory >= 1 and the other fields positive, got {self}")


class Calibration:
    """How much of what a drafter's probabilities promised came true, lately.

    Streams share one: an update that another thread overwrites is one observation fewer, nothing worse.
    """

    def __init__(self, prior: float, memory: float) -> None:
        self._promised = self._kept = prior
        self._fade = 1 - 1 / memory

    def corrected(self, prob: float) -> float:
        return min(0.999, max(1e-6, prob * self._kept / self._promised))

    def record(self, prob: float, came_true: bool) -> None:
        self._promised = self._promised * self._fade + prob
        self._kept = self._kept * self._fade + came_true


@dataclass
class Credit:
    """What one drafter of a mixture contributed: proposals put to the test, and how many of them were committed."""

    name: str
    tested: int = 0
    committed: int = 0


@dataclass(eq=False)
class _Node:
    """A candidate token with what each drafter thought of it."""

    children: dict[int, _Node] = field(default_factory=dict)
    opinions: dict[int, tuple[float, int]] = field(default_factory=dict)  # drafter -> (its probability, depth then)

    def child(self, token: int) -> _Node:
        return self.children.setdefault(token, _Node())

    def absorb(self, other: _Node) -> int:
        """Take over another node's subtree, its opinions replacing older ones; returns how many nodes were visited."""
        visited, pairs = 0, [(self, other)]
        while pairs:
            mine, theirs = pairs.pop()
            mine.opinions.update(theirs.opinions)
            pairs += [(mine.child(token), child) for token, child in theirs.children.items()]
            visited += 1
        return visited


class MixedDrafter(Drafter):
    """Merges the proposals of several drafters, cheapest first.

    A token that several propose below the same parent is one candidate, as likely as the best calibrated of them says.
    What a drafter learns about itself comes from committed tokens only: for each proposal whose parent was committed,
    whether it was, too.

    :param drafters: from the cheapest to the most expensive
    """

    def __init__(self, drafters: Sequence[Drafter], config: MixConfig | None = None) -> None:
        if not drafters:
            raise ValueError("a mixture needs at least one drafter")
        self.drafters = tuple(drafters)
        self.config = config or MixConfig()
        self.name = f"mix({'+'.join(drafter.name for drafter in drafters)})"
        self.instant = all(drafter.instant for drafter in drafters)
        self.credits = tuple(Credit(drafter.name) for drafter in drafters)
        self._calibrations = [
            [Calibration(self.config.prior, self.config.memory) for _ in range(self.config.depths)] for _ in drafters
        ]
        self._awaited, self._awaited_size = _Node(), 0

    def fork(self) -> MixedDrafter:
        """A mixture for another stream, of forks of these drafters.

        :raises ValueError: one of them cannot be forked
        """
        return self.with_drafters([fork(drafter) for drafter in self.drafters])

    def with_drafters(self, drafters: Sequence[Drafter]) -> MixedDrafter:
        """A mixture of like drafters that shares and continues what this one has learnt about them."""
        if [drafter.name for drafter in drafters] != [drafter.name for drafter in self.drafters]:
            raise ValueError(f"expected the drafters of {self.name}, got {[drafter.name for drafter in drafters]}")
        twin = MixedDrafter(drafters, self.config)
        twin._calibrations = self._calibrations
        return twin

    def couple(self, noise: NoiseSource | None, temperature: float) -> None:
        for drafter in self.drafters:
            couple(drafter, noise, temperature)

    def start(self, prompt: Sequence[int]) -> None:
        self._awaited, self._awaited_size = _Node(), 0
        for drafter in self.drafters:
            drafter.start(prompt)

    def observe(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._settle(token)
        for drafter in self.drafters:
            drafter.observe(tokens)

    def close(self) -> None:
        for drafter in self.drafters:
            drafter.close()

    def propose(
        self, path: Sequence[int], budget: int, *, max_depth: int = 64, interrupted: Callable[[], bool] = never
    ) -> list[Proposal]:
        anchor = _Node()
        merged: list[Proposal] = []
        for number, drafter in enumerate(self.drafters):
            if number and (interrupted() or self._enough(merged, budget)):
                break
            proposals = drafter.propose(path, budget, max_depth=max_depth, interrupted=interrupted)
            if proposals:
                self._insert(anchor, number, proposals)
                merged = self._select(anchor, budget)
        self._await(path, anchor)
        return merged

    def proposer_of(self, tokens: Sequence[int]) -> tuple[str, ...]:
        """Names of the drafters that proposed the last of `tokens`, candidates that follow the committed ones."""
        node = self._awaited
        for token in tokens:
            if token not in node.children:
                return ()
            node = node.children[token]
        return tuple(self.drafters[number].name for number in sorted(node.opinions))

    def _insert(self, anchor: _Node, number: int, proposals: Sequence[Proposal]) -> None:
        nodes: list[tuple[_Node, int]] = []
        for proposal in proposals:
            parent, depth = nodes[proposal.parent] if proposal.parent >= 0 else (anchor, 0)
            node = parent.child(proposal.token)
            node.opinions[number] = (proposal.prob, depth + 1)
            nodes.append((node, depth + 1))

    def _select(self, anchor: _Node, budget: int) -> list[Proposal]:
        """The likeliest `budget` candidates by the product of corrected probabilities along their chains."""
        proposals: list[Proposal] = []
        ages = count()
        frontier: list[tuple[float, int, Proposal, _Node]] = []
        node, parent, chain_prob = anchor, -1, 1.0
        while True:
            probs = {token: self._likelihood(child) for token, child in node.children.items()}
            excess = max(1.0, sum(probs.values()))  # drafters that contradict each other cannot all be right
            for token, prob in probs.items():
                proposal = Proposal(parent, token, prob / excess)
                heapq.heappush(frontier, (-chain_prob * proposal.prob, next(ages), proposal, node.children[token]))
            if not frontier or len(proposals) >= budget:
                return proposals
            negative, _, proposal, node = heapq.heappop(frontier)
            parent, chain_prob = len(proposals), -negative
            proposals.append(proposal)

    def _likelihood(self, node: _Node) -> float:
        return max(self._calibration(number, depth).corrected(prob) for number, (prob, depth) in node.opinions.items())

    def _calibration(self, number: int, depth: int) -> Calibration:
        return self._calibrations[number][min(depth, self.config.depths) - 1]

    def _enough(self, proposals: list[Proposal], budget: int) -> bool:
        if len(proposals) < budget:
            return False
        chains: list[float] = []
        for proposal in proposals:
            chains.append(proposal.prob * (chains[proposal.parent] if proposal.parent >= 0 else 1.0))
        return min(chains, default=1.0) >= self.config.enough

    def _await(self, path: Sequence[int], anchor: _Node) -> None:
        if not anchor.children:
            return
        if self._awaited_size > self.config.awaited:
            self._awaited, self._awaited_size = _Node(), 0
        node = self._awaited
        for token in path:
            node = node.child(token)
        self._awaited_size += len(path) + node.absorb(anchor)

    def _settle(self, token: int) -> None:
        """A token was committed: all proposals for its position are judged."""
        for proposed, node in self._awaited.children.items():
            for number, (prob, depth) in node.opinions.items():
                self._calibration(number, depth).record(prob, proposed == token)
                self.credits[number].tested += 1
                self.credits[number].committed += proposed == token
        self._awaited = self._awaited.children.get(token, _Node())
        if not self._awaited.children:
            self._awaited_size = 0
