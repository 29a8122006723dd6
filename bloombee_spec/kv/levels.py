"""How a chunk of KV travels, and which way pays: lossless, three lossy levels, or token ids only.

Link and receiver work at the same time: while later chunks are on the wire, the receiver decodes earlier ones or
recomputes the first ones from their ids. So the time of a plan is that of its busiest part, not the sum of all.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

MAX_PLANNED_CHUNKS = 1024


class Level(enum.IntEnum):
    """From exact to cheap; the number is the one on the wire. `RECOMPUTE` carries ids and is as exact as a replay."""

    LOSSLESS = 0
    INT8 = 1
    FINE = 2
    COARSE = 3
    RECOMPUTE = 4

    @property
    def lossless(self) -> bool:
        return self in EXACT_LEVELS


EXACT_LEVELS = frozenset({Level.LOSSLESS, Level.RECOMPUTE})
LOSSY_LEVELS = frozenset({Level.INT8, Level.FINE, Level.COARSE})


@dataclass(frozen=True, slots=True)
class LevelCost:
    """What a level costs for one token of the span, as measured by the caller.

    :param token_bytes: bytes on the wire per token
    :param encode_s: seconds per token at the sender
    :param decode_s: seconds per token at the receiver; for `RECOMPUTE`, of the whole prefill that it takes
    """

    token_bytes: float
    encode_s: float = 0.0
    decode_s: float = 0.0

    def __post_init__(self) -> None:
        if not all(0 <= cost < math.inf for cost in (self.token_bytes, self.encode_s, self.decode_s)):
            raise ValueError(f"a level cannot cost {self}")


@dataclass(frozen=True, slots=True)
class LevelPlan:
    """:param levels: one per chunk, in order of position; recomputed chunks come first
    :param seconds: estimated time until the receiver has everything
    """

    levels: tuple[Level, ...]
    seconds: float

    @property
    def lossless(self) -> bool:
        return all(level.lossless for level in self.levels)


def plan_seconds(
    chunks: Sequence[int],
    levels: Sequence[Level],
    costs: Mapping[Level, LevelCost],
    bandwidth_bps: float,
    delay_s: float = 0.0,
) -> float:
    """Seconds until all chunks are in place. Sender, link and receiver each take the chunks in order, one at a time.

    :param chunks: tokens of each chunk
    """
    encoded = arrived = done = 0.0
    for tokens, level in zip(chunks, levels):
        cost = costs[level]
        encoded += tokens * cost.encode_s
        arrived = max(encoded, arrived) + 8.0 * tokens * cost.token_bytes / bandwidth_bps
        done = max(arrived + delay_s, done) + tokens * cost.decode_s
    return done


def choose_levels(
    chunks: Sequence[int],
    costs: Mapping[Level, LevelCost],
    bandwidth_bps: float,
    *,
    allow_lossy: bool = False,
    deadline_s: float | None = None,
    delay_s: float = 0.0,
) -> LevelPlan:
    """The level of each chunk.

    Without a deadline, the fastest plan; of equally fast ones the most exact. With one, the most exact plan that
    keeps it: first by its worst level, then by how many chunks, the last ones first (a model looks most at what is
    near), can afford a better level. If none keeps it, the fastest. Called again for the chunks that are left whenever
    the measured bandwidth moves.

    Chunks to recompute are the first ones, since a chunk's rows need the KV before them.

    :param chunks: tokens of each chunk, in order of position
    :param costs: the levels on offer
    :param allow_lossy: False leaves the exact levels only
    :raises ValueError: no level is allowed, or a number is out of range
    """
    if not 0 < bandwidth_bps < math.inf or not 0 <= delay_s < math.inf:
        raise ValueError(f"no plan for a link of {bandwidth_bps} bit/s and {delay_s} s")
    if len(chunks) > MAX_PLANNED_CHUNKS or min(chunks, default=1) < 1:
        raise ValueError(f"{len(chunks)} chunks, the smallest of {min(chunks)} tokens: nothing that can be planned")
    sent = sorted(level for level in costs if level is not Level.RECOMPUTE and (allow_lossy or level.lossless))
    recompute = Level.RECOMPUTE in costs
    if not sent and not recompute:
        raise ValueError(f"none of the levels {[level.name for level in costs]} is allowed (lossy: {allow_lossy})")
    if not chunks:
        return LevelPlan((), 0.0)

    def price(levels: Sequence[Level]) -> LevelPlan:
        return LevelPlan(tuple(levels), plan_seconds(chunks, levels, costs, bandwidth_bps, delay_s))

    plans = [price([Level.RECOMPUTE] * len(chunks))] if recompute else []
    for level in sent:
        plans += (price(_split(len(chunks), first, level)) for first in (_splits(len(chunks)) if recompute else (0,)))
    fastest = min(plans, key=lambda plan: (plan.seconds, _worst(plan)))
    if deadline_s is None or fastest.seconds > deadline_s:
        return fastest
    in_time = [plan for plan in plans if plan.seconds <= deadline_s]
    best = min(in_time, key=lambda plan: (_worst(plan), plan.seconds))
    return _upgraded(best, sent, price, deadline_s)


def _splits(count: int) -> Sequence[int]:
    """How many chunks may be recomputed: every number while there are few, 64 evenly spread ones beyond."""
    return sorted({round(count * part / 64) for part in range(64)}) if count > 64 else range(count)


def _split(count: int, recomputed: int, level: Level) -> list[Level]:
    return [Level.RECOMPUTE] * recomputed + [level] * (count - recomputed)


def _worst(plan: LevelPlan) -> int:
    """Quality of the worst level: 0 exact, then in the order of the levels."""
    return max((0 if level.lossless else int(level)) for level in plan.levels)


def _upgraded(
    plan: LevelPlan, sent: Sequence[Level], price: Callable[[Sequence[Level]], LevelPlan], deadline_s: float
) -> LevelPlan:
    """As many of the last chunks as the deadline allows at a better level, by bisection; of two levels that reach
    equally far, the more exact."""
    best, reach = plan, 0
    for better in sent:
        if better >= _worst(plan):
            break
        low, high = 0, sum(level is not Level.RECOMPUTE for level in plan.levels)
        while low < high:
            middle = (low + high + 1) // 2
            trial = price([*plan.levels[: len(plan.levels) - middle], *[better] * middle])
            if trial.seconds > deadline_s:
                high = middle - 1
            else:
                low = middle
                if middle > reach:
                    best, reach = trial, middle
    return best
