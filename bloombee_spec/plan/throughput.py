"""Expected tokens per second of each way to decode, in closed form.

All three are renewal rewards: a cycle runs from one miss at the verifier to the next; its tokens are `Σ_d C_d` with
`C_d` the chance that the first d committed tokens were all among the candidates (C_0 = 1: the verifier's own token),
and its time adds up when the layers arrive. The row of the committed token is back at the verifier after a plain lap
`A0`; the first layer of candidates after `A1`, which includes the leg to the client, where the first stage restarts
by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from bloombee_spec.plan.acceptance import Rates
from bloombee_spec.plan.decision import DraftCost, Limits
from bloombee_spec.plan.route import Route, plain_lap
from bloombee_spec.plan.trees import beam_coverage


def expected_run(hit_rate: float) -> float:
    """`E[run] = h/(1−h)`: hits between two misses."""
    if not 0 <= hit_rate < 1:
        raise ValueError(f"a hit rate of {hit_rate}; a run has an end for 0 <= h < 1 only")
    return hit_rate / (1.0 - hit_rate)


def stream_formula(hit_rate: float, lap_s: float, layer_s: float, burst: int = 0) -> float:
    """`(E[run]+1) / (T_lap + E[run]·τ)`, tokens per second of an ideal stream.

    :param burst: layers drafted before the miss was known; they leave together, which saves τ each when it is reached:
        `E[max(0, run − burst)] = h^(burst+1)/(1−h)`
    """
    run = expected_run(hit_rate)
    return (run + 1.0) / (lap_s + hit_rate**burst * run * layer_s)


def off_rate(route: Route) -> float:
    """One token per plain lap."""
    return 1.0 / plain_lap(route)


def _cycle_starts(route: Route, rows: int, pipe_s: float, draft_s: float) -> tuple[float, float]:
    """`(A0, A1)`: when the committed token's row and the first candidates reach the verdict, seconds after a miss."""
    first = plain_lap(route)
    candidates = route.downlink.time(1) + draft_s + route.uplink.time(rows) + pipe_s
    if route.restart is None and draft_s == 0:  # one frame carries both
        first = candidates = route.downlink.time(1) + route.uplink.time(rows + 1) + route.pipe_time(rows + 1)
    return first, max(first, candidates)


def tree_rate(tokens: float, covered: float, size: int, route: Route, draft_s: float) -> float:
    """Synchronous tree: `L(n) / (A0 + C_1·(A1 − A0))`, tokens per second.

    :param tokens: expected tokens of the tree, L(n)
    :param covered: C_1, the chance that the first token is among the root's children; otherwise the lap ends at A0
    :param draft_s: seconds to draft it after the verdict
    """
    pipe = route.pipe_time(size) + sum(
        stage.crowding(1.0) for stage in route.stages
    )  # beside the committed token's row
    first, candidates = _cycle_starts(route, size, pipe, draft_s)
    return tokens / (first + covered * (candidates - first))


@dataclass(frozen=True, slots=True)
class Coverage:
    """Prefix sums of C_d for layers of one width."""

    chances: tuple[float, ...]  # C_0 ..
    sums: tuple[float, ...]  # sums[d] = C_0 + .. + C_d

    @classmethod
    def of(cls, rates: Rates, width: int, depth: int) -> Coverage:
        chances = beam_coverage(rates, width, depth)
        return cls(tuple(chances), tuple(accumulate(chances)))

    def between(self, low: int, high: int) -> float:
        """`Σ C_d` for low <= d <= high."""
        last = len(self.sums) - 1
        if high < low or low > last:
            return 0.0
        return self.sums[min(high, last)] - (self.sums[low - 1] if low > 0 else 0.0)

    def tail(self, depth: int) -> float:
        """`Σ C_d` beyond `depth` layers in flight, where each further token is hit like the last layer:
        `C_D·h/(1−h)`.
        """
        if depth >= len(self.chances) or depth < 1:
            return 0.0
        last = self.chances[depth]
        ratio = min(last / self.chances[depth - 1] if self.chances[depth - 1] > 0 else 0.0, 0.9995)
        return last * ratio / (1.0 - ratio)


