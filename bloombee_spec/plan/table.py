"""The review's design chart: best tree size, widest layer and break-even for a measured growth curve and a uniform
ring.

Conventions of the review ("Laps and Bytes", joint sizing): a lap of n nodes is `Σ_i [hop_i + n·s_h/BW_i] + compute(n)
+ return`, n counts every row of the lap, and a curve `L(n)` gives the tokens per lap.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from bloombee_spec.plan.compute import ComputeProfile
from bloombee_spec.plan.curve import Curve
from bloombee_spec.plan.route import Leg, Route, Stage, lap_time


@dataclass(frozen=True, slots=True)
class Ring:
    """A uniform ring in the review's terms.

    :param hops: legs that carry rows
    :param hop_s: one-way delay of each, seconds
    :param row_bytes: s_h, bytes per node and hop
    :param return_s: T_return, seconds; the review's chart has none
    :param compute: one forward at one stage; there are as many stages as hops
    """

    hops: int
    hop_s: float
    row_bytes: float
    return_s: float = 0.0
    compute: ComputeProfile = field(default_factory=lambda: ComputeProfile.flat(0.0))

    def __post_init__(self) -> None:
        if self.hops < 1 or not self.row_bytes > 0:
            raise ValueError(f"{self.hops} hops with {self.row_bytes} bytes per node; both must be positive")

    def route(self, bandwidth_bps: float) -> Route:
        leg = Leg(self.hop_s, bandwidth_bps, self.row_bytes, frame_bytes=0.0)
        back = Leg(self.return_s, bandwidth_bps, 0.0, frame_bytes=0.0)
        return Route((Stage(self.compute),) * self.hops, leg, (leg,) * (self.hops - 1), back)


@dataclass(frozen=True, slots=True)
class SizingRow:
    """One bandwidth of the table.

    :param best_power: n* on the grid of powers of two, `power_tok_s` with it
    :param best: n* among all whole numbers, `tok_s` with it
    :param off_tok_s: one token per lap
    :param widest: W*, the largest layer whose serialisation per hop is at most the hop's delay
    :param widest_exact: `BW·hop/(8·s_h)` before rounding
    :param first_gain: the smallest n that beats one token per lap, None if none does
    :param last_gain: the largest one, up to the largest size searched
    :param break_even_bps: bandwidth above which a tree of n* rows pays at all; infinite if never
    :param continuous: n* among all real numbers
    """

    bandwidth_bps: float
    best_power: int
    power_tok_s: float
    best: int
    tok_s: float
    off_tok_s: float
    widest: int
    widest_exact: float
    first_gain: int | None
    last_gain: int | None
    break_even_bps: float
    continuous: float


def bounded(curve: Curve) -> Curve:
    """A lap of n rows yields at least the verifier's own token and at most n, whatever a fitted curve says at small
    n.
    """
    return lambda n: max(1.0, min(n, curve(n)))


def size_table(curve: Curve, ring: Ring, bandwidths_bps: list[float], largest: int = 4096) -> list[SizingRow]:
    """A row per bandwidth.

    :param curve: expected tokens per lap of a tree of n nodes
    :raises CurveError: the curve has no value somewhere between 1 and `largest`
    """
    if largest < 1:
        raise ValueError(f"a largest size of {largest}")
    tokens = bounded(curve)
    growth = [0.0, *(tokens(n) for n in range(1, largest + 1))]
    return [
        _row(growth, ring, bandwidth, continuous_optimum(curve, ring, bandwidth, largest))
        for bandwidth in bandwidths_bps
    ]


def _row(growth: list[float], ring: Ring, bandwidth: float, continuous: float) -> SizingRow:
    route = ring.route(bandwidth)
    rate = [0.0, *(growth[n] / lap_time(n, route) for n in range(1, len(growth)))]
    sizes = range(1, len(growth))
    best = max(sizes, key=rate.__getitem__)
    power = max((2**i for i in range(len(growth).bit_length()) if 2**i < len(growth)), key=rate.__getitem__)
    gains = [n for n in sizes if n > 1 and rate[n] > rate[1]]
    exact = widest_layer(bandwidth, ring.hop_s, ring.row_bytes)
    return SizingRow(
        bandwidth_bps=bandwidth,
        best_power=power,
        power_tok_s=rate[power],
        best=best,
        tok_s=rate[best],
        off_tok_s=rate[1],
        widest=math.floor(exact),
        widest_exact=exact,
        first_gain=gains[0] if gains else None,
        last_gain=gains[-1] if gains else None,
        break_even_bps=break_even_bandwidth(growth[best], best, ring),
        continuous=continuous,
    )


def widest_layer(bandwidth_bps: float, hop_s: float, row_bytes: float) -> float:
    """`W* = BW·hop/(8·s_h)`: the width at which serialisation per hop reaches the hop's delay, before rounding."""
    return bandwidth_bps * hop_s / (8.0 * row_bytes)


def break_even_bandwidth(tokens: float, size: int, ring: Ring) -> float:
    """Bandwidth (bit/s) above which a tree of `size` rows with `tokens` expected tokens beats one token per lap.

    From `L/T(n) > 1/T(1)`: `BW > 8·s_h·hops·(n − L) / ((L − 1)·Σ legs + L·compute(1) − compute(n))`; infinite when the
    denominator is not positive (never pays), 0 when each row yields a token.
    """
    legs = ring.hops * ring.hop_s + ring.return_s
    one, all_rows = (ring.hops * ring.compute.time(rows) for rows in (1, size))
    saved = (tokens - 1.0) * legs + tokens * one - all_rows
    extra = 8.0 * ring.row_bytes * ring.hops * (size - tokens)
    if saved <= 0:
        return math.inf
    return max(0.0, extra / saved)


def cheapest_break_even(curve: Curve, ring: Ring, largest: int = 4096) -> float:
    """Bandwidth (bit/s) above which some tree beats one token per lap; infinite if none ever does."""
    tokens = bounded(curve)
    return min((break_even_bandwidth(tokens(n), n, ring) for n in range(2, largest + 1)), default=math.inf)


def continuous_optimum(curve: Curve, ring: Ring, bandwidth_bps: float, largest: float = 4096.0) -> float:
    """n* when n may be any real number: golden-section search on log n around the best point of a coarse grid."""
    route = ring.route(bandwidth_bps)
    tokens = bounded(curve)

    def rate(logarithm: float) -> float:
        n = math.exp(logarithm)
        return tokens(n) / lap_time(n, route)

    grid = [math.log(largest) * i / 400 for i in range(401)]
    peak = max(range(len(grid)), key=lambda i: rate(grid[i]))
    return math.exp(_golden(rate, grid[max(0, peak - 1)], grid[min(len(grid) - 1, peak + 1)]))


def _golden(function: Callable[[float], float], low: float, high: float) -> float:
    ratio = (math.sqrt(5.0) - 1.0) / 2.0
    for _ in range(60):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        if function(left) < function(right):
            low = left
        else:
            high = right
    return (low + high) / 2.0
