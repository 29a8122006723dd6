"""Does streaming ever lose to the best synchronous tree, and does the planner ever lose to either?

    python -m benchmarks.grid                                 # simulated, a few minutes
    python -m benchmarks.grid --wan 80:10:0.6 --wan 50:100:0.8    # delay in ms : Mbit/s : h, on the emulated WAN

Every bandwidth × delay × acceptance, four stages, a drafter that takes 5 ms per layer. `tree` is the best one for the
drafter, which the others must find: `auto` is the planner, which starts without knowing the drafter. Simulated cells
are means over seeds. At h = 0 `auto` is compared with no speculation, and the laps until it stops are counted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.ablation import method
from benchmarks.report import aligned, write
from benchmarks.scenario import HIDDEN, Wan, decode_rate, host_results, run, toy_jobs, toy_swarm
from bloombee_spec.plan.compute import ComputeProfile
from bloombee_spec.plan.decision import DraftCost, Limits, Mode, Plan
from bloombee_spec.plan.route import Route, uniform_route
from bloombee_spec.plan.simulate import SimConfig, geometric_rates, simulate
from bloombee_spec.plan.sizing import choose

MBPS, DELAYS_MS, HITS = (10, 100, 1000), (10, 80, 200), (0.3, 0.6, 0.9)
STAGES, LAYER_S = 4, 0.005
STAGE = ComputeProfile.measured({1: 0.004, 8: 0.0045, 64: 0.008, 256: 0.025})
LIMITS = Limits(tree_size=64, width=64, depth=64, in_flight=256, forward_rows=256)
REAL: dict[str, dict[str, Any]] = {"off": {"speculate": False}, "tree": {"plan": "tree", "hedges": 0}, "auto": {}}


@dataclass(frozen=True)
class Cell:
    """Tokens per second; `off_lap` the lap from which on `auto` proposed nothing."""

    where: str
    mbps: float
    delay_ms: float
    hit: float
    off: float
    tree: float
    stream: float
    auto: float
    off_lap: float | None = None

    @property
    def gain(self) -> float:
        """Of `auto` over the best synchronous tree, or over no speculation where that is better."""
        return self.auto / max(self.tree, self.off)


def ring(mbps: float, delay_ms: float, row_bytes: float) -> Route:
    return uniform_route(STAGES, delay_ms / 1e3, mbps * 1e6, row_bytes, compute=STAGE)


def simulated(route: Route, hit: float, plan: Plan | None, tokens: int, seeds: int) -> tuple[float, list[int]]:
    """Tokens per second over all seeds, and the laps at which it gave up."""
    reports = [
        simulate(
            SimConfig(route, geometric_rates(hit), DraftCost(LAYER_S), plan, tokens=tokens, limits=LIMITS, seed=seed)
        )
        for seed in range(seeds)
    ]
    rate = sum(r.tokens - 1 for r in reports) / sum(r.seconds for r in reports)
    return rate, [r.off_lap for r in reports if r.off_lap is not None]


def cell(mbps: float, delay_ms: float, hit: float, args: argparse.Namespace) -> Cell:
    route, rates, draft = ring(mbps, delay_ms, args.row_bytes), geometric_rates(hit), DraftCost(LAYER_S)
    plans = {mode: choose(rates, route, draft, replace(LIMITS, modes=(mode,))) for mode in (Mode.TREE, Mode.STREAM)}
    found = {
        name: simulated(route, hit, plan, args.tokens, args.seeds)
        for name, plan in (
            ("off", Plan(Mode.OFF)), ("tree", plans[Mode.TREE]), ("stream", plans[Mode.STREAM]), ("auto", None)
        )
    }  # fmt: skip
    laps = found["auto"][1]
    off_lap = sum(laps) / len(laps) if laps else None
    return Cell("simulated", mbps, delay_ms, hit, **{k: v[0] for k, v in found.items()}, off_lap=off_lap)


def measured(delay_ms: float, mbps: float, hit: float, args: argparse.Namespace) -> tuple[Cell, bool]:
    """On the emulated WAN with the small model, whose rows are of hidden size `scenario.HIDDEN`."""
    siblings = (0.3 * (1 - hit),) if hit else ()  # h = 0: nothing that it says is right
    script = {"acceptance": hit, "siblings": siblings, "layer_seconds": LAYER_S, "depth": 32}
    rates, same = {}, True
    with toy_swarm(Wan(STAGES, delay_ms, mbps)) as swarm:
        host, jobs = host_results(swarm, toy_jobs(args.prompts, args.new_tokens))
        for name, config in REAL.items():
            results = run(swarm, method(name, config, script), jobs)
            rates[name] = decode_rate(results)
            same = same and [r.tokens for r in results] == [r.tokens for r in host]
    return Cell("measured", mbps, delay_ms, hit, rates["off"], rates["tree"], float("nan"), rates["auto"]), same


def table(cells: Sequence[Cell]) -> str:
    head = ("", "Mbit/s", "ms", "h", "off", "best tree", "best stream", "auto", "auto / best other", "off after laps")
    rows = [
        (
            x.where, f"{x.mbps:g}", f"{x.delay_ms:g}", f"{x.hit:g}", f"{x.off:.2f}", f"{x.tree:.2f}",
            "" if x.stream != x.stream else f"{x.stream:.2f}", f"{x.auto:.2f}", f"{x.gain:.3f}",
            "" if x.off_lap is None else f"{x.off_lap:.0f}",
        )
        for x in cells
    ]  # fmt: skip
    return aligned(head, rows, rule=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--row-bytes", type=float, default=4.0 * HIDDEN)
    parser.add_argument("--wan", action="append", default=[], metavar="MS:MBPS:H", help="on the emulated WAN instead")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--name", default="grid")
    args = parser.parse_args()
    cells, same = list[Cell](), True
    if args.wan:
        for each in args.wan:
            found, identical = measured(*map(float, each.split(":")), args)
            cells, same = [*cells, found], same and identical
            print(cells[-1], flush=True)
    else:
        cells = [cell(mbps, ms, hit, args) for mbps in MBPS for ms in DELAYS_MS for hit in (0.0, *HITS)]
    print(table(cells))
    print(write(args.name, {"settings": vars(args), "cells": [{**asdict(x), "gain": x.gain} for x in cells]}))
    worst = min(cells, key=lambda x: x.gain)
    where = f"{worst.mbps:g} Mbit/s, {worst.delay_ms:g} ms, h = {worst.hit:g}"
    print(f"worst: {worst.gain:.3f} at {where}; same text: {same}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