@dataclass(frozen=True, slots=True)
class StreamTiming:
    """What layers of one width cost on a route when a stage takes `batch` of them per forward; seconds.

    Counts every row that is sent on every leg; rows that die on the way make the real stream a little faster.

    :param pace_s: least time between two layers: the slowest link's `8·w·s_h/BW`, or the slowest stage's forward /
        batch
    :param layer_s: time between two layers when each has to be drafted
    :param first_s: A0, with what the correction waits for behind a layer that is just being sent or computed
    :param layer_lap_s: client to verdict and back for a layer
    :param crowd_s: what each layer in flight adds to that on loaded servers
    """

    pace_s: float
    layer_s: float
    first_s: float
    layer_lap_s: float
    crowd_s: float
    draft_s: float

    @classmethod
    def of(cls, route: Route, width: int, batch: int, draft: DraftCost) -> StreamTiming:
        legs, rows = (route.uplink, *route.hops), width * batch
        draft_s = draft.time(width)
        occupancies = [stage.occupancy(rows) for stage in route.stages]
        pace = max(max(leg.serialisation(width) for leg in legs), max(occupancies) / batch)
        layer = max(pace, draft_s)
        residual = sum(leg.serialisation(width) ** 2 / layer for leg in legs) / 2 if layer > 0 else 0.0
        pipe = sum(hop.time(width) for hop in route.hops)
        for stage, occupancy in zip(route.stages, occupancies):
            busy, forward = (min(1.0, occupancy / (batch * layer)) if layer > 0 else 0.0), stage.compute.time(rows)
            residual += busy * forward / stage.blocks / 2  # dead rows leave between two blocks
            pipe += stage.time(rows) + busy * forward / 2
        crowd = width * sum(stage.crowding(1.0) for stage in route.stages)
        first, candidates = _cycle_starts(route, width, pipe, 0.0)
        return cls(pace, layer, first + residual, candidates + residual, crowd, draft_s)


def stream_rate(coverage: Coverage, timing: StreamTiming, depth: int, burst: int = 0, hedged: float = 0.0) -> float:
    """Stream of layers, at most `depth` in flight, tokens per second.

    The generalisation of `stream_formula` to layers with siblings, a bounded depth (beyond it a layer waits for a
    commit, so layers come `layer_lap/depth` apart), and answers drafted ahead for the chance `hedged` of the misses.

    :param burst: layers of such an answer
    """
    lap = timing.layer_lap_s + timing.crowd_s * depth
    tail = coverage.tail(depth)
    tokens = coverage.between(0, depth) + tail
    slow = tail * max(timing.layer_s, lap / depth)
    covered = coverage.between(1, 1)

    def seconds(ready: int) -> float:
        late = lap - timing.first_s + (0.0 if ready > 0 else timing.draft_s)
        quick = coverage.between(2, min(ready, depth)) * timing.pace_s
        return covered * max(0.0, late) + quick + coverage.between(max(2, ready + 1), depth) * timing.layer_s

    return tokens / (timing.first_s + slow + hedged * seconds(burst) + (1.0 - hedged) * seconds(0))


def hedge_layers(route: Route, depth: int, rows: int, draft: DraftCost, width: int, limits: Limits) -> int:
    """Layers that the drafter can prepare for other outcomes while a lap is under way and its own layers are done.

    Counts propagation only as the lap, so that more bandwidth never looks like less time to think.
    """
    step, most = draft.time(rows), min(limits.hedge_layers, depth)
    spare = route.floor_s - depth * draft.time(width)
    if step <= 0 or spare <= 0:
        return 0
    return most if spare >= most * step else int(spare / step)


def hedge_chance(row: Sequence[float], hit_rate: float, hedges: int) -> float:
    """Chance that a miss is one of the `hedges` best outcomes that were not sent.

    :param row: acceptance by rank
    :param hit_rate: chance that a sent sibling is right; it says how many ranks are sent on average
    """
    if hit_rate >= 1.0:
        return 0.0
    sums = list(accumulate(row, initial=0.0))
    sent = max(1, next((i for i, total in enumerate(sums) if total >= hit_rate - 1e-9), len(row)))
    unsent = sums[min(sent + hedges, len(row))] - sums[min(sent, len(row))]
    return min(1.0, unsent / (1.0 - hit_rate))
