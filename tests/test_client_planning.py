"""The planner in a stream: what it is told about the route and the drafter, and what its plans let through."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest

from bloombee_spec.client.candidates import Candidates, root_ref_of
from bloombee_spec.client.info import StageInfo
from bloombee_spec.client.measured import ASSUMED_BANDWIDTH, ID_BYTES, RouteMeter, row_seconds
from bloombee_spec.client.pace import Pace
from bloombee_spec.client.stream import Stream, StreamRequest
from bloombee_spec.config import SpecConfig
from bloombee_spec.draft.base import Drafter, Proposal, never
from bloombee_spec.hosts.base import Span
from bloombee_spec.plan.decision import Mode
from bloombee_spec.plan.route import plain_lap
from bloombee_spec.plan.store import PeerStore
from bloombee_spec.tree import NodeSpec, TokenTree
from bloombee_spec.wire.frames import CommitFrame
from bloombee_spec.wire.steering import Report

VOCAB = 100


def meter(
    stages: int = 4, hidden: int = 576, seconds: float = 0.01, embeds: bool = True, verifies: bool = True
) -> RouteMeter:
    spans = [Span(f"peer{i}", 2 * i, 2 * i + 2) for i in range(stages)]
    infos = [
        StageInfo(
            span.peer, span.start, span.end, "llama", i == 0, i == stages - 1, "float32", hidden, ("raw",), (), 512, 4,
            64, 64, {1: seconds, 8: 1.1 * seconds, 64: 2 * seconds},
        )
        for i, span in enumerate(spans)
    ]  # fmt: skip
    return RouteMeter(spans, infos, embeds=embeds, verifies=verifies)


def measured(delay_s: float, bandwidth_bps: float, stages: int = 4, **kwargs: float) -> RouteMeter:
    found = meter(stages, **kwargs)  # type: ignore[arg-type]
    for i in range(stages):
        found.answered(i, 2 * delay_s)
        last = i == stages - 1
        found.reported(
            i,
            Report(
                next_rtt_s=None if last else 2 * delay_s,
                first_rtt_s=2 * delay_s if last else None,
                bandwidth_bps=bandwidth_bps if i else None,
            ),
        )
    return found


class Guesser(Drafter):
    """Proposes `right(position)` first, then others; each promised with `prob`."""

    instant = True

    def __init__(self, right: Callable[[int], int], prob: float = 0.9, width: int = 1):
        self._right, self._prob, self._width = right, prob, width
        self._known = 0

    def start(self, prompt: Sequence[int]) -> None:
        self._known = len(prompt)

    def observe(self, tokens: Sequence[int]) -> None:
        self._known += len(tokens)

    def propose(
        self, path: Sequence[int], budget: int, *, max_depth: int = 64, interrupted: Callable[[], bool] = never
    ) -> list[Proposal]:
        at, found, parent = self._known + len(path), [], -1
        for depth in range(max_depth):
            for rank in range(self._width):
                if len(found) >= budget:
                    return found
                token = (self._right(at + depth) + 50 * rank) % VOCAB
                found.append(Proposal(parent, token, self._prob if rank == 0 else (1 - self._prob) / 4))
            parent = len(found) - self._width
        return found


class Clock:
    """Time passes when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def play(clock: Clock, stream: Stream, text: Callable[[int], int], tokens: int) -> list[tuple[int, Mode, int]]:
    """Commit `text` one token at a time: a candidate is judged a lap after it was sent, a corrected token's successor
    a lap after the miss. Returns `(candidates in flight, mode, proposed)` before each commit."""
    assert stream._meter is not None and stream.planning is not None
    lap_s = plain_lap(stream._meter.route)
    sent_at: dict[int, float] = {}

    def draft() -> None:
        while stream.draft():
            pass
        for node in stream.tree.nodes.values():
            sent_at.setdefault(node.id, clock.now)

    stream.begin(StreamRequest((1, 2), 2 + tokens), 64)
    draft()
    seen, row_sent = [], clock.now
    for position in range(2, 2 + tokens):
        mode = Mode.STREAM if stream.planning.plan is None else stream.planning.plan.mode
        seen.append((len(stream.tree), mode, stream.tally.proposed))
        clock.now = max(clock.now + 1e-4, row_sent + lap_s)
        hit = stream.tree.child_of_root(text(position))
        row_sent = clock.now if hit is None else sent_at[hit.id]
        stream.commit(CommitFrame(0, stream.epoch, position, (text(position),)))
        draft()
    return seen


