"""Hedges: proposals drafted in advance for outcomes other than the expected one, while a run is in flight.

How many outcomes to prepare for at each depth follows the geometric fan-out of Saguaro (Speculative Speculative
Decoding, ICLR 2026, Theorem 12); how many branches an uncertain token deserves follows SpecBranch (ICLR 2026).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bloombee_spec.draft.base import Proposal


def fan_out(acceptance: float, chain: int, budget: float, reuse: float) -> list[float]:
    """How many outcomes to prepare for a run of `chain` candidates that ends after 0, 1, ..., `chain` accepted ones.

    `F_k = F_0 a^(k/(1+r))` for k < K, and `F_K = F_0 a^(K/(1+r)) (1-a)^(-1/(1+r))` since the whole run is accepted
    with a^K, not a^K (1-a). The sum is `budget`.

    :param acceptance: a, chance that a candidate is committed given that its parent is, 0 .. 1
    :param chain: K, candidates in the run
    :param budget: B, outcomes to prepare for altogether
    :param reuse: r > 0, exponent of the law by which more guesses of the committed token miss less: `miss = guesses **
        -r`
    :returns: K + 1 numbers, not rounded (see `whole`)
    """
    if not 0 <= acceptance <= 1 or chain < 0 or budget < 0 or reuse <= 0:
        raise ValueError(
            "need 0 <= acceptance <= 1, chain >= 0, budget >= 0 and reuse > 0, got "
            f"{acceptance}, {chain}, {budget}, {reuse}"
        )
    if acceptance == 1:  # a run that never fails needs nothing but its end
        return [0.0] * chain + [float(budget)]
    ratio = acceptance ** (1 / (1 + reuse))
    weights = [ratio**k for k in range(chain)]
    weights.append(ratio**chain * (1 - acceptance) ** (-1 / (1 + reuse)))
    return [budget * weight / sum(weights) for weight in weights]


def whole(shares: Sequence[float]) -> list[int]:
    """Round non-negative shares to whole numbers with the same sum (rounded down), largest remainders first."""
    counts = [int(share) for share in shares]
    left = int(sum(shares) + 1e-9) - sum(counts)
    by_remainder = sorted(range(len(shares)), key=lambda i: counts[i] - shares[i])
    for i in by_remainder[:left]:
        counts[i] += 1
    return counts


def branch_count(prob: float, most: int) -> int:
    """Branches to draft at a token whose drafter gave it `prob`: `max(1, floor(most (1 - prob)))`."""
    if not 0 <= prob <= 1 or most < 1:
        raise ValueError(f"need 0 <= prob <= 1 and most >= 1, got {prob} and {most}")
    return max(1, int(most * (1 - prob) + 1e-9))


@dataclass
class HedgeStats:
    """What became of the hedges; `hits + misses` is how often one was asked for."""

    stored: int = 0
    hits: int = 0
    misses: int = 0
    obsolete: int = 0  # the committed tokens made the outcome impossible
    evicted: int = 0  # to make room

    @property
    def hit_rate(self) -> float:
        asked = self.hits + self.misses
        return self.hits / asked if asked else 0.0


class HedgeCache:
    """Prepared proposals by outcome: which candidates will have been committed, and which token then missed.

    An outcome is written as tokens that follow the committed ones. Committing a token shortens the outcomes that it
    confirms and drops those that it contradicts, so what is kept can always still happen.

    :param capacity: outcomes kept at most; the oldest give way
    """

    def __init__(self, capacity: int = 256) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self.capacity = capacity
        self.stats = HedgeStats()
        self._prepared: dict[tuple[int, ...], tuple[Proposal, ...]] = {}

    def __len__(self) -> int:
        return len(self._prepared)

    def __contains__(self, outcome: Sequence[int]) -> bool:
        return tuple(outcome) in self._prepared

    def put(self, path: Sequence[int], token: int, proposals: Sequence[Proposal]) -> None:
        """Prepare for `token` being committed after the candidates of `path` were.

        :param path: candidates from the first uncommitted position to the parent of the miss
        :param proposals: what to send then; their anchor is `token`
        """
        outcome = (*path, token)
        if self._prepared.pop(outcome, None) is None:
            self.stats.stored += 1
        self._prepared[outcome] = tuple(proposals)
        while len(self._prepared) > self.capacity:
            del self._prepared[next(iter(self._prepared))]
            self.stats.evicted += 1

    def miss(self, token: int) -> tuple[Proposal, ...] | None:
        """Commit a token that is not among the candidates: what was prepared for it, or None."""
        prepared = self._prepared.pop((token,), None)
        if prepared is None:
            self.stats.misses += 1
        else:
            self.stats.hits += 1
        self.commit(token)
        return prepared

    def commit(self, token: int) -> None:
        """Commit a token, without asking for what was prepared for it."""
        confirmed = {outcome[1:]: proposals for outcome, proposals in self._prepared.items() if outcome[0] == token}
        confirmed.pop((), None)
        self.stats.obsolete += len(self._prepared) - len(confirmed)
        self._prepared = confirmed

    def clear(self) -> None:
        """Forget all outcomes, after a rewind."""
        self.stats.obsolete += len(self._prepared)
        self._prepared = {}
