"""The planner of one stream: re-plans as estimates move, does not flap, finds "do not speculate" and finds its way
back.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from bloombee_spec.plan.acceptance import AcceptanceModel, Rates
from bloombee_spec.plan.decision import DraftCost, Limits, Mode, Plan
from bloombee_spec.plan.route import Route
from bloombee_spec.plan.sizing import choose, evaluate, off_plan

SAME_RATE = 0.004  # acceptance estimates this close are the same

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Hysteresis:
    """When a plan is replaced; gains are relative to no speculation, `switch` is relative to the current plan.

    :param enter: expected gain needed to start speculating
    :param stay: expected gain below which speculation stops
    :param switch: how much faster another plan must be to replace the current one
    :param replan_laps: laps between two searches (half of it during the first 32 laps)
    :param probe_laps: laps between two probes while off, at first; doubles with every probe without a hit
    :param probe_laps_max: and never exceeds this
    :param probe_size: candidates of a probe
    """

    enter: float = 0.05
    stay: float = 0.02
    switch: float = 0.05
    replan_laps: int = 8
    probe_laps: int = 8
    probe_laps_max: int = 32
    probe_size: int = 4

    def __post_init__(self) -> None:
        if not 0 <= self.stay <= self.enter or self.switch < 0:
            raise ValueError(
                f"gains need 0 <= stay <= enter and switch >= 0, not {self.stay}, {self.enter}, {self.switch}"
            )
        if min(self.replan_laps, self.probe_laps, self.probe_size) < 1 or self.probe_laps_max < self.probe_laps:
            raise ValueError(
                "laps between plans and probes are at least 1, and probe_laps_max is not below probe_laps"
            )


class Planner:
    """Call `next` once per lap (at each miss, and at each token while off) and follow the plan that it returns.

    What the laps showed goes into `acceptance`; the route and the drafter's cost are the caller's current estimates.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        acceptance: AcceptanceModel | None = None,
        hysteresis: Hysteresis | None = None,
    ):
        self.limits = limits or Limits()
        self.acceptance = acceptance or AcceptanceModel()
        self.hysteresis = hysteresis or Hysteresis()
        self.laps = 0
        self.switches = 0
        self._plan: Plan | None = None
        self._since_search = 0
        self._since_probe = 0
        self._probe_gap = self.hysteresis.probe_laps
        self._searched: tuple[Rates, Route, DraftCost] | None = None  # what the last search was told
        self._hits_before = 0.0
        self._on_laps = 0

    @property
    def plan(self) -> Plan | None:
        """The plan in force, None before the first lap."""
        return self._plan

    def next(self, route: Route, draft: DraftCost) -> Plan:
        self.laps += 1
        self._since_search += 1
        plan = self._plan
        if plan is None:
            return self._adopt(
                choose(self.acceptance.rates(), route, draft, self.limits, min_gain=self.hysteresis.enter)
            )
        if plan.probe:
            self._after_probe(route)
            return self._search(route, draft)
        if plan.mode is Mode.OFF:
            self._since_probe += 1
            if self._since_probe >= self._probe_gap:
                return self._probe(route)
        else:
            self._on_laps += 1
            if self._on_laps >= self.hysteresis.probe_laps_max:
                self._probe_gap = self.hysteresis.probe_laps  # speculation holds: a later pause is news again
        due = self.hysteresis.replan_laps if self.laps > 32 else (self.hysteresis.replan_laps + 1) // 2
        return self._search(route, draft) if self._since_search >= due else plan

    def _search(self, route: Route, draft: DraftCost) -> Plan:
        self._since_search = 0
        current, rules = self._plan, self.hysteresis
        assert current is not None
        rates = self.acceptance.rates()
        if not self._moved(rates, route, draft):
            return current
        if current.mode is Mode.OFF:
            return self._adopt(choose(rates, route, draft, self.limits, min_gain=rules.enter))
        best = choose(rates, route, draft, self.limits, min_gain=rules.stay)
        kept = evaluate(current, rates, route, draft, self.limits)
        pays = kept.gain >= 1.0 + rules.stay
        if pays and best.expected_tok_s < kept.expected_tok_s * (1.0 + rules.switch):
            self._plan = kept
            return kept
        return self._adopt(best)

    def _moved(self, rates: Rates, route: Route, draft: DraftCost) -> bool:
        """Whether the estimates differ from those of the last search by enough to search again."""
        if self._searched is not None and self._searched[1:] == (route, draft):
            pairs = zip((p for row in self._searched[0] for p in row), (p for row in rates for p in row))
            if all(abs(before - now) < SAME_RATE for before, now in pairs):
                return False
        self._searched = (rates, route, draft)
        return True

    def _adopt(self, plan: Plan) -> Plan:
        before = self._plan
        self._since_search = 0
        if before is not None and before.mode is not plan.mode:
            self.switches += 1
            logger.debug(
                "lap %d: %s -> %s, expecting %.2f tok/s", self.laps, before.mode, plan.mode, plan.expected_tok_s
            )
            if plan.mode is Mode.OFF:
                self._since_probe = 0
                if self._on_laps:
                    self._probe_gap = min(self._probe_gap * 2, self.hysteresis.probe_laps_max)
            self._on_laps = 0
        self._plan = plan
        return plan

    def _probe(self, route: Route) -> Plan:
        off = off_plan(route)
        self._since_probe = 0
        self._hits_before = self.acceptance.hit_rate(self.hysteresis.probe_size)
        self._plan = Plan(
            Mode.TREE,
            depth=1,
            tree_size=self.hysteresis.probe_size,
            expected_tok_s=off.expected_tok_s,
            off_tok_s=off.off_tok_s,
            probe=True,
        )
        return self._plan

    def _after_probe(self, route: Route) -> None:
        hit = self.acceptance.hit_rate(self.hysteresis.probe_size) > self._hits_before
        self._probe_gap = (
            1 if hit else min(max(self._probe_gap, self.hysteresis.probe_laps) * 2, self.hysteresis.probe_laps_max)
        )
        self._plan = off_plan(route)
