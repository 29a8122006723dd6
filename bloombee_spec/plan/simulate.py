"""Discrete-event simulation of a ring with speculation, in virtual time: what cannot be run can be planned.

The planner and the token tree are the ones that the plugin runs. Deterministic by seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from bloombee_spec.plan.acceptance import AcceptanceModel, Rates
from bloombee_spec.plan.decision import DraftCost, Limits, Mode, Plan
from bloombee_spec.plan.planner import Hysteresis, Planner
from bloombee_spec.plan.route import Route, lap_time, plain_lap
from bloombee_spec.plan.sim.client import SimClient
from bloombee_spec.plan.sim.drafts import Drafts
from bloombee_spec.plan.sim.events import Clock
from bloombee_spec.plan.sim.ring import TRUTH, Link, Row, SimStage, Verifier
from bloombee_spec.plan.sim.script import Script, geometric_rates
from bloombee_spec.tree import Node

PROMPT = (TRUTH, TRUTH)


@dataclass(frozen=True, slots=True)
class SimConfig:
    """One run.

    :param rates: the drafter's true acceptance `[depth][rank]`
    :param plan: followed throughout; None asks the planner, which starts without knowing the drafter
    :param tokens: to commit
    :param later: `(position, rates)`: changes of the drafter's quality along the text
    :param forward_rows: rows that a stage takes into one forward
    """

    route: Route
    rates: Rates
    draft: DraftCost = field(default_factory=lambda: DraftCost(0.0))
    plan: Plan | None = None
    tokens: int = 500
    seed: int = 0
    limits: Limits = field(default_factory=Limits)
    hysteresis: Hysteresis = field(default_factory=Hysteresis)
    later: tuple[tuple[int, Rates], ...] = ()
    forward_rows: int = 4096

    def __post_init__(self) -> None:
        if self.tokens < 2 or self.forward_rows < 1:
            raise ValueError("a run needs at least 2 tokens and 1 row per forward")
        if plain_lap(self.route) <= 0:
            raise ValueError(
                "a lap of this route takes no time at all: give it a delay, a bandwidth or a compute time"
            )


@dataclass(frozen=True, slots=True)
class SimReport:
    """What happened; times in seconds, as the client saw them.

    :param seconds: from the first committed token to the last
    :param laps: rows started for a committed token that was no candidate, the first one included
    :param misses: committed tokens that were no candidate at the client when they came
    :param miss_laps: for each miss, the time until the next token in plain laps
    :param rows: computed, over all stages
    :param useful_rows: rows that a run without speculation would have computed, for the same tokens
    :param link_bytes: sent by the client, then by each stage to the next
    :param modes: tokens by the mode of the plan in force
    """

    tokens: int
    seconds: float
    laps: int
    misses: int
    miss_laps: tuple[float, ...]
    rows: float
    useful_rows: float
    link_bytes: tuple[float, ...]
    stage_busy: tuple[float, ...]
    drafted: int
    hedge_hits: int
    hedge_layers_used: int
    modes: dict[Mode, int]
    off_lap: int | None
    final_plan: Plan
    events: int

    @property
    def tok_s(self) -> float:
        return (self.tokens - 1) / self.seconds

    @property
    def wasted_rows(self) -> float:
        """Share of the computed rows that no committed token needed."""
        return 1.0 - self.useful_rows / self.rows if self.rows else 0.0

    @property
    def bytes_per_token(self) -> float:
        return sum(self.link_bytes) / self.tokens


def simulate(config: SimConfig) -> SimReport:
    """Run one stream to its end.

    :raises RuntimeError: the stream stalled (a fault in the simulator or in the tree)
    """
    return Ring(config).run()


class Ring:
    """A ring of the simulator, wired up for one run."""

    def __init__(self, config: SimConfig):
        self.config = config
        route = config.route
        self.clock = Clock()
        self.modes = dict.fromkeys(Mode, 0)
        self.laps_planned = 0
        self.off_lap: int | None = None
        self.stages: list[SimStage] = []
        self.links: list[Link] = []
        last = len(route.stages) - 1
        for i, stage in enumerate(route.stages):
            self.stages.append(
                SimStage(
                    self.clock,
                    stage,
                    PROMPT,
                    self._verify if i == last else self._forward(i),
                    inject=i == 0 and route.restart is not None,
                    max_rows=config.forward_rows,
                )
            )
        for leg, target in zip((route.uplink, *route.hops), self.stages):
            self.links.append(Link(self.clock, leg, target.arrive))
        self.verifier = Verifier(len(PROMPT), self._broadcast)
        self.client = self._client()

    def run(self) -> SimReport:
        self.client.start()
        self.clock.run(lambda: len(self.client.arrivals) >= self.config.tokens)
        return self._report()

    def _client(self) -> SimClient:
        config = self.config
        acceptance = AcceptanceModel()
        planner = Planner(config.limits, acceptance, config.hysteresis)
        fixed = config.plan

        def policy() -> Plan:
            plan = fixed if fixed is not None else planner.next(config.route, config.draft)
            self.laps_planned += 1
            if plan.mode is Mode.OFF and self.off_lap is None:
                self.off_lap = self.laps_planned
            return plan

        # A drafter without any chance still believes in itself, and is sent until the planner stops it.
        beliefs = config.rates if config.rates[0][0] > 0 else geometric_rates(0.5)
        return SimClient(
            self.clock,
            Drafts(Script(((0, config.rates), *config.later), config.seed), beliefs, PROMPT),
            self.links[0],
            config.draft,
            beliefs,
            acceptance,
            policy,
            lap_time(1, config.route),
            send_roots=config.route.restart is None,
            draft_rows=config.limits.width,
        )

    def _forward(self, i: int) -> Callable[[list[Row]], None]:
        return lambda rows: self.links[i + 1].send(rows)

    def _verify(self, rows: list[Row]) -> None:
        self.verifier.verify(rows)

    def _broadcast(self) -> Node | None:
        """The next token is known at the last stage: tell the client and, directly, every other stage."""
        route, clock = self.config.route, self.clock
        for i, stage in enumerate(self.stages[:-1]):
            leg = route.restart if i == 0 and route.restart is not None else route.downlink
            clock.after(leg.time(1), stage.commit, TRUTH)
        clock.after(route.downlink.time(1), self._arrived)
        return self.stages[-1].commit(TRUTH)

    def _arrived(self) -> None:
        self.modes[self.client.plan.mode] += 1
        self.client.commit(TRUTH)

    def _report(self) -> SimReport:
        client, config = self.client, self.config
        arrivals, misses = client.arrivals, client.misses
        lap = plain_lap(config.route)
        first = len(PROMPT)
        gaps = [
            (arrivals[position - first + 1] - arrivals[position - first]) / lap
            for position in misses
            if position - first + 1 < len(arrivals)
        ]
        return SimReport(
            tokens=len(arrivals),
            seconds=arrivals[-1] - arrivals[0],
            laps=1 + (self.stages[0].injected if config.route.restart is not None else len(misses)),
            misses=len(misses),
            miss_laps=tuple(gaps),
            rows=sum(stage.computed for stage in self.stages),
            useful_rows=float(len(arrivals) * len(self.stages)),
            link_bytes=tuple(link.bytes for link in self.links),
            stage_busy=tuple(stage.busy_s / self.clock.now for stage in self.stages),
            drafted=client.drafted,
            hedge_hits=client.hedge_hits,
            hedge_layers_used=client.hedge_layers_used,
            modes=self.modes,
            off_lap=self.off_lap,
            final_plan=client.plan,
            events=self.clock.events,
        )


__all__ = ["Ring", "SimConfig", "SimReport", "geometric_rates", "simulate"]
