"""How often the target agrees with the drafter: by depth, sibling rank and proposer."""

from __future__ import annotations

from dataclasses import dataclass, field

Rates = tuple[tuple[float, ...], ...]  # [depth][rank]: chance that this sibling is committed once its parent is

RANKS = 16
DEPTHS = 16
MAX_PROPOSERS = 16
EVERYBODY = ""


FAVOURITE = 0.5  # guess for the best sibling before anything is known
FALL = 0.3  # guess for a sibling relative to the one ranked above it
SECOND = 0.15  # an untried sibling is never guessed above this


@dataclass(slots=True)
class _Counts:
    """Discounted successes and trials per rank, pooled over depths and per depth."""

    hits: list[float] = field(default_factory=lambda: [0.0] * RANKS)
    trials: list[float] = field(default_factory=lambda: [0.0] * RANKS)
    deep_hits: list[list[float]] = field(default_factory=lambda: [[0.0] * RANKS for _ in range(DEPTHS)])
    deep_trials: list[list[float]] = field(default_factory=lambda: [[0.0] * RANKS for _ in range(DEPTHS)])

    def scale(self, factor: float) -> None:
        for row in (self.hits, self.trials, *self.deep_hits, *self.deep_trials):
            row[:] = [value * factor for value in row]


class AcceptanceModel:
    """Beta-smoothed acceptance with exponential forgetting.

    A rank's estimate starts from a guess with the weight of `prior_weight` verdicts: one half for the favourite, and
    `FALL` times the estimate of the rank above for the others. That is hopeful enough to try a width once, and weak
    enough for a drafter that is never right to be found out within a dozen laps. A (depth, rank) cell starts from its
    rank's pooled estimate with the weight of `pool_weight` verdicts. Forgetting advances with verdicts, never with
    time, so estimates stand still while speculation is off. An update costs a few additions.

    :param half_life: verdicts after which a verdict counts half
    """

    def __init__(self, half_life: float = 128.0, prior_weight: float = 0.35, pool_weight: float = 8.0):
        if half_life < 1 or prior_weight <= 0 or pool_weight <= 0:
            raise ValueError("half_life must be at least 1 verdict, the weights above 0")
        self.prior_weight, self.pool_weight = prior_weight, pool_weight
        self._growth = 2.0 ** (1.0 / half_life)  # instead of shrinking all counts, later verdicts weigh more
        self._unit = 1.0
        self._counts: dict[str, _Counts] = {EVERYBODY: _Counts()}
        self.verdicts = 0

    def observe(self, offered: int, hit: int | None, depth: int = 1, proposer: str = EVERYBODY) -> None:
        """One verdict: the children of a node were judged.

        :param offered: how many ranks the drafter was asked for here, sent or not; ranks it had nothing for count as
            tried
        :param hit: the rank that was committed, or None when it was none of them
        :param depth: layers below the committed root at which the children were drafted, from 1
        :param proposer: who proposed them; at most 16 names are told apart, the rest only counts for everybody
        :raises ValueError: `hit` was not among the offered
        """
        if offered < 1 or depth < 1 or (hit is not None and not 0 <= hit < offered):
            raise ValueError(f"rank {hit} of {offered} siblings at depth {depth} cannot have been committed")
        if proposer not in self._counts and len(self._counts) <= MAX_PROPOSERS:
            self._counts[proposer] = _Counts()
        row = min(depth, DEPTHS) - 1
        for name in {EVERYBODY, proposer} & self._counts.keys():
            counts = self._counts[name]
            for rank in range(min(offered, RANKS)):
                counts.trials[rank] += self._unit
                counts.deep_trials[row][rank] += self._unit
            if hit is not None and hit < RANKS:
                counts.hits[hit] += self._unit
                counts.deep_hits[row][hit] += self._unit
        self.verdicts += 1
        self._unit *= self._growth
        if self._unit > 1e9:
            for counts in self._counts.values():
                counts.scale(1.0 / self._unit)
            self._unit = 1.0

    def rate(self, rank: int, depth: int = 1, proposer: str = EVERYBODY) -> float:
        """Estimated chance that the sibling of this rank is committed, given that its parent is."""
        return self._row(depth, proposer)[rank] if rank < RANKS else 0.0

    def rates(self, proposer: str = EVERYBODY) -> Rates:
        """All estimates, `[DEPTHS][RANKS]`; each row falls (best sibling first) and sums to at most 1."""
        return tuple(self._row(depth, proposer) for depth in range(1, DEPTHS + 1))

    def hit_rate(self, width: int = RANKS, proposer: str = EVERYBODY) -> float:
        """Chance that the next token is among the `width` best children, at depth 1."""
        return min(1.0, sum(self._row(1, proposer)[:width]))

    def proposers(self) -> list[str]:
        return [name for name in self._counts if name != EVERYBODY]

    def _row(self, depth: int, proposer: str) -> tuple[float, ...]:
        counts = self._counts.get(proposer, self._counts[EVERYBODY])
        deep_hits, deep_trials = counts.deep_hits[min(depth, DEPTHS) - 1], counts.deep_trials[min(depth, DEPTHS) - 1]
        prior, pool = self.prior_weight * self._unit, self.pool_weight * self._unit
        row: list[float] = []
        pooled = FAVOURITE
        for rank in range(RANKS):
            guess = FAVOURITE if rank == 0 else min(SECOND, FALL * pooled)
            pooled = (counts.hits[rank] + prior * guess) / (counts.trials[rank] + prior)
            row.append((deep_hits[rank] + pool * pooled) / (deep_trials[rank] + pool))
        row.sort(reverse=True)
        total = sum(row)
        return tuple(rate / total for rate in row) if total > 1.0 else tuple(row)
