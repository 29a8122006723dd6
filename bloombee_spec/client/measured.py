"""The route as this session measures it: round trips, bandwidths, compute and queues, and what a lap really takes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from bloombee_spec.client.info import StageInfo
from bloombee_spec.hosts.base import Span
from bloombee_spec.plan.compute import ComputeProfile
from bloombee_spec.plan.links import LinkEstimate
from bloombee_spec.plan.route import Leg, Route, Stage, plain_lap
from bloombee_spec.plan.store import PeerRecord, PeerStore
from bloombee_spec.wire.steering import Report

ASSUMED_LEG_S = 0.05  # one-way delay of a link before anything was measured
ASSUMED_BANDWIDTH = 100e6  # bit/s
# As `benchmarks.ledger` finds them. A candidate's id with its parent, and a committed token:
ID_BYTES, COMMIT_BYTES = 3.0, 2.0
# A frame beside these and its rows, 30 bytes of libp2p included: on the client's links, from the verifier to a stage
# (no counters), between stages (a stamp, a longer checksum).
FRAME_BYTES, RESTART_FRAME_BYTES, HOP_FRAME_BYTES = 43.0, 40.0, 52.0
FLOOR, CEILING = 0.01, 0.5  # of the chance that a candidate needs
WEIGHT = 0.2  # of a new lap in the running estimate
CHANGE, SIZE_CHANGE = 0.1, 0.01  # relative change of a lap or a row's cost, or of its bytes, that makes a new route


@dataclass(slots=True)
class _Measured:
    """One stage and the link into it, as far as known."""

    compute: ComputeProfile
    share: float  # of the server's blocks
    blocks: int
    rtt_s: float | None = None  # client to this stage and back
    next_rtt_s: float | None = None
    bandwidth_bps: float | None = None
    queue_s: float = 0.0
    codec_costs: tuple[float, ...] = ()  # of the link behind this stage
    row_bytes: float | None = None  # on that link, in the codec that is in use


class RouteMeter:
    """Written by the event loop (`answered`, `reported`) and by decoding (`observe_lap`), read by both.

    One-way delays are halves of round trips. What a lap really takes, commit to commit, corrects their sum: it
    contains what no single measurement sees.

    :param spans: the route; `infos` what its servers say about themselves
    :param embeds: token ids travel to the first stage; `verifies` ids come back from the last one
    """

    def __init__(self, spans: Sequence[Span], infos: Sequence[StageInfo], *, embeds: bool, verifies: bool):
        self._lock = threading.Lock()
        self._peers = [span.peer for span in spans]
        self._stages = [
            _Measured(_profile(info), (span.end - span.start) / max(1, info.end - info.start), span.end - span.start)
            for span, info in zip(spans, infos)
        ]
        self._embeds, self._verifies = embeds, verifies
        self._row_bytes = float(infos[0].row_bytes)
        self._first_rtt_s: float | None = None
        self._lap_s: float | None = None
        self._route: Route | None = None
        self._news = False  # measured since the route was built

    # ---------------------------------------------------------------- measurements

    def recall(self, store: PeerStore) -> None:
        """Start from what earlier sessions learned about these peers."""
        with self._lock:
            self._news = True
            for peer, stage in zip(self._peers, self._stages):
                record = store.get(peer)
                if record is not None:
                    stage.rtt_s = stage.rtt_s or 2 * record.link.delay_s
                    if record.link.samples:
                        stage.bandwidth_bps = stage.bandwidth_bps or record.link.bandwidth_bps

    def remember(self, store: PeerStore) -> None:
        with self._lock:
            for peer, stage in zip(self._peers, self._stages):
                if stage.rtt_s is not None:
                    known = stage.bandwidth_bps is not None
                    link = LinkEstimate(stage.rtt_s / 2, stage.bandwidth_bps or ASSUMED_BANDWIDTH, int(known))
                    store.put(peer, PeerRecord(link, stage.compute))

    def answered(self, index: int, rtt_s: float) -> None:
        """A stage answered the client at once, `rtt_s` seconds after it was asked."""
        with self._lock:
            self._news = True
            self._stages[index].rtt_s = rtt_s

    def reported(self, index: int, report: Report) -> None:
        with self._lock:
            self._news = True
            stage = self._stages[index]
            stage.next_rtt_s = report.next_rtt_s or stage.next_rtt_s
            stage.queue_s = report.queue_s
            stage.codec_costs = report.codec_costs
            self._first_rtt_s = report.first_rtt_s or self._first_rtt_s
            if report.bandwidth_bps and index > 0:
                stage.bandwidth_bps = min(max(report.bandwidth_bps, 1e3), 1e13)
            if report.compute:
                points = dict(zip(report.compute[::2], report.compute[1::2]))
                if all(rows > 0 for rows in points):
                    stage.compute = ComputeProfile.measured(points)  # type: ignore[arg-type]

    def codec_costs(self, index: int) -> tuple[tuple[float, ...], float | None]:
        """What the codecs of the link behind a stage cost, and the link's bandwidth (None: not measured)."""
        with self._lock:
            known = self._stages[index + 1].bandwidth_bps if index + 1 < len(self._stages) else None
            return self._stages[index].codec_costs, known

    def rows_take(self, index: int, nbytes: float) -> None:
        """Bytes of a row on the link behind a stage, encoded as it is now."""
        with self._lock:
            self._news = True
            self._stages[index].row_bytes = nbytes

    def bandwidth_into(self, index: int) -> float:
        """Of the link from the stage before, bit/s; assumed while nobody measured it."""
        with self._lock:
            return self._stages[index].bandwidth_bps or ASSUMED_BANDWIDTH

    def observe_lap(self, seconds: float) -> None:
        """A lap that nothing shortened: from one miss to the next commit, without candidates between."""
        with self._lock:
            self._news = True
            self._lap_s = seconds if self._lap_s is None else (1 - WEIGHT) * self._lap_s + WEIGHT * seconds

    # ---------------------------------------------------------------- what they amount to

    @property
    def route(self) -> Route:
        """The same object until the estimates have moved by a tenth, so that nobody plans anew for noise."""
        with self._lock:
            if self._route is None or self._news:
                self._news = False
                fresh = self._build()
                if self._route is None or _differs(self._route, fresh):
                    self._route = fresh
            return self._route

    @property
    def lap_s(self) -> float:
        """Seconds per token without speculation."""
        return self._lap_s if self._lap_s is not None else plain_lap(self.route)

    @property
    def longest_rtt_s(self) -> float:
        """To a stage and back."""
        with self._lock:
            return max(2 * ASSUMED_LEG_S if stage.rtt_s is None else stage.rtt_s for stage in self._stages)

    @property
    def min_probability(self) -> float:
        """A candidate whose path has probability P saves a lap with probability P and costs a row at every stage, so
        it pays iff `P > row_s / lap_s`."""
        return min(CEILING, max(FLOOR, row_seconds(self.route) / max(self.lap_s, 1e-6)))

    @property
    def row_pace_s(self) -> float:
        """Seconds for which one row occupies the slowest link: rows that are sent faster than this pile up there, and
        a correction waits behind them."""
        return max(8.0 * leg.row_bytes / leg.bandwidth_bps for leg in (self.route.uplink, *self.route.hops))

    def _build(self) -> Route:
        stages = self._stages
        client_row = ID_BYTES + (0.0 if self._embeds else self._row_bytes)
        uplink = _leg(stages[0].rtt_s, stages[0].bandwidth_bps, client_row)
        downlink = _leg(stages[-1].rtt_s, None, COMMIT_BYTES if self._verifies else self._behind(stages[-1]))
        hops = tuple(
            _leg(before.next_rtt_s, after.bandwidth_bps, self._behind(before), HOP_FRAME_BYTES)
            for before, after in pairwise(stages)
        )
        restart: Leg | None = None
        if self._embeds and self._verifies:
            restart = _leg(self._first_rtt_s, None, COMMIT_BYTES, RESTART_FRAME_BYTES)
        elif self._embeds:  # the client verifies, and tells the first stage
            restart = replace(uplink, delay_s=uplink.delay_s + downlink.delay_s)
        route = Route(
            tuple(Stage(_scaled(s.compute, s.share), s.queue_s, max(1, s.blocks)) for s in stages),
            uplink, hops, downlink, restart,
        )  # fmt: skip
        return route if self._lap_s is None else _corrected(route, self._lap_s - plain_lap(route))

    def _behind(self, stage: _Measured) -> float:
        """Bytes of a row that a stage passes on, its id included."""
        return ID_BYTES + (self._row_bytes if stage.row_bytes is None else stage.row_bytes)


