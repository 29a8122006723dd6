"""`bloombee-spec plan`: how large a tree pays on a ring, before anything is started."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict
from typing import Any

from bloombee_spec.plan.compute import ComputeProfile
from bloombee_spec.plan.curve import Curve, CurveError, parse_curve
from bloombee_spec.plan.decision import DraftCost, Plan
from bloombee_spec.plan.route import lap_time, uniform_route
from bloombee_spec.plan.sizing import choose
from bloombee_spec.plan.table import Ring, SizingRow, bounded, cheapest_break_even, size_table
from bloombee_spec.plan.trees import sequoia_table

REVIEW_CURVE = "3.05*ln(n)-1.3"  # fit of SpecExec's measured tokens per pass, from the review
REVIEW_SIZES = {10.0: 16, 100.0: 64, 1000.0: 256}  # its n* for 8 hops of 25 ms, hidden 4096 in int4
MAX_LAYERS = 32


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="how large a speculation tree pays on given links",
        description="Best tree size n*, widest layer W*, tokens per second and break-even on a uniform ring.",
    )
    parser.add_argument("--hops", type=int, default=8, help="legs of the ring that carry rows (default 8)")
    parser.add_argument("--hop-ms", type=float, default=25.0, help="one-way delay per hop, ms (default 25)")
    parser.add_argument("--bandwidth", default="10,100,1000", metavar="MBPS,…", help="Mbit/s (default 10,100,1000)")
    parser.add_argument("--hidden", type=int, default=4096, help="width of the model (default 4096)")
    parser.add_argument("--bytes-per-value", type=float, default=0.5, help="2 fp16, 1 int8, 0.5 int4 (default 0.5)")
    parser.add_argument("--scale-bytes", type=float, default=0.0, help="bytes per node beside its values (default 0)")
    parser.add_argument(
        "--return-ms", type=float, default=0.0, help="return leg, ms (default 0, as in the review's chart)"
    )
    parser.add_argument(
        "--compute-ms", default="1:0", metavar="ROWS:MS,…", help="one forward at one stage (default 1:0)"
    )
    growth = parser.add_mutually_exclusive_group()
    growth.add_argument("--curve", help=f"tokens per lap of n nodes (default {REVIEW_CURVE})")
    growth.add_argument(
        "--acceptance", metavar="P1,P2,…", help="acceptance by sibling rank, instead of a fitted curve"
    )
    parser.add_argument(
        "--draft-ms", type=float, default=5.0, help="drafter time per layer, with --acceptance (default 5)"
    )
    parser.add_argument(
        "--largest", type=int, default=None, help="largest tree searched (default 4096, or 512 with --acceptance)"
    )
    parser.add_argument("--plot", metavar="FILE", help="draw tokens per second over tree size")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    try:
        report, curve, ring, rows = _report(args)
        if args.plot:
            _plot(args.plot, curve, ring, rows, report["largest"])
    except (CurveError, ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(_finite(report), indent=2, allow_nan=False))
    else:
        _print(report, rows)
    return 0


def _report(args: argparse.Namespace) -> tuple[dict[str, Any], Curve, Ring, list[SizingRow]]:
    bandwidths = _numbers(args.bandwidth, "--bandwidth")
    if min(bandwidths) <= 0:
        raise ValueError("--bandwidth must be positive")
    profile = _profile(args.compute_ms)
    row_bytes = args.hidden * args.bytes_per_value + args.scale_bytes
    ring = Ring(args.hops, args.hop_ms / 1e3, row_bytes, args.return_ms / 1e3, profile)
    acceptance = _acceptance(args.acceptance) if args.acceptance else None
    largest = args.largest if args.largest is not None else (512 if acceptance else 4096)
    if not 1 <= largest <= 65536 or (acceptance and largest > 2048):
        raise ValueError("--largest must be 1 to 65536, and at most 2048 with --acceptance")
    text = args.curve or REVIEW_CURVE
    curve = _tree_curve(acceptance, largest) if acceptance else parse_curve(text)
    rows = size_table(curve, ring, [1e6 * bandwidth for bandwidth in bandwidths], largest)
    plans = [_plan(args, row.bandwidth_bps, row_bytes, profile, acceptance) for row in rows] if acceptance else []
    report: dict[str, Any] = {
        "hops": args.hops,
        "hop_ms": args.hop_ms,
        "bytes_per_node": row_bytes,
        "growth": {"acceptance": acceptance} if acceptance else {"curve": text},
        "largest": largest,
        "any_tree_pays_above_bps": cheapest_break_even(curve, ring, largest),
        "rows": [asdict(row) for row in rows],
        "plans": [{**asdict(plan), "mode": plan.mode.value} for plan in plans],
        "notes": _notes(args, curve, rows),
    }
    return report, curve, ring, rows


def _plan(
    args: argparse.Namespace, bandwidth_bps: float, row_bytes: float, profile: ComputeProfile, acceptance: list[float]
) -> Plan:
    """What the planner would do on this plugin's own ring: as many stages as hops, ids on the client's legs."""
    route = uniform_route(args.hops, args.hop_ms / 1e3, bandwidth_bps, row_bytes, compute=profile)
    return choose((tuple(acceptance),), route, DraftCost(args.draft_ms / 1e3))


def _tree_curve(acceptance: list[float], largest: int) -> Curve:
    """Tokens per lap of the best tree of n nodes, from Sequoia's recurrence, linear between whole numbers."""
    table = sequoia_table(acceptance, largest, MAX_LAYERS)[:, MAX_LAYERS]

    def curve(n: float) -> float:
        low = min(max(int(n), 1), largest)
        high = min(low + 1, largest)
        return float(table[low] + (n - low) * (table[high] - table[low]))

    return curve


