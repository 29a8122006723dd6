"""Rows or KV: whichever is there sooner."""

from __future__ import annotations

import math

import pytest

from bloombee_spec.kv.levels import Level
from bloombee_spec.plan.recovery import Recovery


def recovery(bandwidth_bps: float, row_s: float, tokens: int = 1024) -> Recovery:
    return Recovery(tokens, row_bytes=2304, kv_bytes=8 * 1536, row_s=row_s, bandwidth_bps=bandwidth_bps)


@pytest.mark.parametrize(
    ("bandwidth_bps", "row_s", "best"),
    [(10e6, 1e-3, "rows"), (1e9, 1e-3, "kv"), (1e9, 1e-6, "rows"), (10e6, 1e-1, "kv")],
)
def test_slow_links_take_rows_and_slow_servers_take_kv(bandwidth_bps: float, row_s: float, best: str) -> None:
    assert recovery(bandwidth_bps, row_s).choose(Level.LOSSLESS, math.inf)[0] == best


def test_time_grows_with_tokens_and_falls_with_bandwidth() -> None:
    for way in ("rows", "kv"):
        times = [recovery(50e6, 1e-4, tokens).seconds(way) for tokens in (0, 1, 256, 257, 2048)]
        assert times == sorted(times) and times[0] == 0.0
        assert recovery(10e6, 1e-4).seconds(way) > recovery(100e6, 1e-4).seconds(way)


def test_link_and_receiver_work_at_the_same_time() -> None:
    both = recovery(100e6, 1e-3, 2048).seconds("rows")
    link, compute = 8 * 0.7 * 2304 * 2048 / 100e6, 2048 * 1e-3
    assert max(link, compute) < both < link + compute


def test_kv_is_exact_unless_that_would_be_late_and_loss_is_allowed() -> None:
    slow = recovery(1e6, 1e-1)
    exact = slow.seconds("kv")
    way, plan = slow.choose(Level.COARSE, 2 * exact)
    assert (way, plan.lossless) == ("kv", True)
    way, plan = slow.choose(Level.LOSSLESS, 0.1 * exact)
    assert (way, plan.lossless, plan.seconds) == ("kv", True, exact)
    way, plan = slow.choose(Level.COARSE, 0.5 * exact)
    assert way == "kv" and not plan.lossless and plan.seconds <= 0.5 * exact
    assert len(plan.levels) == 4
    _, hasty = slow.choose(Level.INT8, 0.01 * exact)
    assert set(hasty.levels) == {Level.INT8}, "the worst level that is allowed is the worst that is used"
    way, plan = slow.choose(Level.COARSE, 0.5 * exact, ("rows",))
    assert way == "rows" and plan.lossless