def stream(meter: RouteMeter, drafter: Drafter, plan: str = "auto") -> Stream:
    config = SpecConfig(plan=plan)
    return Stream(0, drafter, config, credits=64, inject=True, vocab_size=VOCAB, meter=meter)


# ---------------------------------------------------------------- the route


def test_a_measured_route_has_the_legs_that_were_measured() -> None:
    route = measured(0.03, 20e6).route
    assert [hop.delay_s for hop in route.hops] == [0.03] * 3
    assert {hop.bandwidth_bps for hop in route.hops} == {20e6}
    assert route.uplink.delay_s == route.downlink.delay_s == 0.03
    assert route.restart is not None and route.restart.delay_s == 0.03
    assert route.hops[0].row_bytes == 576 * 4 + ID_BYTES
    assert route.uplink.row_bytes < 8 and route.downlink.row_bytes < 8
    assert plain_lap(route) == pytest.approx(4 * 0.03 + 4 * 0.01 + 3 * 8 * (2304 + 12) / 20e6, rel=0.01)


def test_unmeasured_links_are_assumed_and_reports_replace_the_assumption() -> None:
    fresh = meter()
    assert {hop.bandwidth_bps for hop in fresh.route.hops} == {ASSUMED_BANDWIDTH}
    fresh.reported(1, Report(bandwidth_bps=1e6))
    assert [hop.bandwidth_bps for hop in fresh.route.hops] == [1e6, ASSUMED_BANDWIDTH, ASSUMED_BANDWIDTH]


def test_ends_at_the_client_make_its_legs_carry_rows() -> None:
    route = meter(embeds=False, verifies=False).route
    assert route.restart is None
    assert route.uplink.row_bytes == route.downlink.row_bytes == 576 * 4 + ID_BYTES


def test_a_row_is_as_long_as_its_codec_makes_it() -> None:
    found = measured(0.03, 20e6)
    plain = found.route
    found.rows_take(0, 576.0)
    assert [hop.row_bytes - ID_BYTES for hop in found.route.hops] == [576.0, 576 * 4, 576 * 4]
    assert plain_lap(found.route) == pytest.approx(plain_lap(plain) - 8 * 576 * 3 / 20e6)
    route = found.route
    found.rows_take(0, 578.0)
    assert found.route is route, "a change that nobody would notice"


def test_a_lap_as_it_was_corrects_the_sum_of_its_parts() -> None:
    found = measured(0.03, 20e6)
    before = plain_lap(found.route)
    found.observe_lap(before + 0.08)
    assert plain_lap(found.route) == pytest.approx(before + 0.08)
    assert found.lap_s == pytest.approx(before + 0.08)


def test_noise_does_not_make_a_new_route() -> None:
    found = measured(0.03, 20e6)
    found.observe_lap(0.200)
    route = found.route
    found.observe_lap(0.203)
    assert found.route is route
    for _ in range(20):
        found.observe_lap(0.4)
    assert found.route is not route


def test_a_candidate_costs_more_on_a_slow_link_and_less_on_a_long_one() -> None:
    fast, slow = measured(0.05, 1e9, seconds=1e-4), measured(0.05, 2e6, seconds=1e-4)
    assert row_seconds(slow.route) > 50 * row_seconds(fast.route)
    assert slow.min_probability > fast.min_probability
    assert measured(0.2, 2e6).min_probability < slow.min_probability


def test_a_report_with_impossible_compute_points_is_refused_at_the_border() -> None:
    with pytest.raises(ValueError, match="compute"):
        Report(compute=(1.0,))
    with pytest.raises(ValueError, match="range"):
        Report(queue_s=float("nan"))
    found = meter()
    found.reported(0, Report(compute=(0.0, 1.0)))  # a profile from row 0 on: not used
    assert found.route.stages[0].compute.time(1) == pytest.approx(0.01)


