"""What a forward costs: seconds as a function of the rows in it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

CLIP = 4.0  # one sample moves a prediction as if it were at most this many times larger or smaller


@dataclass(frozen=True, slots=True)
class ComputeProfile:
    """Piecewise-linear time of one forward at a stage (or of one drafter step).

    :param points: `(rows, seconds)`, rows strictly increasing, seconds non-decreasing; usually measured at 1, 8 and
        64 rows. Beyond the last point the last slope continues; below the first its time holds, since a forward of
        one row already reads every weight.
    :raises ValueError: no points, a value that is negative or not finite, or an order that cannot be
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if not self.points:
            raise ValueError("a compute profile needs at least one (rows, seconds) point")
        for rows, seconds in self.points:
            if not (math.isfinite(rows) and rows > 0 and math.isfinite(seconds) and seconds >= 0):
                raise ValueError(f"({rows}, {seconds}) is not a positive number of rows and a time in seconds")
        for (rows, seconds), (more_rows, more_seconds) in zip(self.points, self.points[1:]):
            if more_rows <= rows or more_seconds < seconds:
                raise ValueError(f"points must rise: {more_rows} rows in {more_seconds} s after {rows} in {seconds}")

    @classmethod
    def flat(cls, seconds: float) -> ComputeProfile:
        """The same time whatever the number of rows."""
        return cls(((1.0, seconds),))

    @classmethod
    def measured(cls, samples: Mapping[int, float]) -> ComputeProfile:
        """From `{rows: seconds}`; a larger batch that was measured faster by noise is levelled."""
        ordered = sorted((float(rows), float(seconds)) for rows, seconds in samples.items())
        times = _non_decreasing([seconds for _, seconds in ordered])
        return cls(tuple((rows, seconds) for (rows, _), seconds in zip(ordered, times)))

    def time(self, rows: float) -> float:
        """Seconds for one forward of `rows` rows; 0 for no rows."""
        if rows <= 0:
            return 0.0
        return sum(weight * self.points[i][1] for i, weight in self._hat(rows))

    def updated(self, rows: float, seconds: float, weight: float = 0.1) -> ComputeProfile:
        """The profile after one more measured forward; the neighbouring points move, the rest stay.

        One normalised least-mean-squares step: the prediction at `rows` moves by `weight` of its (clipped) error.
        """
        if not (rows > 0 and math.isfinite(seconds) and seconds >= 0 and 0 <= weight <= 1):
            raise ValueError(f"cannot learn from {rows} rows in {seconds} s with weight {weight}")
        predicted = self.time(rows)
        if predicted > 0:
            seconds = min(max(seconds, predicted / CLIP), predicted * CLIP)
        hat = self._hat(rows)
        norm = sum(share * share for _, share in hat)
        times = [known for _, known in self.points]
        for i, share in hat:
            times[i] = max(0.0, times[i] + weight * share * (seconds - predicted) / norm)
        return ComputeProfile(tuple((at, known) for (at, _), known in zip(self.points, _non_decreasing(times))))

    def _hat(self, rows: float) -> tuple[tuple[int, float], ...]:
        """Which points speak for `rows`, and with which share."""
        last = len(self.points) - 1
        if last == 0 or rows <= self.points[0][0]:
            return ((0, 1.0),)
        upper = next((i for i in range(1, last + 1) if rows <= self.points[i][0]), last)
        low, high = self.points[upper - 1][0], self.points[upper][0]
        share = (rows - low) / (high - low)
        return ((upper - 1, 1.0 - share), (upper, share))


def _non_decreasing(values: list[float]) -> list[float]:
    """The closest non-decreasing sequence (pool adjacent violators)."""
    pools: list[list[float]] = []  # [mean, count]
    for value in values:
        pools.append([value, 1.0])
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            mean, count = pools.pop()
            pools[-1] = [(pools[-1][0] * pools[-1][1] + mean * count) / (pools[-1][1] + count), pools[-1][1] + count]
    return [mean for mean, count in pools for _ in range(int(count))]
