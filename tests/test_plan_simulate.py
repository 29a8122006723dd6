"""The simulated ring obeys the closed formulas, and the planner in it is never slower than no speculation."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloombee_spec.plan.compute import ComputeProfile
from bloombee_spec.plan.decision import DraftCost, Limits, Mode, Plan
from bloombee_spec.plan.route import Leg, Route, Stage, plain_lap, uniform_route
from bloombee_spec.plan.sim.events import Clock
from bloombee_spec.plan.sim.ring import Link, Row
from bloombee_spec.plan.simulate import Ring, SimConfig, geometric_rates, simulate
from bloombee_spec.plan.sizing import choose, evaluate
from bloombee_spec.plan.throughput import stream_formula
from bloombee_spec.tree import NodeSpec

GPU = ComputeProfile.measured({1: 0.004, 8: 0.005, 64: 0.015})
OFF = Plan(Mode.OFF)


def _chain(depth: int = 64, pace_s: float = 0.0) -> Plan:
    return Plan(Mode.STREAM, width=1, depth=depth, pace_s=pace_s)


def _ring(ms: float = 50, mbps: float = 1000, *, stages: int = 4, embeddings: bool = True) -> Route:
    return uniform_route(stages, ms / 1e3, mbps * 1e6, 2048, compute=GPU, embeddings_at_stage=embeddings)


@pytest.mark.parametrize("embeddings", [True, False])
@pytest.mark.parametrize("stages", [1, 2, 5])
def test_without_speculation_each_token_is_one_lap(stages: int, embeddings: bool) -> None:
    route = _ring(stages=stages, embeddings=embeddings)
    report = simulate(SimConfig(route, geometric_rates(0.5), plan=OFF, tokens=50))
    assert report.tok_s == pytest.approx(1 / plain_lap(route), rel=1e-9)
    assert report.laps >= 50 and report.misses == 50, "rows of tokens that are not at the client yet have started too"
    assert report.miss_laps == pytest.approx([1.0] * 49)
    assert report.rows == pytest.approx(report.laps * stages, abs=stages) and report.drafted == 0


def test_without_speculation_each_hop_carries_one_row_per_token() -> None:
    report = simulate(SimConfig(_ring(), geometric_rates(0.5), plan=OFF, tokens=40))
    for sent in report.link_bytes[1:]:
        assert sent == pytest.approx(40 * (64 + 2048), abs=64 + 2048)
    assert report.link_bytes[0] == 64 + 8, "the client sent the first row only"


@pytest.mark.parametrize(("hit", "depth"), [(0.3, 8), (0.6, 16), (0.8, 32), (0.9, 64), (0.95, 64)])
def test_a_chain_streams_as_the_formula_says(hit: float, depth: int) -> None:
    """`(E[run]+1) / (T_lap + E[run]·τ)` with the lap through the client, at the hit rate that the text really had."""
    route = uniform_route(4, 0.05, 1e9, 2048, embeddings_at_stage=False)
    report = simulate(SimConfig(route, ((hit,),), DraftCost(0.004), _chain(depth), tokens=1500))
    real = 1 - report.misses / report.tokens
    assert real == pytest.approx(hit, abs=0.04)
    assert report.tok_s == pytest.approx(stream_formula(real, plain_lap(route), 0.004), rel=0.03)


@pytest.mark.parametrize("embeddings", [True, False])
@pytest.mark.parametrize("hit", [0.0, 0.5, 0.9])
def test_a_miss_costs_exactly_one_lap(hit: float, embeddings: bool) -> None:
    route = _ring(mbps=10_000, embeddings=embeddings)
    config = SimConfig(route, ((hit,),), DraftCost(0.006), _chain(16), tokens=400)
    report = simulate(config)
    assert report.laps - report.misses in (0, 1), "one row started per miss, and one at the start"
    assert min(report.miss_laps) >= 1 - 1e-9
    # What is being computed or sent when the correction comes delays it by one block or one row at most, per stage.
    slack = 4 * (GPU.time(1) / 8 + route.hops[0].serialisation(1)) / plain_lap(route)
    assert max(report.miss_laps) <= 1 + 2 * slack


def test_the_correction_takes_n_legs_with_embeddings_at_the_first_stage_and_one_more_without() -> None:
    laps = [
        simulate(SimConfig(uniform_route(4, 0.05, 1e12, 8, embeddings_at_stage=at_stage), ((0.0,),), plan=_chain(4)))
        for at_stage in (True, False)
    ]
    assert [1 / report.tok_s for report in laps] == pytest.approx([4 * 0.05, 5 * 0.05], rel=1e-3)


def test_hits_are_never_sent_again() -> None:
    report = simulate(SimConfig(_ring(), ((1.0,),), DraftCost(0.002), _chain(200), tokens=600))
    assert report.misses == 0 and report.laps == 1
    assert report.link_bytes[1] <= (600 + 202) * (64 + 2048)


@pytest.mark.parametrize("embeddings", [True, False])
def test_layers_leave_no_faster_than_the_pace(embeddings: bool) -> None:
    route = uniform_route(3, 0.05, 1e10, 8, embeddings_at_stage=embeddings)
    first = simulate(SimConfig(route, ((1.0,),), plan=_chain(3, 0.1), tokens=4))
    assert first.seconds == pytest.approx(0.2, abs=1e-3), (
        "the root's row with the first layer, then one layer per 100 ms"
    )
    assert simulate(SimConfig(route, ((1.0,),), plan=_chain(64, 0.02), tokens=200)).tok_s == pytest.approx(
        50, rel=0.02
    )


def test_wide_layers_raise_the_hit_rate_as_the_model_expects() -> None:
    route, rates, draft = _ring(50, 100), geometric_rates(0.6), DraftCost(0.005)
    for width in (1, 4, 16):
        plan = evaluate(Plan(Mode.STREAM, width=width, depth=12), rates, route, draft)
        report = simulate(SimConfig(route, rates, draft, plan, tokens=600))
        assert report.tok_s == pytest.approx(plan.expected_tok_s, rel=0.15)


def test_a_synchronous_tree_is_as_fast_as_the_model_says() -> None:
    for hit, mbps in ((0.3, 100), (0.6, 10), (0.9, 1000)):
        route, rates, draft = _ring(50, mbps), geometric_rates(hit), DraftCost(0.005)
        plan = choose(rates, route, draft, Limits(modes=(Mode.TREE,)))
        assert plan.mode is Mode.TREE
        report = simulate(SimConfig(route, rates, draft, plan, tokens=1200))
        assert report.tok_s == pytest.approx(plan.expected_tok_s, rel=0.06)


def test_a_tree_that_takes_longer_to_draft_than_a_lap_is_still_sent() -> None:
    route, rates, draft = _ring(10), geometric_rates(0.9), DraftCost(0.03)
    plan = evaluate(Plan(Mode.TREE, depth=12, tree_size=12), rates, route, draft)
    report = simulate(SimConfig(route, rates, draft, plan, tokens=400))
    assert report.tok_s > 0.95 * plan.expected_tok_s, "the model leaves out what the plain laps yield meanwhile"


def test_hedges_hide_drafting_time() -> None:
    route, rates, draft = _ring(50, 100), geometric_rates(0.7), DraftCost(0.02)
    plain = Plan(Mode.STREAM, width=1, depth=6)
    reports = [
        simulate(SimConfig(route, rates, draft, plan, tokens=1500))
        for plan in (plain, replace(plain, hedges=4, hedge_layers=6))
    ]
    assert reports[0].hedge_hits == 0 and reports[1].hedge_hits > 0.3 * reports[1].misses
    assert reports[1].tok_s > 1.03 * reports[0].tok_s
    assert reports[1].misses == reports[0].misses, "the text is the same; only the waiting is shorter"


def test_dead_rows_are_dropped_before_the_links_they_would_have_crossed() -> None:
    report = simulate(SimConfig(_ring(50, 2, stages=6), ((0.2,),), plan=_chain(32), tokens=150))
    carried = report.link_bytes[1:]
    assert list(carried) == sorted(carried, reverse=True) and carried[-1] < 0.5 * carried[0]


@given(st.integers(0, 50), st.floats(0.0, 0.5), st.floats(1e4, 1e9))
@settings(max_examples=30, deadline=None)
def test_a_link_delivers_in_order_after_bytes_and_delay(seed: int, delay: float, bandwidth: float) -> None:
    rng, clock = random.Random(seed), Clock()
    arrived: list[tuple[float, int]] = []
    leg = Leg(delay, bandwidth, 100.0, 10.0)
    link = Link(clock, leg, lambda specs: arrived.extend((clock.now, spec.id) for spec in specs))
    free, expected = 0.0, []
    instants = sorted(rng.uniform(0, 0.2) for _ in range(20))
    for i, instant in enumerate(instants):
        clock.at(instant, link.send, [Row(NodeSpec(i, -1, 0), 0)])
        free = max(free, instant) + leg.serialisation(1)
        expected.append((free + delay, i))
    clock.run(lambda: len(arrived) == 20)
    assert [i for _, i in arrived] == list(range(20))
    assert [at for at, _ in arrived] == pytest.approx([at for at, _ in expected])


def test_what_died_while_it_waited_for_the_link_is_not_sent() -> None:
    clock, arrived = Clock(), []
    link = Link(clock, Leg(0.0, 800.0, 100.0, 0.0), lambda specs: arrived.extend(spec.id for spec in specs))
    rows = [Row(NodeSpec(i, -1, 0), 0) for i in range(3)]
    for row in rows:
        link.send([row])
    rows[0].dead = rows[1].dead = True  # the first is on the wire by now
    clock.run(lambda: len(arrived) == 2)
    assert arrived == [0, 2] and link.bytes == 200


def test_a_run_is_a_function_of_its_seed() -> None:
    config = SimConfig(_ring(20, 50), geometric_rates(0.7), DraftCost(0.003), tokens=200, seed=5)
    first, second = simulate(config), simulate(config)
    assert first == second
    assert simulate(replace(config, seed=6)) != first


@st.composite
def routes(draw: st.DrawFn) -> Route:
    legs = st.builds(
        Leg, st.sampled_from((0.0, 0.001, 0.02, 0.1)), st.floats(5e5, 1e9), st.sampled_from((8.0, 2048.0))
    )
    stages = draw(st.integers(1, 5))
    kinds = st.builds(
        Stage,
        st.sampled_from((ComputeProfile.flat(0.0005), GPU, ComputeProfile.measured({1: 0.02, 8: 0.1}))),
        st.sampled_from((0.0, 0.0, 0.01)),
        st.integers(1, 8),
    )
    restart = draw(st.none() | legs)
    hops = tuple(draw(legs) for _ in range(stages - 1))
    return Route(tuple(draw(kinds) for _ in range(stages)), draw(legs), hops, draw(legs), restart)


plans = st.builds(
    Plan,
    st.sampled_from(tuple(Mode)),
    width=st.sampled_from((1, 2, 5)),
    depth=st.sampled_from((1, 3, 12)),
    pace_s=st.sampled_from((0.0, 0.001, 0.03)),
    tree_size=st.sampled_from((1, 5, 20)),
    hedges=st.sampled_from((0, 2)),
    hedge_layers=st.just(3),
)


@settings(max_examples=80, deadline=None)
@given(routes(), plans, st.sampled_from((0.0, 0.3, 0.8, 1.0)), st.sampled_from((0.0, 0.005, 0.1)), st.integers(0, 99))
def test_no_route_and_no_plan_stalls_a_stream(route: Route, plan: Plan, hit: float, draft_s: float, seed: int) -> None:
    report = simulate(SimConfig(route, geometric_rates(hit), DraftCost(draft_s), plan, tokens=40, seed=seed))
    assert report.tokens == 40 and report.seconds >= 0
    assert report.rows >= report.useful_rows * 0.9


@settings(max_examples=60, deadline=None)
@given(routes(), st.lists(plans, min_size=2, max_size=5), st.sampled_from((0.3, 0.8, 1.0)), st.integers(0, 99))
def test_a_plan_may_change_at_any_commit(route: Route, options: list[Plan], hit: float, seed: int) -> None:
    ring = Ring(SimConfig(route, geometric_rates(hit), DraftCost(0.004), options[0], tokens=60, seed=seed))
    rng = random.Random(seed)
    ring.client.policy, ring.client.lap_s = (lambda: rng.choice(options)), 0.0
    assert ring.run().tokens == 60


@pytest.mark.parametrize("mbps", [10, 100, 1000])
@pytest.mark.parametrize("ms", [10, 80, 200])
def test_the_automatic_plan_is_never_slower_than_none(mbps: float, ms: float) -> None:
    """The planner starts without knowing the drafter, so its learning is part of what is compared."""
    route, draft, limits = _ring(ms, mbps), DraftCost(0.005, 0.0001), Limits(tree_size=64, width=16, depth=32)
    for hit in (0.0, 0.3, 0.6, 0.9):
        report = simulate(SimConfig(route, geometric_rates(hit), draft, tokens=100, limits=limits))
        gain = report.tok_s * plain_lap(route)
        assert gain >= 0.97, f"h = {hit}: {gain:.3f} of the plain rate"
        if hit == 0.0:
            assert report.off_lap is not None and report.off_lap <= 20
        else:
            assert gain > (1.2 if hit < 0.5 else 1.7)


def test_the_choice_between_modes_never_loses_to_the_best_tree() -> None:
    draft, tokens = DraftCost(0.005, 0.0001), 300
    for mbps, ms, hit in itertools.product((10, 1000), (10, 200), (0.3, 0.9)):
        route, rates = _ring(ms, mbps), geometric_rates(hit)
        tree = choose(rates, route, draft, Limits(modes=(Mode.TREE,)))
        best = choose(rates, route, draft)
        if best == tree:
            continue
        rate, tree_rate = (
            simulate(SimConfig(route, rates, draft, plan, tokens=tokens)).tok_s for plan in (best, tree)
        )
        assert rate >= 0.97 * tree_rate, f"{mbps} Mbit/s, {ms} ms, h = {hit}"


def test_a_stream_beats_the_best_tree_where_laps_are_long_and_drafting_is_not_free() -> None:
    route, rates, draft = _ring(50, 100), geometric_rates(0.9), DraftCost(0.01)
    plans = choose(rates, route, draft, Limits(modes=(Mode.TREE,))), choose(rates, route, draft)
    tree, stream = (simulate(SimConfig(route, rates, draft, plan, tokens=800)).tok_s for plan in plans)
    assert stream > 1.3 * tree


def test_the_planner_comes_back_when_the_drafter_improves() -> None:
    config = SimConfig(
        _ring(20, 100), geometric_rates(0.0), DraftCost(0.003), tokens=700, later=((150, geometric_rates(0.9)),)
    )
    report = simulate(config)
    assert report.off_lap is not None and report.off_lap <= 20
    assert report.final_plan.mode is not Mode.OFF and report.modes[Mode.STREAM] > 350


def test_a_run_that_cannot_be_is_refused() -> None:
    route = _ring()
    with pytest.raises(ValueError, match="2 tokens"):
        SimConfig(route, geometric_rates(0.5), tokens=1)
    with pytest.raises(ValueError, match="no time"):
        SimConfig(uniform_route(2, 0.0, 1e9, 0, id_bytes=0, frame_bytes=0), geometric_rates(0.5))
    with pytest.raises(ValueError):
        geometric_rates(1.5)
