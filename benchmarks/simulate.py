"""What cannot be run here, simulated: 2 to 64 stages, 5 to 300 ms, 1 Mbit/s to 10 Gbit/s, layers up to 1,024 wide.

    python benchmarks/simulate.py --quick          # about a minute
    python benchmarks/simulate.py --only bandwidth

Tables go to stdout, JSON and plots to benchmarks/results/. Everything is computed by `bloombee_spec.plan.simulate`
with the plugin's own planner and token tree; nothing is measured on a network.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bloombee_spec.plan.compute import ComputeProfile
from bloombee_spec.plan.decision import DraftCost, Limits, Mode, Plan
from bloombee_spec.plan.route import Route, uniform_route
from bloombee_spec.plan.simulate import SimConfig, SimReport, geometric_rates, simulate
from bloombee_spec.plan.sizing import WIDTHS, choose, evaluate

RESULTS = Path(__file__).parent / "results"
ROW_BYTES = 2048.0  # hidden 4096 in int4
GPU_STAGE = ComputeProfile.measured({1: 0.004, 8: 0.0045, 64: 0.008, 256: 0.025, 1024: 0.09})
DRAFT = DraftCost(0.01, 0.00002)  # a small model on a client's accelerator, per layer
WIDE = Limits(tree_size=1024, width=1024, depth=64, in_flight=4096, forward_rows=1024)
POLICIES = ("off", "tree", "stream", "hedged", "auto")


@dataclass(frozen=True)
class Point:
    """One simulated stream; `x` is the swept quantity."""

    series: str
    x: float
    tok_s: float
    off_tok_s: float
    expected_tok_s: float
    plan: str
    misses: int
    wasted_rows: float
    bytes_per_token: float


def route(stages: int = 8, hop_ms: float = 25.0, mbps: float = 100.0) -> Route:
    return uniform_route(stages, hop_ms / 1e3, mbps * 1e6, ROW_BYTES, compute=GPU_STAGE)


def describe(plan: Plan) -> str:
    if plan.mode is Mode.TREE:
        return f"tree {plan.tree_size} of depth {plan.depth}"
    if plan.mode is Mode.STREAM:
        return f"stream {plan.width} x {plan.depth}" + (f", hedges {plan.hedges}" if plan.hedges else "")
    return "off"


def best_plan(policy: str, ring: Route, hit: float) -> Plan | None:
    """The fixed plan of a policy, chosen with the drafter known; None lets the planner find out by itself."""
    if policy == "auto":
        return None
    if policy == "off":
        return Plan(Mode.OFF)
    modes = (Mode.TREE,) if policy == "tree" else (Mode.STREAM,)
    limits = replace(WIDE, modes=modes, hedges=4 if policy == "hedged" else 0)
    return choose(geometric_rates(hit), ring, DRAFT, limits)


def run_policy(policy: str, ring: Route, hit: float, x: float, tokens: int, series: str = "") -> Point:
    config = SimConfig(ring, geometric_rates(hit), DRAFT, best_plan(policy, ring, hit), tokens=tokens, limits=WIDE)
    return to_point(series or policy, x, simulate(config), config)


def to_point(series: str, x: float, report: SimReport, config: SimConfig) -> Point:
    plan = evaluate(report.final_plan, config.rates, config.route, config.draft, config.limits)
    return Point(
        series,
        x,
        report.tok_s,
        plan.off_tok_s,
        plan.expected_tok_s,
        describe(report.final_plan),
        report.misses,
        report.wasted_rows,
        report.bytes_per_token,
    )


def sweep_bandwidth(quick: bool) -> list[Point]:
    """8 stages of 25 ms, h = 0.8, 1 Mbit/s to 10 Gbit/s."""
    values = (1, 10, 100, 1000, 10000) if quick else (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 3000, 10000)
    tokens = 80 if quick else 400
    return [run_policy(policy, route(mbps=x), 0.8, x, tokens) for x in values for policy in POLICIES]


def sweep_delay(quick: bool) -> list[Point]:
    """8 stages, 100 Mbit/s, h = 0.8, 5 to 300 ms per hop."""
    values = (5, 25, 100, 300) if quick else (5, 10, 25, 50, 80, 120, 200, 300)
    tokens = 80 if quick else 400
    return [run_policy(policy, route(hop_ms=x), 0.8, x, tokens) for x in values for policy in POLICIES]


def sweep_stages(quick: bool) -> list[Point]:
    """25 ms per hop, 100 Mbit/s, h = 0.8, 2 to 64 stages."""
    values = (2, 8, 64) if quick else (2, 4, 8, 16, 32, 64)
    tokens = 40 if quick else 300
    return [run_policy(policy, route(stages=x), 0.8, x, tokens) for x in values for policy in POLICIES]


def sweep_acceptance(quick: bool) -> list[Point]:
    """4 stages of 50 ms, 100 Mbit/s, favourite right with chance h: which lever gives what."""
    values = (0.0, 0.3, 0.6, 0.9) if quick else (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
    tokens = 100 if quick else 600
    return [run_policy(policy, route(4, 50.0), x, x, tokens) for x in values for policy in POLICIES]


def sweep_width(quick: bool) -> list[Point]:
    """8 stages of 25 ms, h = 0.6: layers of fixed width up to 1,024, each at its best depth and pace."""
    widths = WIDTHS[::3] if quick else WIDTHS
    tokens = 16 if quick else 80
    points = []
    for mbps in (10, 1000) if quick else (10, 100, 1000, 10000):
        ring = route(mbps=mbps)
        rates = geometric_rates(0.6, ranks=16)
        for width in widths:
            limits = replace(WIDE, in_flight=8 * width, modes=(Mode.STREAM,), hedges=0)
            plan = evaluate(Plan(Mode.STREAM, width=width, depth=8), rates, ring, DRAFT, limits)
            config = SimConfig(ring, rates, DRAFT, plan, tokens=tokens, limits=limits)
            points.append(to_point(f"{mbps} Mbit/s", width, simulate(config), config))
    return points


@dataclass(frozen=True)
class Sweep:
    run: Callable[[bool], list[Point]]
    label: str
    log: int  # base of the x axis, 0 for linear


SWEEPS = {
    "bandwidth": Sweep(sweep_bandwidth, "bandwidth, Mbit/s", 10),
    "delay": Sweep(sweep_delay, "one-way delay per hop, ms", 10),
    "stages": Sweep(sweep_stages, "stages", 2),
    "acceptance": Sweep(sweep_acceptance, "h, chance that the drafter's favourite is right", 0),
    "width": Sweep(sweep_width, "layer width, candidates", 2),
}


def print_table(name: str, sweep: Sweep, points: list[Point]) -> None:
    print(f"\n{name}: {(sweep.run.__doc__ or '').strip()}")
    print(f"x = {sweep.label}")
    print(f"{'x':>8} {'series':>14} {'tok/s':>8} {'x off':>6} {'model':>8} {'waste':>6} {'B/token':>9}  plan")
    for point in points:
        print(
            f"{point.x:8g} {point.series:>14} {point.tok_s:8.2f} {point.tok_s / point.off_tok_s:6.2f} "
            f"{point.expected_tok_s:8.2f} {point.wasted_rows:6.2f} {point.bytes_per_token:9.0f}  {point.plan}"
        )


def plot(name: str, sweep: Sweep, points: list[Point], folder: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for series in dict.fromkeys(point.series for point in points):
        chosen = [point for point in points if point.series == series]
        axes.plot([point.x for point in chosen], [point.tok_s for point in chosen], "o-", label=series)
    if sweep.log:
        axes.set_xscale("log", base=sweep.log)
    axes.set_yscale("log")
    axes.set_xlabel(sweep.label)
    axes.set_ylabel("tokens per second (simulated)")
    axes.set_title((sweep.run.__doc__ or name).strip())
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.tight_layout()
    path = folder / f"simulate-{name}.png"
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer points and shorter streams")
    parser.add_argument("--only", choices=tuple(SWEEPS), action="append", help="one sweep (may be repeated)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for JSON and plots")
    parser.add_argument("--no-plots", action="store_true", help="tables and JSON only")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {
        "quick": args.quick,
        "row_bytes": ROW_BYTES,
        "draft_layer_s": DRAFT.layer_s,
        "sweeps": {},
    }
    for name in args.only or SWEEPS:
        began = time.monotonic()
        points = SWEEPS[name].run(args.quick)
        print_table(name, SWEEPS[name], points)
        print(f"{len(points)} streams in {time.monotonic() - began:.0f} s", file=sys.stderr)
        results["sweeps"][name] = [asdict(point) for point in points]
        if not args.no_plots:
            print(plot(name, SWEEPS[name], points, args.out), file=sys.stderr)
    path = args.out / "simulate.json"
    path.write_text(json.dumps(results, indent=1), encoding="utf-8")
    print(path, file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
