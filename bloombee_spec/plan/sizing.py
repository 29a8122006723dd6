"""The bandwidth-aware choice: synchronous tree, stream or nothing, and how large. Numbers in, `Plan` out.

Sequoia sizes a tree by the accelerator's `t(n)`; here the time term is the WAN's lap (`route`), streams compete with
trees, and one token per lap competes with both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from bloombee_spec.plan.acceptance import Rates
from bloombee_spec.plan.decision import DraftCost, Limits, Mode, Plan
from bloombee_spec.plan.route import Route
from bloombee_spec.plan.throughput import (
    Coverage,
    StreamTiming,
    hedge_chance,
    hedge_layers,
    off_rate,
    stream_rate,
    tree_rate,
)
from bloombee_spec.plan.trees import best_first

TIE = 0.01  # plans this close in speed are equal: the one with fewer rows in flight wins
HEDGED_POSITIONS = 8  # positions nearest to the root for which answers are drafted ahead
STEPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
WIDTHS = tuple(2**i for i in range(11))
BATCHES = (1, 2, 4, 8, 16)


def choose(
    rates: Rates, route: Route, draft: DraftCost, limits: Limits | None = None, *, min_gain: float = 0.03
) -> Plan:
    """The plan with the most expected tokens per second.

    :param rates: acceptance `[depth][rank]` (`AcceptanceModel.rates`)
    :param min_gain: speculation has to promise this much over none (relative), or it is off
    """
    limits = limits or Limits()
    off = off_plan(route)
    plans: list[Plan] = []
    if Mode.TREE in limits.modes:
        plans += _trees(rates, route, draft, limits, off)
    if Mode.STREAM in limits.modes:
        plans += _streams(rates, route, draft, limits, off)
    best = max((plan.expected_tok_s for plan in plans), default=0.0)
    if best < off.expected_tok_s * (1.0 + min_gain):
        return off
    near = (plan for plan in plans if plan.expected_tok_s >= best * (1.0 - TIE))
    return min(near, key=lambda plan: (plan.rows_in_flight, plan.hedges, -plan.expected_tok_s))


def off_plan(route: Route) -> Plan:
    rate = off_rate(route)
    return Plan(Mode.OFF, expected_tok_s=rate, off_tok_s=rate)


def evaluate(plan: Plan, rates: Rates, route: Route, draft: DraftCost, limits: Limits | None = None) -> Plan:
    """The same plan with what it is expected to do, and how fast it may send, under other estimates."""
    limits = limits or Limits()
    off = off_plan(route)
    if plan.mode is Mode.OFF:
        return off
    if plan.mode is Mode.TREE:
        only = replace(limits, tree_size=plan.tree_size)
        found = list(_trees(rates, route, draft, only, off, depths=(plan.depth,), sizes=(plan.tree_size,)))
    else:
        hedges = (0, plan.hedges) if plan.hedges else (0,)
        found = list(_streams(rates, route, draft, limits, off, (plan.width,), (plan.depth,), hedges))
    if not found:  # no candidate has any chance left: what is sent is dead weight
        return replace(plan, expected_tok_s=off.expected_tok_s, off_tok_s=off.expected_tok_s)
    return max(found, key=lambda candidate: candidate.expected_tok_s)


def _trees(
    rates: Rates,
    route: Route,
    draft: DraftCost,
    limits: Limits,
    off: Plan,
    depths: tuple[int, ...] = STEPS,
    sizes: tuple[int, ...] = STEPS,
) -> Iterator[Plan]:
    most = min(limits.tree_size, limits.in_flight)
    deepest = 0
    for depth in (depth for depth in depths if depth <= limits.depth):
        if deepest and depth > deepest:
            break  # a looser limit on the depth would give the same trees
        reach, tokens, covered = _growth(rates, most, depth)
        deepest = reach if reach < depth else 0
        for size in (size for size in sizes if size <= min(most, len(tokens) - 1)):
            draft_s = depth * draft.time(min(size, limits.width))
            rate = tree_rate(tokens[size], covered[size], size, route, draft_s)
            yield Plan(Mode.TREE, depth=depth, tree_size=size, expected_tok_s=rate, off_tok_s=off.expected_tok_s)


def _streams(
    rates: Rates,
    route: Route,
    draft: DraftCost,
    limits: Limits,
    off: Plan,
    widths: tuple[int, ...] = WIDTHS,
    depths: tuple[int, ...] = STEPS,
    hedges: tuple[int, ...] | None = None,
) -> Iterator[Plan]:
    fan_outs = hedges if hedges is not None else (0, *(n for n in (1, 4) if n <= limits.hedges))
    for width in (width for width in widths if width <= limits.width):
        coverage = _coverage(rates, width, max(depths[-1], 1) if len(depths) == 1 else limits.depth)
        if len(coverage.chances) < 2 or coverage.chances[1] <= 0:
            continue
        allowed = [depth for depth in depths if depth <= limits.depth and depth * width <= limits.in_flight]
        pace = float("inf")
        for batch in BATCHES:
            if batch > 1 and batch * width > limits.forward_rows:
                break
            timing = StreamTiming.of(route, width, batch, draft)
            if timing.pace_s >= pace:
                break  # a link sets the pace: larger batches would only add latency
            pace = timing.pace_s
            full = timing.layer_lap_s / timing.layer_s if timing.layer_s > 0 else float("inf")
            for depth, previous in zip(allowed, (0, *allowed)):
                if depth < batch:
                    continue
                if previous >= min(full, len(coverage.chances)):
                    break  # the pipe is full, or no deeper layer is ever reached: more would be waste
                for fan_out in fan_outs if timing.draft_s > 0 else (0,):
                    row = rates[min(depth, len(rates)) - 1]
                    rows = fan_out * HEDGED_POSITIONS * width
                    ready = hedge_layers(route, depth, rows, draft, width, limits) if fan_out else 0
                    if fan_out and not ready:
                        continue
                    reached = coverage.between(HEDGED_POSITIONS, HEDGED_POSITIONS)  # a miss further on finds no answer
                    hedged = hedge_chance(row, coverage.chances[1], fan_out) * (1.0 - reached) if ready else 0.0
                    rate = stream_rate(coverage, timing, depth, ready, hedged)
                    yield Plan(
                        Mode.STREAM,
                        width=width,
                        depth=depth,
                        pace_s=timing.pace_s,
                        hedges=fan_out,
                        hedge_layers=ready,
                        expected_tok_s=rate,
                        off_tok_s=off.expected_tok_s,
                    )


@lru_cache(maxsize=256)
def _coverage(rates: Rates, width: int, depth: int) -> Coverage:
    return Coverage.of(rates, width, depth)


@lru_cache(maxsize=256)
def _growth(rates: Rates, size: int, depth: int) -> tuple[int, list[float], list[float]]:
    """Deepest layer used, and for each number of candidates 0 .. size: expected tokens, and C_1."""
    tokens, covered, deepest = [1.0], [0.0], 0
    for node in best_first(rates, size, depth):
        tokens.append(tokens[-1] + node.reach)
        covered.append(covered[-1] + (node.reach if node.depth == 1 else 0.0))
        deepest = max(deepest, node.depth)
    return deepest, tokens, covered
