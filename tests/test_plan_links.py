"""Link estimates follow the frames; what was learned survives restarts, and damage does not survive at all."""

from __future__ import annotations

import itertools
import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloombee_spec.plan.compute import ComputeProfile
from bloombee_spec.plan.links import LinkEstimate, LinkMeter
from bloombee_spec.plan.store import MAX_FILE_BYTES, PeerRecord, PeerStore

GUESS = LinkEstimate(0.1, 1e8)


def _feed(
    meter: LinkMeter, delay: float, bandwidth: float, frames: int, *, seed: int = 0, jitter: float = 0.0
) -> None:
    rng, sent, free = random.Random(seed), 0.0, 0.0
    largest = 8 * 60_000 / bandwidth
    for _ in range(frames):
        sent += rng.choice((0.0, 0.3 * largest, 2 * largest))
        nbytes = rng.choice((200, 2_000, 20_000, 60_000))
        free = max(free, sent) + 8 * nbytes / bandwidth
        meter.observe(sent, free + delay + rng.uniform(0, jitter), nbytes)


@settings(max_examples=30, deadline=None)
@given(st.floats(0.002, 0.3), st.floats(2e6, 1e9), st.integers(0, 99))
def test_delay_and_bandwidth_are_found_from_frames_that_queue(delay: float, bandwidth: float, seed: int) -> None:
    meter = LinkMeter(GUESS)
    _feed(meter, delay, bandwidth, 200, seed=seed)
    assert meter.estimate.delay_s == pytest.approx(delay, rel=0.2, abs=0.004)  # a long delay is learned slowly
    # what matters is the time of a frame: at high bandwidth the slope drowns in nothing that anybody would notice
    for nbytes in (2_000, 60_000):
        assert meter.estimate.time(nbytes) == pytest.approx(delay + 8 * nbytes / bandwidth, rel=0.2, abs=0.004)


def test_a_frame_behind_another_is_not_charged_for_the_wait() -> None:
    meter = LinkMeter(GUESS)
    for i in range(100):  # pairs sent at the same instant: the second arrives after both were serialised
        meter.observe(float(i), i + 0.05 + 0.008, 10_000)
        meter.observe(float(i), i + 0.05 + 0.024, 20_000)
    assert meter.estimate.delay_s == pytest.approx(0.05, abs=0.005)
    assert meter.estimate.bandwidth_bps == pytest.approx(1e7, rel=0.1)


def test_one_stall_moves_little_and_a_lasting_change_wins() -> None:
    meter = LinkMeter(GUESS)
    _feed(meter, 0.05, 5e7, 150)
    before = meter.estimate.delay_s
    meter.observe(1000.0, 1030.0, 2_000)
    assert meter.estimate.delay_s - before < 0.05
    for i in range(300):
        meter.observe(2000.0 + i, 2000.0 + i + 0.2, 2_000)
    assert meter.estimate.delay_s == pytest.approx(0.2, rel=0.1)


def test_frames_of_one_size_do_not_move_the_bandwidth() -> None:
    meter = LinkMeter(GUESS)
    for i in range(200):
        meter.observe(float(i), i + 0.03, 4_000)
    assert meter.estimate.bandwidth_bps == pytest.approx(GUESS.bandwidth_bps)
    assert meter.estimate.time(4_000) == pytest.approx(0.03, rel=0.05)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(allow_nan=True), st.floats(allow_nan=True), st.integers(-(2**40), 2**40)), max_size=40
    )
)
def test_whatever_a_peer_claims_the_estimate_stays_one_of_a_link(frames: list[tuple[float, float, int]]) -> None:
    meter = LinkMeter(GUESS)
    for sent, received, nbytes in frames:
        meter.observe(sent, received, nbytes)
    assert meter.estimate.time(1000) > 0  # LinkEstimate checks the rest


