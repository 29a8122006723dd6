"""Stage time by rows, acceptance by rank, and the codec of a link."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloombee_spec.plan.acceptance import RANKS, AcceptanceModel
from bloombee_spec.plan.codecs import CodecOption, break_even_bandwidth, choose_codec
from bloombee_spec.plan.compute import ComputeProfile

times = st.floats(1e-6, 10)


def test_time_is_linear_between_points_flat_below_and_goes_on_above() -> None:
    profile = ComputeProfile.measured({1: 0.010, 8: 0.017, 64: 0.073})
    assert profile.time(0) == 0
    assert profile.time(0.5) == profile.time(1) == pytest.approx(0.010)
    assert profile.time(4) == pytest.approx(0.013)
    assert profile.time(128) == pytest.approx(0.137)
    assert ComputeProfile.flat(0.02).time(500) == 0.02


@settings(deadline=None)
@given(st.dictionaries(st.integers(1, 500), times, min_size=1, max_size=6), st.integers(1, 600), st.integers(1, 600))
def test_more_rows_never_take_less_time(samples: dict[int, float], a: int, b: int) -> None:
    profile = ComputeProfile.measured(samples)
    low, high = sorted((a, b))
    assert profile.time(low) <= profile.time(high) * (1 + 1e-9)


@settings(deadline=None)
@given(
    st.dictionaries(st.integers(1, 500), times, min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(1, 600), times), max_size=30),
)
def test_any_samples_leave_a_valid_profile(samples: dict[int, float], updates: list[tuple[int, float]]) -> None:
    profile = ComputeProfile.measured(samples)
    for rows, seconds in updates:
        profile = profile.updated(rows, seconds)  # ComputeProfile checks its points
    assert profile.time(64) >= 0


def test_running_samples_move_the_profile_and_an_outlier_does_not() -> None:
    profile = ComputeProfile.measured({1: 0.01, 8: 0.02, 64: 0.08})
    assert profile.updated(8, 100.0).time(8) < 0.03
    for _ in range(200):
        for rows in (1, 8, 30, 64):
            profile = profile.updated(rows, 0.03 + 0.001 * rows)
    assert profile.time(1) == pytest.approx(0.031, rel=0.05)
    assert profile.time(30) == pytest.approx(0.060, rel=0.05)


@pytest.mark.parametrize("points", [(), ((1, -1),), ((1, 2), (1, 3)), ((1, 2), (2, 1)), ((1, math.nan),), ((0, 1),)])
def test_impossible_profiles_are_refused(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ValueError):
        ComputeProfile(points)


def test_acceptance_learns_ranks_depths_and_proposers_apart() -> None:
    model = AcceptanceModel(half_life=500)
    for i in range(400):
        model.observe(8, 0 if i % 10 < 8 else 1, depth=1, proposer="suffix")
        model.observe(8, 0 if i % 10 < 4 else None, depth=6, proposer="model")
    assert model.rate(0, 1, "suffix") == pytest.approx(0.8, abs=0.05)
    assert model.rate(1, 1, "suffix") == pytest.approx(0.2, abs=0.05)
    assert model.rate(0, 6, "model") == pytest.approx(0.4, abs=0.05)
    assert model.rate(0, 1) == pytest.approx(0.8, abs=0.05) and model.rate(0, 6) == pytest.approx(0.4, abs=0.05)
    assert model.rate(0, 3) == pytest.approx(0.6, abs=0.05), "an unseen depth takes the rank's pooled rate"
    assert set(model.proposers()) == {"suffix", "model"}


def test_acceptance_forgets() -> None:
    model = AcceptanceModel(half_life=20)
    for _ in range(300):
        model.observe(4, 0)
    for _ in range(60):
        model.observe(4, None)
    assert model.rate(0) < 0.2


def test_forgetting_does_not_overflow() -> None:
    model = AcceptanceModel(half_life=1)
    for i in range(5000):
        model.observe(4, 0 if i % 2 else None)
    assert 0.0 < model.rate(0) < 1.0


def test_a_drafter_that_is_never_right_is_found_out_quickly() -> None:
    model = AcceptanceModel()
    assert model.hit_rate() > 0.5
    for _ in range(15):
        model.observe(RANKS, None)
    assert model.hit_rate() < 0.02


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 19), st.booleans(), st.integers(1, 40)), max_size=60))
def test_rates_are_always_falling_chances_that_sum_to_at_most_one(verdicts: list[tuple[int, int, bool, int]]) -> None:
    model = AcceptanceModel(half_life=5)
    for offered, rank, hit, depth in verdicts:
        model.observe(offered, rank if hit and rank < offered else None, depth, proposer=str(rank))
    for row in model.rates():
        assert all(0 <= rate <= 1 for rate in row) and sum(row) <= 1 + 1e-9 and list(row) == sorted(row, reverse=True)
    assert len(model.proposers()) <= 16


def test_a_verdict_that_cannot_be_is_refused() -> None:
    for offered, hit, depth in ((0, None, 1), (2, 2, 1), (2, -1, 1), (2, 0, 0)):
        with pytest.raises(ValueError):
            AcceptanceModel().observe(offered, hit, depth)


RAW = CodecOption("raw", 8192)
LOSSLESS = CodecOption("lossless", 4000, row_s=0.0004, frame_s=0.0002)
INT4 = CodecOption("int4", 2048, row_s=0.0001, lossless=False)


@settings(deadline=None)
@given(st.floats(1e5, 1e12), st.integers(1, 256))
def test_a_codec_is_chosen_exactly_below_its_break_even(bandwidth: float, rows: int) -> None:
    edge = break_even_bandwidth(RAW, LOSSLESS, rows)
    assert edge == pytest.approx(8 * rows * (8192 - 4000) / (0.0002 + rows * 0.0004))
    if abs(bandwidth / edge - 1) > 1e-6:
        assert choose_codec([RAW, LOSSLESS], bandwidth, rows).name == ("lossless" if bandwidth < edge else "raw")


def test_the_current_codec_stays_until_another_is_clearly_better() -> None:
    edge = break_even_bandwidth(RAW, LOSSLESS, 8)
    for current in ("raw", "lossless"):
        for factor in (0.97, 1.03):
            assert choose_codec([RAW, LOSSLESS], edge * factor, 8, current=current).name == current
    assert choose_codec([RAW, LOSSLESS], edge / 3, 8, current="raw").name == "lossless"
    assert choose_codec([RAW, LOSSLESS], edge * 3, 8, current="lossless").name == "raw"


def test_a_lossy_codec_is_never_chosen_unasked() -> None:
    assert choose_codec([RAW, LOSSLESS, INT4], 1e6, 8).name == "lossless"
    assert choose_codec([RAW, LOSSLESS, INT4], 1e6, 8, current="int4").name == "lossless"
    assert choose_codec([RAW, LOSSLESS, INT4], 1e6, 8, allow_lossy=True).name == "int4"
    with pytest.raises(ValueError, match="lossless"):
        choose_codec([INT4], 1e6, 8)


def test_break_even_is_never_without_savings_and_always_without_cost() -> None:
    assert break_even_bandwidth(RAW, CodecOption("padded", 9000, row_s=0.1), 4) == 0
    assert break_even_bandwidth(RAW, CodecOption("free", 10), 4) == math.inf
