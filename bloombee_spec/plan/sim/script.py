"""What the target will say, and what the scripted drafter knows of it."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from bloombee_spec.plan.acceptance import Rates


class Script:
    """At each position the target's token has some rank in the drafter's list, or is not in it.

    The rank is drawn from the acceptance at the depth where the list was made, with one uniform number per position:
    the same for every policy and every timing, so that policies are compared on the same text.

    :param phases: `(first position, rates)`, in order; the drafter's quality may change along the text
    """

    def __init__(self, phases: Sequence[tuple[int, Rates]], seed: int):
        if not phases or phases[0][0] > 0:
            raise ValueError("a script needs acceptance rates from position 0 on")
        self._starts = [start for start, _ in phases]
        self._sums = [[list(accumulate(row)) for row in rates] for _, rates in phases]
        self._random = random.Random(seed)
        self._draws: list[float] = []

    def rank(self, position: int, depth: int) -> int | None:
        """Rank of the target's token among the candidates drafted for `position` from `depth` layers above."""
        while len(self._draws) <= position:
            self._draws.append(self._random.random())
        rows = self._sums[bisect_right(self._starts, position) - 1]
        sums = rows[min(depth, len(rows)) - 1]
        rank = bisect_right(sums, self._draws[position])
        return rank if rank < len(sums) else None


def geometric_rates(hit: float, siblings: float = 0.6, fall: float = 0.4, ranks: int = 8, depths: int = 1) -> Rates:
    """Acceptance rates of a typical drafter: the favourite is right with chance `hit`; of the rest, the next ranks
    hold the share `siblings`, falling by `fall` per rank.

    :returns: `[depths][ranks]`
    """
    if not 0 <= hit <= 1 or not 0 <= siblings <= 1 or not 0 <= fall < 1 or ranks < 1:
        raise ValueError(f"no acceptance rates for hit={hit}, siblings={siblings}, fall={fall}, ranks={ranks}")
    first = (1.0 - hit) * siblings * (1.0 - fall) if hit > 0 else 0.0
    row = (hit, *(min(hit, first * fall**i) for i in range(ranks - 1)))
    return (row,) * depths
