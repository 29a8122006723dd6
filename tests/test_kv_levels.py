"""The choice of levels: fastest without a deadline, most exact with one, never lossy unless allowed."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloombee_spec.kv.levels import (
    EXACT_LEVELS,
    LOSSY_LEVELS,
    MAX_PLANNED_CHUNKS,
    Level,
    LevelCost,
    choose_levels,
    plan_seconds,
)

COSTS = {
    Level.LOSSLESS: LevelCost(10_000, 20e-6, 10e-6),
    Level.INT8: LevelCost(6_000, 10e-6, 5e-6),
    Level.FINE: LevelCost(1_700, 150e-6, 90e-6),
    Level.COARSE: LevelCost(1_200, 150e-6, 90e-6),
    Level.RECOMPUTE: LevelCost(4, 0.0, 5e-3),
}
CHUNKS = (256,) * 7 + (100,)
SENT = {level: cost for level, cost in COSTS.items() if level is not Level.RECOMPUTE}

cost = st.builds(LevelCost, st.floats(1, 1e5), st.floats(0, 1e-2), st.floats(0, 1e-2))
costs = st.dictionaries(st.sampled_from(list(Level)), cost, min_size=1)
chunks = st.lists(st.integers(1, 256), min_size=1, max_size=12)
bandwidth = st.floats(1e5, 1e10)


def worst(levels) -> int:
    return max(0 if level.lossless else int(level) for level in levels)


def test_every_level_is_either_exact_or_lossy():
    assert set(Level) == EXACT_LEVELS | LOSSY_LEVELS and not EXACT_LEVELS & LOSSY_LEVELS


def test_seconds_of_one_chunk_are_the_sum_of_its_parts():
    assert plan_seconds([100], [Level.FINE], {Level.FINE: LevelCost(1000, 1e-3, 2e-3)}, 8e6, 0.5) == pytest.approx(
        0.1 + 0.1 + 0.5 + 0.2
    )


def test_seconds_of_many_chunks_are_those_of_the_busiest_part():
    cost = {Level.FINE: LevelCost(1000, 1e-4, 2e-4)}
    link_bound = plan_seconds([100] * 50, [Level.FINE] * 50, cost, 8e6)
    assert link_bound == pytest.approx(0.01 + 50 * 0.1 + 0.02)
    decoder_bound = plan_seconds([100] * 50, [Level.FINE] * 50, cost, 8e9)
    assert decoder_bound == pytest.approx(0.01 + 1e-4 + 50 * 0.02)


@settings(max_examples=200, deadline=None)
@given(chunks, costs, bandwidth, st.booleans(), st.none() | st.floats(0, 100), st.floats(0, 1))
def test_a_plan_keeps_its_promises(chunks, costs, bandwidth, allow_lossy, deadline, delay):
    allowed = {level: cost for level, cost in costs.items() if allow_lossy or level in EXACT_LEVELS}
    if not allowed:
        with pytest.raises(ValueError, match="none of the levels"):
            choose_levels(chunks, costs, bandwidth, allow_lossy=allow_lossy)
        return
    plan = choose_levels(chunks, costs, bandwidth, allow_lossy=allow_lossy, deadline_s=deadline, delay_s=delay)
    assert len(plan.levels) == len(chunks) and set(plan.levels) <= set(allowed)
    assert plan.seconds == pytest.approx(plan_seconds(chunks, plan.levels, costs, bandwidth, delay))
    recomputed = [level is Level.RECOMPUTE for level in plan.levels]
    assert recomputed == sorted(recomputed, reverse=True)
    assert plan.lossless == (worst(plan.levels) == 0)
    fastest = choose_levels(chunks, costs, bandwidth, allow_lossy=allow_lossy, delay_s=delay)
    for level in allowed:
        assert fastest.seconds <= plan_seconds(chunks, [level] * len(chunks), costs, bandwidth, delay) * (1 + 1e-9)
        if deadline is not None and plan_seconds(chunks, [level] * len(chunks), costs, bandwidth, delay) <= deadline:
            assert plan.seconds <= deadline and worst(plan.levels) <= worst([level])
    if deadline is None or fastest.seconds > deadline:
        assert plan == fastest


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 256), min_size=1, max_size=4), bandwidth, st.floats(1e-4, 3))
def test_with_a_deadline_no_plan_in_time_has_a_better_worst_level(chunks, bandwidth, deadline):
    plan = choose_levels(chunks, COSTS, bandwidth, allow_lossy=True, deadline_s=deadline)
    for j in range(len(chunks) + 1):
        for rest in itertools.product(SENT, repeat=len(chunks) - j):
            levels = (Level.RECOMPUTE,) * j + rest
            if plan_seconds(chunks, levels, COSTS, bandwidth) <= deadline:
                assert plan.seconds <= deadline
                assert worst(plan.levels) <= worst(levels)


def test_a_fast_link_takes_the_exact_level_and_a_slow_one_ids():
    assert choose_levels(CHUNKS, COSTS, 10e9).levels == (Level.LOSSLESS,) * 8
    assert choose_levels(CHUNKS, COSTS, 1e5).levels == (Level.RECOMPUTE,) * 8


def test_between_the_two_the_first_chunks_are_recomputed_while_the_others_travel():
    plan = choose_levels(CHUNKS, COSTS, 20e6)
    assert set(plan.levels) == {Level.RECOMPUTE, Level.LOSSLESS} and plan.levels[-1] is Level.LOSSLESS
    for one in (Level.RECOMPUTE, Level.LOSSLESS):
        assert plan.seconds < 0.8 * plan_seconds(CHUNKS, [one] * 8, COSTS, 20e6)


def test_lossy_levels_need_permission():
    assert choose_levels(CHUNKS, SENT, 10e6).levels == (Level.LOSSLESS,) * 8
    assert choose_levels(CHUNKS, SENT, 10e6, allow_lossy=True).levels == (Level.COARSE,) * 8


def test_a_deadline_buys_no_more_loss_than_it_must():
    def level_at(deadline: float) -> tuple[Level, ...]:
        return choose_levels(CHUNKS, SENT, 100e6, allow_lossy=True, deadline_s=deadline).levels

    assert level_at(10.0) == (Level.LOSSLESS,) * 8
    mixed = level_at(1.2)
    assert set(mixed) == {Level.INT8, Level.LOSSLESS} and mixed[-1] is Level.LOSSLESS
    assert set(level_at(0.5)) == {Level.FINE, Level.INT8}
    impossible = level_at(0.1)
    assert impossible == choose_levels(CHUNKS, SENT, 100e6, allow_lossy=True).levels


def test_of_equally_fast_plans_the_more_exact_one_wins():
    same = LevelCost(1000)
    assert choose_levels(CHUNKS, {Level.FINE: same, Level.LOSSLESS: same}, 1e6, allow_lossy=True).lossless


def test_no_chunks_cost_nothing():
    assert choose_levels((), COSTS, 1e6).levels == () and choose_levels((), COSTS, 1e6).seconds == 0.0


def test_many_chunks_are_still_planned():
    many = (256,) * MAX_PLANNED_CHUNKS
    plan = choose_levels(many, COSTS, 20e6)
    assert set(plan.levels) == {Level.RECOMPUTE, Level.LOSSLESS}


@pytest.mark.parametrize(
    "arguments",
    [(CHUNKS, COSTS, 0.0), (CHUNKS, COSTS, float("inf")), (CHUNKS, COSTS, float("nan")), ((0,), COSTS, 1e6),
     ((1,) * (MAX_PLANNED_CHUNKS + 1), COSTS, 1e6), (CHUNKS, {}, 1e6)],
)  # fmt: skip
def test_what_cannot_be_planned_is_refused(arguments):
    with pytest.raises(ValueError):
        choose_levels(*arguments)


@pytest.mark.parametrize("bad", [-1.0, float("inf"), float("nan")])
def test_a_cost_that_is_no_cost_is_refused(bad):
    for field in ("token_bytes", "encode_s", "decode_s"):
        with pytest.raises(ValueError, match="cannot cost"):
            LevelCost(**{"token_bytes": 1.0, field: bad})
