"""The timing model of the emulated WAN, by a clock of its own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.wan_link import Link, LinkShape, SlowStart


def test_arrival_is_queueing_plus_transmission_plus_delay():
    link = Link(LinkShape(delay_s=0.025, bits_per_s=8e6), seed=0)  # 1 MB/s
    assert link.admit(10.0, 1000) == pytest.approx(10.026)
    assert link.admit(10.0, 1000) == pytest.approx(10.027), "the second message waits for the first to leave"
    assert link.admit(20.0, 1000) == pytest.approx(20.026), "an idle link has no queue"


def test_unlimited_rate_has_no_queue():
    link = Link(LinkShape(delay_s=0.025), seed=0)
    assert [link.admit(1.0, 1 << 20) for _ in range(3)] == pytest.approx([1.025] * 3)


def test_jitter_is_bounded_and_seeded():
    shape = LinkShape(delay_s=0.01, jitter_s=0.005)
    first, again, other = ([Link(shape, seed).admit(0.0, 1) for seed in seeds] for seeds in ([3], [3], [4]))
    assert first == again != other
    link = Link(shape, 5)
    delays = [link.admit(0.0, 1) for _ in range(200)]
    assert 0.01 <= min(delays) < 0.011 and 0.014 < max(delays) <= 0.015


def test_reshape_holds_for_later_messages():
    link = Link(LinkShape(delay_s=1.0), seed=0)
    link.reshape(LinkShape(delay_s=2.0))
    assert link.admit(0.0, 1) == pytest.approx(2.0)


def test_slow_start_lets_a_window_through_and_doubles_it_each_round_trip():
    shape = LinkShape(delay_s=0.05, idle_s=0.2, initial_window_bytes=1000)
    slow_start = SlowStart(shape)
    rounds = slow_start.rounds(1.0, 7500, shape)
    assert rounds == [(1.0, 1000), (pytest.approx(1.1), 2000), (pytest.approx(1.2), 4000), (pytest.approx(1.3), 500)]
    # Still in the last round, whose window is 8000: a further 7500 bytes fit, one more does not.
    assert slow_start.rounds(1.31, 7500, shape) == [(pytest.approx(1.31), 7500)]
    assert slow_start.rounds(1.32, 1, shape) == [(pytest.approx(1.4), 1)]


def test_slow_start_restarts_after_silence_only():
    shape = LinkShape(delay_s=0.01, idle_s=0.2, initial_window_bytes=1000)
    slow_start = SlowStart(shape)
    assert len(slow_start.rounds(0.0, 8000, shape)) > 1
    assert slow_start.rounds(0.1, 8000, shape) == [(0.1, 8000)], "0.1 s of silence keep the window"
    assert len(slow_start.rounds(0.4, 8000, shape)) > 1, "0.3 s of silence lose it"


def test_slow_start_does_not_grow_an_unused_window():
    shape = LinkShape(delay_s=0.01, idle_s=1.0, initial_window_bytes=1000)
    slow_start = SlowStart(shape)
    for i in range(50):
        assert slow_start.rounds(0.05 * i, 100, shape) == [(0.05 * i, 100)]
    assert slow_start.rounds(2.5, 1001, shape)[0][1] == 1000


@given(st.lists(st.tuples(st.floats(0, 0.5), st.integers(1, 100_000)), max_size=30), st.sampled_from([None, 0.1]))
def test_slow_start_keeps_bytes_and_order(sends: list[tuple[float, int]], idle_s: float | None):
    shape = LinkShape(delay_s=0.02, idle_s=idle_s, initial_window_bytes=1000)
    slow_start, now, last = SlowStart(shape), 0.0, 0.0
    for pause, size in sends:
        now = max(now + pause, last if pause > 0.4 else 0.0)
        parts = slow_start.rounds(now, size, shape)
        assert sum(part for _, part in parts) == size
        for departure, _ in parts:
            assert departure >= now and departure >= last
            last = departure


def test_reads_are_cut_into_pieces_of_a_millisecond_or_a_packet():
    sizes = [LinkShape(bits_per_s=rate).piece_bytes for rate in (None, 1e9, 100e6, 1e6)]
    assert sizes == [None, 125_000, 12_500, 1460]


def test_default_buffer_is_twice_the_bandwidth_delay_product_within_bounds():
    assert LinkShape(delay_s=0.1, bits_per_s=160e6).buffer_limit == 4_000_000
    assert LinkShape(delay_s=0.001, bits_per_s=1e6).buffer_limit == 1 << 20
    assert LinkShape(delay_s=1.0, bits_per_s=1e12).buffer_limit == LinkShape().buffer_limit == 16 << 20
    assert LinkShape(buffer_bytes=5).buffer_limit == 5


@pytest.mark.parametrize(
    "bad", [{"delay_s": -1}, {"jitter_s": -1}, {"bits_per_s": 0}, {"idle_s": 0}, {"buffer_bytes": 0}]
)
def test_impossible_shapes_are_rejected(bad: dict[str, float]):
    with pytest.raises(ValueError, match=r"must|needs"):
        LinkShape(**bad)  # type: ignore[arg-type]