def test_link_estimates_outlive_the_session(tmp_path: object) -> None:
    store = PeerStore(f"{tmp_path}/peers.json")
    measured(0.03, 20e6).remember(store)
    store.save()
    later = meter()
    later.recall(PeerStore(f"{tmp_path}/peers.json"))
    assert {hop.bandwidth_bps for hop in later.route.hops} == {20e6}
    assert later.route.uplink.delay_s == pytest.approx(0.03)


# ---------------------------------------------------------------- plans


def right(position: int) -> int:
    return (7 * position + 3) % VOCAB


def wrong(position: int) -> int:
    return (right(position) + 1) % VOCAB


def test_a_drafter_that_is_never_right_is_switched_off_within_20_laps(clock: Clock) -> None:
    played = play(clock, stream(measured(0.05, 100e6), Guesser(wrong)), right, 60)
    off = [mode is Mode.OFF for _, mode, _ in played]
    assert True in off[:20]
    assert sum(not flag for flag in off[20:]) <= 6, "probes only"
    assert played[-1][2] < 150


def test_speculation_comes_back_when_the_drafter_recovers(clock: Clock) -> None:
    text = lambda position: right(position) if position < 60 else wrong(position)  # noqa: E731
    played = play(clock, stream(measured(0.05, 100e6), Guesser(wrong)), text, 200)
    assert played[55][1] is Mode.OFF
    assert all(mode is not Mode.OFF for _, mode, _ in played[150:])
    assert played[-20][0] > 4


def test_a_good_drafter_keeps_the_pipe_full_on_a_long_ring(clock: Clock) -> None:
    played = play(clock, stream(measured(0.1, 100e6), Guesser(right)), right, 60)
    assert all(mode is Mode.STREAM for _, mode, _ in played[8:])
    assert min(live for live, _, _ in played[8:40]) >= 8


def test_a_synchronous_plan_waits_for_the_verdict(clock: Clock) -> None:
    guesser = Guesser(lambda position: right(position) if position % 5 else wrong(position))
    tree = stream(measured(0.05, 100e6), guesser, plan="tree")
    played = play(clock, tree, right, 60)
    assert {mode for _, mode, _ in played} <= {Mode.TREE, Mode.OFF}
    for position, ((before, _, sent_before), (_, _, sent)) in enumerate(pairwise(played), 2):
        if sent > sent_before:
            missed = position % 5 == 0
            assert missed or before <= 1, "a new tree leaves only when nothing of the last one is left"


def test_a_plan_bounds_the_siblings_of_a_node() -> None:
    tree = TokenTree()
    for token in (1, 2):
        tree.commit(token)
    candidates = Candidates(tree, 0.0, VOCAB)
    candidates.restart(root_ref_of(2), 1)
    ask = candidates.next_ask(16, 8, 100)
    assert ask is not None
    proposals = [Proposal(-1, token, 0.2) for token in range(5)]
    sent: list[NodeSpec] = candidates.place(ask, proposals, 16, width=2)
    assert [spec.token for spec in sent] == [0, 1]


def test_burst_and_pause_follow_the_slowest_link(clock: Clock) -> None:
    slow = measured(0.05, 1e6, seconds=1e-4)  # 18 ms per row, lap 0.26 s
    pace = Pace(slow)
    assert 1 <= pace.burst(16) <= 4
    pace.sent(3)
    assert pace.pause() == pytest.approx(3 * slow.row_pace_s)
    clock.now += 3 * slow.row_pace_s
    assert pace.pause() == 0.0
    assert Pace(measured(0.05, 1e9)).burst(16) == 16


def test_random_reports_never_break_the_route() -> None:
    rng = random.Random(1)
    for _ in range(200):
        found = meter(stages=rng.randint(1, 6))
        for _ in range(6):
            stage = rng.randrange(len(found.route.stages))
            found.reported(
                stage,
                Report(
                    next_rtt_s=rng.choice((None, 0.0, 1e-6, 5.0)),
                    first_rtt_s=rng.choice((None, 3.0)),
                    bandwidth_bps=rng.choice((None, 0.0, 1.0, 1e14)),
                    queue_s=rng.choice((0.0, 4.0)),
                    compute=rng.choice(((), (1.0, 0.1), (8.0, 0.5, 1.0, 0.7))),
                ),
            )
            found.observe_lap(rng.choice((1e-9, 0.1, 50.0)))
            assert 0.01 <= found.min_probability <= 0.5 and found.row_pace_s >= 0