def row_seconds(route: Route) -> float:
    """What one more row adds to a lap: its share of each hop, and the slope of each stage's compute (rows of one
    forward share the pass over the weights)."""
    compute = sum(max(0.0, stage.compute.time(8) - stage.compute.time(1)) / 7 for stage in route.stages)
    crowding = sum(stage.crowding(1.0) for stage in route.stages)
    return compute + crowding + sum(8.0 * hop.row_bytes / hop.bandwidth_bps for hop in route.hops)


def _leg(rtt_s: float | None, bandwidth_bps: float | None, row_bytes: float, frame_bytes: float = FRAME_BYTES) -> Leg:
    delay = ASSUMED_LEG_S if rtt_s is None else rtt_s / 2
    return Leg(delay, bandwidth_bps or ASSUMED_BANDWIDTH, row_bytes, frame_bytes)


def _corrected(route: Route, missing_s: float) -> Route:
    """The same route with a lap that is `missing_s` longer (shorter, if negative), the same for each leg: nobody knows
    where it is lost."""
    on_lap = len(route.hops) + (1 if route.restart is not None else 2)
    each = missing_s / on_lap

    def moved(leg: Leg) -> Leg:
        return replace(leg, delay_s=max(0.0, leg.delay_s + each))

    return replace(
        route, hops=tuple(map(moved, route.hops)), uplink=moved(route.uplink), downlink=moved(route.downlink),
        restart=None if route.restart is None else moved(route.restart),
    )  # fmt: skip


def _differs(old: Route, new: Route) -> bool:
    pairs = [(plain_lap(old), plain_lap(new)), (row_seconds(old), row_seconds(new))]
    pairs += [(a.bandwidth_bps, b.bandwidth_bps) for a, b in zip(old.hops, new.hops)]
    sizes = [(a.row_bytes, b.row_bytes) for a, b in zip(old.legs, new.legs)]
    return any(abs(a - b) > SIZE_CHANGE * max(a, b) for a, b in sizes) or any(
        abs(a - b) > CHANGE * max(abs(a), abs(b)) for a, b in pairs
    )


def _profile(info: StageInfo) -> ComputeProfile:
    usable = {rows: seconds for rows, seconds in info.row_seconds.items() if rows > 0 and 0 <= seconds < 1e5}
    return ComputeProfile.measured(usable) if usable else ComputeProfile.flat(0.0)


def _scaled(profile: ComputeProfile, share: float) -> ComputeProfile:
    return ComputeProfile(tuple((rows, seconds * share) for rows, seconds in profile.points))