def _notes(args: argparse.Namespace, curve: Curve, rows: list[SizingRow]) -> list[str]:
    notes = ["n counts all rows of a lap, the committed token's own included; one row is no speculation."]
    first = curve(1.0)
    if first < 1.0:
        notes.append(
            f"The curve says {first:.2f} tokens for one row; a lap always yields one, so it is used from 1 up."
        )
    if _is_review(args):
        known = [
            (row, REVIEW_SIZES[row.bandwidth_bps / 1e6]) for row in rows if row.bandwidth_bps / 1e6 in REVIEW_SIZES
        ]
        for row, size in known:
            verdict = "the same" if row.best_power == size else f"here {row.best_power}"
            notes.append(
                f"The review reads n* = {size} at {row.bandwidth_bps / 1e6:g} Mbit/s off its chart: {verdict}."
            )
    moved = [row for row in rows if row.best_power != row.best]
    if moved:
        detail = ", ".join(
            f"{row.best} instead of {row.best_power} at {row.bandwidth_bps / 1e6:g} Mbit/s "
            f"(+{100 * (row.tok_s / row.power_tok_s - 1):.1f} %)"
            for row in moved
        )
        notes.append(f"n*(2^k) is the best power of two; among all sizes n* is {detail}: the optimum is flat.")
    rounded = [row for row in rows if round(row.widest_exact) != row.widest]
    if rounded:
        detail = ", ".join(f"{row.widest_exact:.2f} at {row.bandwidth_bps / 1e6:g} Mbit/s" for row in rounded)
        notes.append(
            f"W* is rounded as in the review; exactly it is {detail}, and only the whole part fits within a hop."
        )
    if args.return_ms == 0:
        notes.append("The lap has no return leg, as in the review's chart (its formula has one): see --return-ms.")
    return notes


def _is_review(args: argparse.Namespace) -> bool:
    same = (args.hops, args.hop_ms, args.hidden, args.bytes_per_value) == (8, 25.0, 4096, 0.5)
    plain = (args.scale_bytes, args.return_ms, args.compute_ms) == (0.0, 0.0, "1:0")
    return same and plain and not args.acceptance and (args.curve or REVIEW_CURVE).replace(" ", "") == REVIEW_CURVE


