"""Sizes follow the links: more bandwidth never hurts, and nothing is sent where nothing is gained."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloombee_spec.plan.compute import ComputeProfile
from bloombee_spec.plan.decision import DraftCost, Limits, Mode, Plan
from bloombee_spec.plan.route import Leg, Route, Stage, lap_time, plain_lap, uniform_route
from bloombee_spec.plan.sim.script import geometric_rates
from bloombee_spec.plan.sizing import TIE, choose, evaluate, off_plan
from bloombee_spec.plan.throughput import (
    Coverage,
    StreamTiming,
    expected_run,
    hedge_chance,
    off_rate,
    stream_formula,
    stream_rate,
    tree_rate,
)
from bloombee_spec.plan.trees import best_first, expected_tokens

GPU = ComputeProfile.measured({1: 0.004, 8: 0.005, 64: 0.015})
SMALL = Limits(tree_size=16, width=8, depth=16)
hits = st.sampled_from((0.05, 0.2, 0.4, 0.6, 0.8, 0.9))


@st.composite
def routes(draw: st.DrawFn) -> Route:
    legs = st.builds(Leg, st.floats(0.0, 0.3), st.floats(1e6, 1e9), st.sampled_from((8.0, 2048.0, 8192.0)))
    stages = draw(st.integers(1, 6))
    compute = draw(st.sampled_from((GPU, ComputeProfile.flat(0.001), ComputeProfile.measured({1: 0.02, 16: 0.3}))))
    queue = draw(st.sampled_from((0.0, 0.0, 0.005)))
    hops = tuple(draw(legs) for _ in range(stages - 1))
    restart = draw(st.none() | legs)
    return Route((Stage(compute, queue),) * stages, draw(legs), hops, draw(legs), restart)


def _faster(route: Route, factor: float) -> Route:
    def scaled(leg: Leg) -> Leg:
        return replace(leg, bandwidth_bps=leg.bandwidth_bps * factor)

    return Route(
        route.stages,
        scaled(route.uplink),
        tuple(scaled(hop) for hop in route.hops),
        scaled(route.downlink),
        None if route.restart is None else scaled(route.restart),
    )


def test_a_lap_is_the_sum_of_its_legs_bytes_and_forwards() -> None:
    route = uniform_route(3, 0.05, 1e7, 2048, compute=GPU, embeddings_at_stage=False, id_bytes=8, frame_bytes=64)
    row_leg, id_leg = 0.05 + 8 * (64 + 16 * 2048) / 1e7, 0.05 + 8 * 72 / 1e7
    assert lap_time(16, route) == pytest.approx(3 * row_leg + id_leg + 3 * GPU.time(16))
    assert plain_lap(route) == pytest.approx(lap_time(1, route)), "N + 1 legs through the client"
    fast = uniform_route(3, 0.05, 1e9, 0, compute=ComputeProfile.flat(0.0), frame_bytes=0, id_bytes=0)
    assert plain_lap(fast) == pytest.approx(3 * 0.05), "N legs when the first stage restarts by itself"


def test_stream_formula_and_its_burst() -> None:
    assert expected_run(0.9) == pytest.approx(9)
    assert stream_formula(0.9, 0.2, 0.01) == pytest.approx(10 / (0.2 + 9 * 0.01))
    assert stream_formula(0.0, 0.2, 0.01) == pytest.approx(5)
    run_beyond_two = sum(0.8**d for d in range(3, 2000))
    assert stream_formula(0.8, 0.2, 0.01, burst=2) == pytest.approx(5 / (0.2 + 0.01 * run_beyond_two))


@pytest.mark.parametrize("hit", [0.1, 0.5, 0.9])
def test_the_general_stream_is_the_formula_for_a_chain_without_limits(hit: float) -> None:
    route = uniform_route(4, 0.05, 1e12, 0, frame_bytes=0, embeddings_at_stage=False)
    coverage = Coverage.of(((hit,),), 1, 600)
    timing = StreamTiming.of(route, 1, 1, DraftCost(0.004))
    assert stream_rate(coverage, timing, 600) == pytest.approx(stream_formula(hit, plain_lap(route), 0.004), rel=0.01)
    hedged = stream_rate(coverage, timing, 600, burst=3, hedged=1.0)
    assert hedged == pytest.approx(stream_formula(hit, plain_lap(route), 0.004, burst=3), rel=0.01)


def test_a_depth_too_small_for_the_lap_slows_a_stream() -> None:
    route = uniform_route(4, 0.05, 1e9, 2048)
    coverage, timing = Coverage.of(((0.95,),), 1, 100), StreamTiming.of(route, 1, 1, DraftCost(0.005))
    rates = [stream_rate(coverage, timing, depth) for depth in (2, 4, 8, 16, 32, 64)]
    assert rates == sorted(rates) and rates[-1] > 4 * rates[0]


def test_the_rate_of_a_tree_is_tokens_over_the_lap_and_the_drafting() -> None:
    route = uniform_route(4, 0.05, 1e8, 2048, compute=GPU, embeddings_at_stage=False)
    nodes = best_first(((0.8, 0.1),), 12, 6)
    covered = sum(node.reach for node in nodes if node.depth == 1)
    ready = tree_rate(expected_tokens(nodes), covered, 12, route, 0.0)
    assert ready == pytest.approx(expected_tokens(nodes) / lap_time(13, route)), "one frame with the root's own row"
    drafted = tree_rate(expected_tokens(nodes), covered, 12, route, 0.03)
    whole = expected_tokens(nodes) / (lap_time(12, route) + 0.03)
    assert whole <= drafted <= whole / 0.85, "a lap whose first token is no candidate ends before the tree comes"


@settings(max_examples=30, deadline=None)
@given(routes(), hits, st.floats(0, 0.03), st.floats(1.0, 50.0))
def test_more_bandwidth_never_lowers_the_best_rate(route: Route, hit: float, draft_s: float, factor: float) -> None:
    rates, draft = geometric_rates(hit), DraftCost(draft_s)
    before = choose(rates, route, draft, SMALL, min_gain=0.0).expected_tok_s
    after = choose(rates, _faster(route, factor), draft, SMALL, min_gain=0.0).expected_tok_s
    assert after >= before * (1 - TIE - 1e-9)


@settings(max_examples=40, deadline=None)
@given(routes(), hits, st.floats(0, 0.03))
def test_a_plan_keeps_its_promises(route: Route, hit: float, draft_s: float) -> None:
    rates, draft = geometric_rates(hit), DraftCost(draft_s)
    plan = choose(rates, route, draft, SMALL)
    assert plan.off_tok_s == pytest.approx(off_rate(route))
    assert plan.rows_in_flight <= SMALL.in_flight and plan.depth <= SMALL.depth
    if plan.mode is Mode.OFF:
        assert plan == off_plan(route)
        return
    assert plan.gain >= 1.03 * (1 - TIE)
    again = evaluate(plan, rates, route, draft, SMALL).expected_tok_s
    assert plan.expected_tok_s * (1 - 1e-9) <= again <= plan.expected_tok_s / (1 - TIE) * (1 + 1e-9)
    if plan.mode is Mode.STREAM:  # w·s_h/BW <= τ on every leg
        for leg in (route.uplink, *route.hops):
            assert leg.serialisation(plan.width) <= plan.pace_s * (1 + 1e-9)
        assert 1 <= plan.width <= SMALL.width and plan.sent_hedges == plan.width - 1
    else:
        assert 1 <= plan.tree_size <= SMALL.tree_size


@settings(max_examples=20, deadline=None)
@given(routes(), st.floats(0, 0.03))
def test_a_drafter_without_hits_is_switched_off(route: Route, draft_s: float) -> None:
    assert choose(((0.0,) * 8,), route, DraftCost(draft_s), SMALL).mode is Mode.OFF


@pytest.mark.parametrize("hit", [0.3, 0.8, 0.95])
def test_speculation_shrinks_to_nothing_as_servers_saturate(hit: float) -> None:
    route = uniform_route(4, 0.02, 1e8, 2048, compute=GPU)
    plans = [
        choose(geometric_rates(hit), route.loaded(queue), DraftCost(0.003)) for queue in (0.0, 0.004, 0.03, 0.3, 3.0)
    ]
    rows = [plan.rows_in_flight for plan in plans]
    assert rows == sorted(rows, reverse=True) and rows[0] > 20
    assert plans[-1].mode is Mode.OFF


def test_each_mode_has_its_place() -> None:
    draft = DraftCost(0.005)
    far = uniform_route(4, 0.05, 1e9, 2048, compute=GPU)
    assert choose(geometric_rates(0.9), far, draft).mode is Mode.STREAM
    near = uniform_route(2, 0.001, 1e9, 2048, compute=GPU)
    assert choose(geometric_rates(0.9), near, DraftCost(0.5)).mode is Mode.OFF, "a drafter slower than the ring"
    bound = uniform_route(8, 0.001, 1e6, 16384)
    assert choose(geometric_rates(0.3), bound, DraftCost(0.0)).rows_in_flight <= 2, "bytes, not delay, make the lap"
    only = choose(geometric_rates(0.9), far, draft, Limits(modes=(Mode.TREE,)))
    assert only.mode is Mode.TREE and only.expected_tok_s < choose(geometric_rates(0.9), far, draft).expected_tok_s


def test_credits_bound_what_is_in_flight() -> None:
    route = uniform_route(4, 0.2, 1e9, 2048)
    for mode in (Mode.STREAM, Mode.TREE):
        free = choose(geometric_rates(0.9), route, DraftCost(0.001), Limits(modes=(mode,)))
        bound = choose(geometric_rates(0.9), route, DraftCost(0.001), Limits(modes=(mode,), in_flight=10))
        assert bound.mode is mode and bound.rows_in_flight <= 10 < free.rows_in_flight


def test_trees_grow_with_bandwidth_and_delay() -> None:
    only = Limits(modes=(Mode.TREE,), tree_size=1024, in_flight=1024)

    def size(bandwidth: float, hop_s: float) -> int:
        route = uniform_route(8, hop_s, bandwidth, 2048)
        return choose(geometric_rates(0.7), route, DraftCost(0.0), only).tree_size

    by_bandwidth = [size(bandwidth, 0.025) for bandwidth in (1e6, 1e7, 1e8, 1e9)]
    by_delay = [size(1e7, hop_s) for hop_s in (0.005, 0.05, 0.3)]
    assert by_bandwidth == sorted(by_bandwidth) and by_bandwidth[-1] > 4 * by_bandwidth[0]
    assert by_delay == sorted(by_delay) and by_delay[-1] > by_delay[0]


def test_hedges_pay_for_a_slow_drafter_and_a_free_one_needs_none() -> None:
    ring = uniform_route(8, 0.05, 1e8, 2048)
    narrow = Limits(width=1, modes=(Mode.STREAM,))
    slow = choose(geometric_rates(0.8), ring, DraftCost(0.03), narrow)
    assert slow.hedges > 0 and slow.hedge_layers > 0
    unhedged = choose(geometric_rates(0.8), ring, DraftCost(0.03), replace(narrow, hedges=0))
    assert slow.expected_tok_s > 1.05 * unhedged.expected_tok_s
    assert choose(geometric_rates(0.8), ring, DraftCost(0.0), narrow).hedges == 0, (
        "nothing is hidden where nothing is waited for"
    )


def test_the_chance_of_a_hedge_is_what_the_unsent_ranks_hold() -> None:
    row = (0.6, 0.2, 0.1, 0.05)
    assert hedge_chance(row, 0.6, 1) == pytest.approx(0.2 / 0.4)
    assert hedge_chance(row, 0.8, 2) == pytest.approx(0.15 / 0.2)
    assert hedge_chance(row, 0.6, 0) == 0 and hedge_chance((1.0,), 1.0, 4) == 0


def test_a_plan_whose_candidates_have_no_chance_left_is_worth_no_more_than_off() -> None:
    route = uniform_route(4, 0.05, 1e8, 2048)
    for plan in (Plan(Mode.STREAM, width=4, depth=8), Plan(Mode.TREE, depth=4, tree_size=16)):
        assert evaluate(plan, ((0.0,),), route, DraftCost(0.0)).expected_tok_s == pytest.approx(off_rate(route))


@pytest.mark.parametrize(
    "build",
    [
        lambda: Leg(-0.1, 1e6, 10),
        lambda: Leg(0.1, 0, 10),
        lambda: Leg(0.1, 1e6, -1),
        lambda: Stage(GPU, queue_s=-1),
        lambda: Stage(GPU, blocks=0),
        lambda: Route((), Leg(0, 1, 1), (), Leg(0, 1, 1)),
        lambda: Route((Stage(GPU),), Leg(0, 1, 1), (Leg(0, 1, 1),), Leg(0, 1, 1)),
        lambda: DraftCost(-1),
        lambda: Limits(width=0),
        lambda: Limits(hedges=-1),
        lambda: expected_run(1.0),
    ],
)
def test_numbers_that_cannot_be_are_refused(build: object) -> None:
    with pytest.raises(ValueError):
        build()  # type: ignore[operator]
