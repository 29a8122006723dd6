"""The ring as the planner sees it: legs, stages, and how long a lap takes with n rows in it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from bloombee_spec.plan.compute import ComputeProfile


@dataclass(frozen=True, slots=True)
class Leg:
    """One direction of one link.

    :param delay_s: one-way delay, seconds
    :param bandwidth_bps: bits per second
    :param row_bytes: bytes per candidate row on it: `hidden · bytes per value + scales` between stages, a few bytes
        where ids travel (client to a first stage that has the embeddings, and commits)
    :param frame_bytes: bytes per frame beside the rows
    """

    delay_s: float
    bandwidth_bps: float
    row_bytes: float
    frame_bytes: float = 64.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.delay_s) and self.delay_s >= 0):
            raise ValueError(f"a delay of {self.delay_s} s")
        if not self.bandwidth_bps > 0:
            raise ValueError(f"a bandwidth of {self.bandwidth_bps} bit/s")
        if not (self.row_bytes >= 0 and self.frame_bytes >= 0):
            raise ValueError(f"{self.row_bytes} bytes per row, {self.frame_bytes} per frame")

    def serialisation(self, rows: float) -> float:
        """Seconds for which a frame of `rows` occupies the link."""
        return 8.0 * (self.frame_bytes + rows * self.row_bytes) / self.bandwidth_bps

    def time(self, rows: float) -> float:
        """Seconds from the start of sending to the last byte's arrival."""
        return self.delay_s + self.serialisation(rows)


@dataclass(frozen=True, slots=True)
class Stage:
    """A server of the route.

    :param compute: seconds of one forward by rows
    :param queue_s: how long a row waits there for other people's work, seconds (servers report it in commits)
    :param blocks: transformer blocks; a forward can be cut short between two of them
    """

    compute: ComputeProfile
    queue_s: float = 0.0
    blocks: int = 8

    def __post_init__(self) -> None:
        if not (math.isfinite(self.queue_s) and self.queue_s >= 0) or self.blocks < 1:
            raise ValueError(f"a stage of {self.blocks} blocks with a queue of {self.queue_s} s")

    @property
    def utilisation(self) -> float:
        """Share of the server that other people use: `q / (q + compute(1))`, that of a queue with this wait."""
        return self.queue_s / (self.queue_s + self.compute.time(1)) if self.queue_s > 0 else 0.0

    def time(self, rows: float) -> float:
        """Seconds at this stage for `rows`, waiting included: `compute(n) + q + u·q·(n − 1)`, u the utilisation.

        On an idle server a row waits for nobody and extra rows are free riders; near saturation each extra row is
        another share of the server that somebody (the stream's own next lap included) waits for. This is what lets
        speculation shrink to zero under load (the goodput of SmartSpec/TurboSpec is the idea; the pricing is ours).
        """
        if rows <= 0:
            return 0.0
        return self.compute.time(rows) + self.queue_s + self.crowding(rows - 1.0)

    def crowding(self, rows: float) -> float:
        """Seconds that this many extra rows in flight add to a lap here: `u·q` each."""
        return self.utilisation * self.queue_s * max(0.0, rows)

    def occupancy(self, rows: float) -> float:
        """Seconds between two forwards of `rows` that the server can keep up with: `compute(n) / (1 − u)`."""
        if self.queue_s > 0 and self.compute.time(1) == 0:
            return self.queue_s  # no measured work explains the queue: one forward per wait
        return self.compute.time(rows) / (1.0 - self.utilisation)


@dataclass(frozen=True, slots=True)
class Route:
    """One ring.

    :param stages: in order; the last one verifies
    :param uplink: client to the first stage
    :param hops: stage i to stage i + 1, one fewer than stages
    :param downlink: verifier to client (commits)
    :param restart: verifier to first stage, when that stage has the embeddings and starts the row of a committed
        token by itself; None when the client has to send it
    """

    stages: tuple[Stage, ...]
    uplink: Leg
    hops: tuple[Leg, ...]
    downlink: Leg
    restart: Leg | None = None

    def __post_init__(self) -> None:
        if not self.stages or len(self.hops) != len(self.stages) - 1:
            raise ValueError(f"{len(self.stages)} stages need one hop fewer, not {len(self.hops)}")

    @property
    def legs(self) -> tuple[Leg, ...]:
        """From the client around to the client."""
        return (self.uplink, *self.hops, self.downlink)

    @property
    def floor_s(self) -> float:
        """Propagation alone of a loop through the client, seconds: what no bandwidth buys back."""
        return self.uplink.delay_s + self.downlink.delay_s + sum(hop.delay_s for hop in self.hops)

    def pipe_time(self, rows: float) -> float:
        """Seconds from arrival at the first stage to the verdict, `rows` travelling in one frame."""
        return sum(stage.time(rows) for stage in self.stages) + sum(hop.time(rows) for hop in self.hops)

    def loaded(self, queue_s: float) -> Route:
        """The same route with this queue delay at every stage."""
        return replace(self, stages=tuple(replace(stage, queue_s=queue_s) for stage in self.stages))


def lap_time(rows: float, route: Route) -> float:
    """`T_lap(n) = Σ legs + n·s_h/BW per leg + compute(n) + return leg`: commit to commit when all `rows` come from
    the client.
    """
    return route.downlink.time(1) + route.uplink.time(rows) + route.pipe_time(rows)


def plain_lap(route: Route) -> float:
    """Seconds per token without speculation: N legs when the first stage restarts by itself, N + 1 through the
    client.
    """
    if route.restart is None:
        start = route.downlink.time(1) + route.uplink.time(1)
    else:  # a single stage tells itself
        start = route.restart.time(1) if len(route.stages) > 1 else 0.0
    return start + route.pipe_time(1)


def uniform_route(
    stages: int,
    hop_s: float,
    bandwidth_bps: float,
    row_bytes: float,
    *,
    compute: ComputeProfile | None = None,
    embeddings_at_stage: bool = True,
    id_bytes: float = 8.0,
    frame_bytes: float = 64.0,
    blocks: int = 8,
) -> Route:
    """A ring whose legs are all alike, the client's included; with `embeddings_at_stage` ids go up, otherwise rows."""
    if stages < 1:
        raise ValueError(f"a route of {stages} stages")
    hop = Leg(hop_s, bandwidth_bps, row_bytes, frame_bytes)
    small = Leg(hop_s, bandwidth_bps, id_bytes, frame_bytes)
    stage = Stage(compute or ComputeProfile.flat(0.0), blocks=blocks)
    return Route(
        stages=(stage,) * stages,
        uplink=small if embeddings_at_stage else hop,
        hops=(hop,) * (stages - 1),
        downlink=small,
        restart=small if embeddings_at_stage else None,
    )
