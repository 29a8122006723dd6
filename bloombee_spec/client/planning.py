"""The planner at work in one stream: what it is told, and what its plans mean for the next candidates.

The plan says whether to speculate at all, whether to wait for verdicts (`Mode.TREE`) or not (`Mode.STREAM`), how many
siblings a node gets, how large a synchronous tree is and how many hedges are prepared. Which candidates are sent
within these bounds is decided one by one, by their chance (`RouteMeter.min_probability`): a drafter that knows when it
is sure is better served by that than by its average.
"""

from __future__ import annotations

import time

from bloombee_spec.client.measured import RouteMeter
from bloombee_spec.config import SpecConfig
from bloombee_spec.plan.acceptance import RANKS
from bloombee_spec.plan.decision import DraftCost, Limits, Mode, Plan
from bloombee_spec.plan.planner import Planner
from bloombee_spec.plan.sizing import HEDGED_POSITIONS

MODES = {"auto": (Mode.TREE, Mode.STREAM), "stream": (Mode.STREAM,), "tree": (Mode.TREE,)}
COST_WEIGHT = 0.2  # of a new drafter step in the running estimate
INSTANT = DraftCost(0.0)
DRAFT_SHARE = 0.25  # of a lap, that one question to a slow drafter may take
PLANNING_SHARE = 0.05  # of the time, that planning may take: it is done between two commits
WARM_UP = 8  # verdicts before the first plan


class Planning:
    """
    :param credits: most candidates alive at a time
    :param instant: the drafter's time does not count
    """

    def __init__(self, meter: RouteMeter, config: SpecConfig, credits: int, instant: bool):
        limits = Limits(
            tree_size=credits, width=min(RANKS, credits), depth=config.max_depth, in_flight=credits,
            hedges=config.hedges, modes=MODES[config.plan],
        )  # fmt: skip
        self.planner = Planner(limits)
        self._meter, self._instant = meter, instant
        self._credits, self._hedges, self._modes = credits, config.hedges, limits.modes
        self._cost = INSTANT
        self._planned_at, self._took_s = 0.0, 0.0
        self.plan: Plan | None = None
        if config.plan == "tree":
            self._replan()

    def drafted(self, seconds: float, layers: int) -> None:
        """A question to the drafter took `seconds` and gave `layers` of proposals."""
        if not self._instant and layers:
            each = seconds / layers
            before = self._cost.layer_s
            self._cost = DraftCost(each if not before else (1 - COST_WEIGHT) * before + COST_WEIGHT * each)

    def judged(self, hit: int | None, depth: int) -> None:
        """The children of the root were judged, the one of rank `hit` was right. The drafter may name as many as it
        likes, so a rank that it did not fill was tried too."""
        self.planner.acceptance.observe(RANKS, hit if hit is None or hit < RANKS else None, depth)

    def missed(self) -> None:
        self._replan()

    def hit(self) -> None:
        """A run without a miss is looked at once per lap, too."""
        if time.perf_counter() - self._planned_at >= self._meter.lap_s:
            self._replan()

    @property
    def name(self) -> str:
        """The mode of the plan, for statistics."""
        return "unplanned" if self.plan is None else self.plan.mode.value

    @property
    def off(self) -> bool:
        return self.plan is not None and self.plan.mode is Mode.OFF

    @property
    def probe(self) -> bool:
        return self.plan is not None and self.plan.probe

    @property
    def tree(self) -> Plan | None:
        """The plan, if it is one synchronous tree per lap."""
        return self.plan if self.plan is not None and self.plan.mode is Mode.TREE else None

    @property
    def width(self) -> int:
        """Siblings at most; the chance of each decides below that, and needs room for one more to be found out."""
        return self._credits if self.plan is None or self.tree is not None else max(2, self.plan.width)

    @property
    def layers_per_ask(self) -> int:
        """Layers to ask a slow drafter for at a time: what it has so far leaves before the next commit is due."""
        if self.tree is not None or not self._cost.layer_s:
            return 1 << 16
        return max(1, int(DRAFT_SHARE * self._meter.lap_s / self._cost.layer_s))

    @property
    def hedged_outcomes(self) -> int:
        return self._hedges if self.plan is None else min(self._hedges, self.plan.hedges * HEDGED_POSITIONS)

    def _replan(self) -> None:
        """While nothing is known of the drafter, its own word counts: a guessed plan would hold back a good one."""
        began = time.perf_counter()
        if began - self._planned_at < self._took_s / PLANNING_SHARE:
            return
        self._planned_at = began
        if self.plan is not None or self.planner.acceptance.verdicts >= WARM_UP or Mode.STREAM not in self._modes:
            self.plan = self.planner.next(self._meter.route, self._cost)
        self._took_s = time.perf_counter() - began