def _print(report: dict[str, Any], rows: list[SizingRow]) -> None:
    print(f"{report['hops']} hops of {report['hop_ms']:g} ms, {report['bytes_per_node']:g} bytes per node and hop\n")
    print(
        f"{'Mbit/s':>8} {'n*(2^k)':>8} {'tok/s':>8} {'n*':>6} {'tok/s':>8} {'exact n*':>9} {'off tok/s':>10} ", end=""
    )
    print(f"{'gain':>6} {'W*':>6} {'pays for n':>13} {'n* pays above':>15}")
    for row in rows:
        gain = f"{row.first_gain}..{row.last_gain}" if row.first_gain is not None else "none"
        print(
            f"{row.bandwidth_bps / 1e6:8g} {row.best_power:8d} {row.power_tok_s:8.2f} {row.best:6d} {row.tok_s:8.2f} "
            f"{row.continuous:9.1f} {row.off_tok_s:10.2f} {row.tok_s / row.off_tok_s:5.2f}x {row.widest_exact:6.0f} "
            f"{gain:>13} {_mbps(row.break_even_bps):>15}"
        )
    print(f"\nSome tree pays above {_mbps(report['any_tree_pays_above_bps'])}.")
    for row, plan in zip(rows, report["plans"]):
        print(
            f"Planner at {row.bandwidth_bps / 1e6:g} Mbit/s: {plan['mode']}, width {plan['width']}, "
            f"depth {plan['depth']}, tree {plan['tree_size']}, hedges {plan['hedges']}, "
            f"pace {1e3 * plan['pace_s']:.2f} ms: "
            f"{plan['expected_tok_s']:.2f} tok/s, {plan['off_tok_s']:.2f} without"
        )
    print()
    for note in report["notes"]:
        print(f"* {note}")


def _mbps(bits: float) -> str:
    return "never" if math.isinf(bits) else f"{bits / 1e6:.3g} Mbit/s"


def _plot(path: str, curve: Curve, ring: Ring, rows: list[SizingRow], largest: int) -> None:
    try:
        import matplotlib
    except ImportError:
        raise RuntimeError("--plot needs matplotlib: pip install 'bloombee-spec[bench]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    tokens = bounded(curve)
    sizes = sorted({round(largest ** (i / 300)) for i in range(301)})
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for row in rows:
        route = ring.route(row.bandwidth_bps)
        line = axes.plot(
            sizes, [tokens(n) / lap_time(n, route) for n in sizes], label=f"{row.bandwidth_bps / 1e6:g} Mbit/s"
        )[0]
        axes.plot([row.best], [row.tok_s], "o", color=line.get_color())
        axes.annotate(f"n* = {row.best}", (row.best, row.tok_s), textcoords="offset points", xytext=(4, 6))
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tree size n, rows per lap")
    axes.set_ylabel("tokens per second")
    axes.set_title(f"{ring.hops} hops of {1e3 * ring.hop_s:g} ms, {ring.row_bytes:g} bytes per node")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _numbers(text: str, flag: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{flag} takes numbers separated by commas, not {text!r}") from None
    if len(values) > 64 or not all(math.isfinite(value) for value in values):
        raise ValueError(f"{flag} takes at most 64 finite numbers")
    return values


def _acceptance(text: str) -> list[float]:
    values = sorted(_numbers(text, "--acceptance"), reverse=True)
    if not all(0 <= value <= 1 for value in values) or sum(values) > 1.0 + 1e-9 or len(values) > 32:
        raise ValueError("--acceptance takes at most 32 chances between 0 and 1 whose sum is at most 1")
    return values


def _profile(text: str) -> ComputeProfile:
    try:
        samples = {int(rows): float(ms) / 1e3 for rows, ms in (part.split(":") for part in text.split(","))}
    except ValueError:
        raise ValueError(f"--compute-ms takes ROWS:MS pairs separated by commas, not {text!r}") from None
    return ComputeProfile.measured(samples)


def _finite(value: Any) -> Any:
    """JSON has no infinity: null stands for never."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