@pytest.mark.parametrize(
    ("delay", "bandwidth"), [(-1, 1e6), (float("nan"), 1e6), (0.1, 0), (0.1, float("inf")), (1e9, 1e6)]
)
def test_a_link_that_cannot_be_is_refused(delay: float, bandwidth: float) -> None:
    with pytest.raises(ValueError):
        LinkEstimate(delay, bandwidth)


def _ticks() -> Callable[[], float]:
    now = itertools.count()
    return lambda: float(next(now))


def test_records_survive_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "peers.json"
    store = PeerStore(path)
    record = PeerRecord(LinkEstimate(0.025, 3.5e7, 12), ComputeProfile.measured({1: 0.01, 8: 0.02}))
    store.put("12D3KooA", record)
    store.put("12D3KooB", PeerRecord(GUESS))
    store.save()
    again = PeerStore(path)
    assert again.get("12D3KooA") == record
    assert again.get("12D3KooB") == PeerRecord(GUESS)
    assert again.get("12D3KooC") is None


def test_the_store_keeps_the_latest_peers_only(tmp_path: Path) -> None:
    store = PeerStore(tmp_path / "peers.json", limit=3, clock=_ticks())
    for i in range(10):
        store.put(f"peer{i}", PeerRecord(GUESS))
    store.put("peer8", PeerRecord(LinkEstimate(0.2, 1e6)))
    store.put("new", PeerRecord(GUESS))
    assert len(store) == 3
    assert store.get("peer8") is not None and store.get("new") is not None and store.get("peer7") is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[1]",
        b'{"version": 99, "peers": {}}',
        b'{"version": 1}',
        b'{"version": 1, "peers": []}',
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b" " * (MAX_FILE_BYTES + 1),
    ],
)
def test_a_damaged_file_reads_as_empty_and_is_replaced(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "peers.json"
    path.write_bytes(content)
    store = PeerStore(path)
    assert len(store) == 0
    store.put("peer", PeerRecord(GUESS))
    store.save()
    assert len(PeerStore(path)) == 1


def test_a_file_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    good = {"at": 1, "delay_s": 0.1, "bandwidth_bps": 1e6, "samples": 1}
    text = json.dumps({"version": 1, "peers": {"good": good}})
    path.write_text(text)
    assert len(PeerStore(path)) == 1
    path.write_text(text + " " * MAX_FILE_BYTES)
    assert len(PeerStore(path)) == 0


@pytest.mark.parametrize(
    "entry",
    [
        7,
        {},
        {"at": 1, "delay_s": -1, "bandwidth_bps": 1e6, "samples": 1},
        {"at": 1, "delay_s": "0.1", "bandwidth_bps": 1e6, "samples": 1},
        {"at": 1, "delay_s": 0.1, "bandwidth_bps": 1e6, "samples": 1, "compute": [[1, 2]] * 99},
        {"at": 1, "delay_s": 0.1, "bandwidth_bps": 1e6, "samples": 1, "compute": [[1]]},
        {"at": 1, "delay_s": 0.1, "bandwidth_bps": 1e6, "samples": 1, "compute": "x"},
        {"at": True, "delay_s": 0.1, "bandwidth_bps": 1e6, "samples": 1},
    ],
)
def test_one_bad_entry_does_not_cost_the_others(tmp_path: Path, entry: object) -> None:
    path = tmp_path / "peers.json"
    good = {"at": 1, "delay_s": 0.1, "bandwidth_bps": 1e6, "samples": 1}
    path.write_text(json.dumps({"version": 1, "peers": {"bad": entry, "good": good, "x" * 500: good}}))
    store = PeerStore(path)
    assert len(store) == 1 and store.get("good") == PeerRecord(LinkEstimate(0.1, 1e6, 1))


def test_a_failed_save_leaves_the_old_file_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "peers.json"
    store = PeerStore(path)
    store.put("peer", PeerRecord(GUESS))
    store.save()
    old = path.read_bytes()

    def broken(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", broken)
    store.put("other", PeerRecord(GUESS))
    with pytest.raises(OSError):
        store.save()
    assert path.read_bytes() == old and os.listdir(tmp_path) == ["peers.json"]
