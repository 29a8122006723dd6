"""The simulator against the emulated WAN: the same ring, the same drafter, tokens per second side by side.

    python -m benchmarks.validate

Each configuration is decoded by real servers over the emulated WAN with a scripted drafter, and simulated with the
configured delays and rates, at the acceptance that the drafter's seeded errors came to. What neither knows
beforehand, the software's own time per hop, is taken from one measurement per network: a plain lap. The closed formula
`(E[run]+1)/(T_lap + E[run]·τ)` stands beside both, with the laps and hits of the very run (its end cuts a run short)
and τ as measured: what the drafter took for a layer. T_lap is that of a candidate, from the client around to the
client: a plain lap, which the last stage closes without the client, and one delay more.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.methods import PLAIN, Method
from benchmarks.report import aligned, write
from benchmarks.runner import Result
from benchmarks.scenario import HIDDEN, Wan, decode_rate, host_results, run, total, toy_jobs, toy_swarm
from bloombee_spec.client.measured import HOP_FRAME_BYTES, ID_BYTES
from bloombee_spec.plan.compute import ComputeProfile
from bloombee_spec.plan.decision import DraftCost, Mode, Plan
from bloombee_spec.plan.route import Route, plain_lap, uniform_route
from bloombee_spec.plan.simulate import SimConfig, geometric_rates, simulate
from bloombee_spec.plan.throughput import stream_formula

NETWORKS = (Wan(4, 20.0, 100.0), Wan(4, 50.0, 100.0), Wan(3, 80.0, 10.0))
# Acceptance, candidates in flight. The last ones fill the lap, which is what the formula takes for granted.
DRAFTERS = ((0.5, 4), (0.8, 8), (0.9, 16), (0.95, 32), (0.8, 96), (0.9, 96), (0.95, 96))
SEEDS = 40


@dataclass(frozen=True)
class Line:
    network: str
    acceptance: float
    realised: float
    depth: int
    measured_tok_s: float
    simulated_tok_s: float
    formula_tok_s: float
    host_tok_s: float
    layer_s: float
    laps_per_miss: float
    identical: bool

    @property
    def error(self) -> float:
        return self.simulated_tok_s / self.measured_tok_s - 1.0


def method(acceptance: float, depth: int, layer_s: float) -> Method:
    return {
        "name": f"stream h={acceptance:g} depth {depth}",
        "kind": "plugin",
        "config": {"plan": "none", "min_probability": 0.0, "hedges": 0, "max_candidates": depth, "burst": 1},
        "script": {"acceptance": acceptance, "depth": depth, "layer_seconds": layer_s},
    }


def route(wan: Wan, lap_s: float) -> Route:
    """The configured ring, with the software's own time spread over its legs."""
    ring = uniform_route(
        wan.stages, wan.delay_ms / 1e3, wan.mbps * 1e6, HIDDEN * 4.0, compute=ComputeProfile.flat(0.0),
        id_bytes=ID_BYTES, frame_bytes=HOP_FRAME_BYTES,
    )  # fmt: skip
    overhead = max(0.0, (lap_s - plain_lap(ring)) / wan.stages)
    stage = replace(ring.stages[0], compute=ComputeProfile.flat(overhead))
    return replace(ring, stages=(stage,) * wan.stages)


def simulated(ring: Route, acceptance: float, depth: int, tokens: int, layer_s: float) -> float:
    plan = Plan(Mode.STREAM, width=1, depth=depth)
    rates = geometric_rates(acceptance, ranks=1)
    found = [
        simulate(SimConfig(ring, rates, DraftCost(layer_s), plan, tokens=tokens, seed=seed)).tok_s
        for seed in range(SEEDS)
    ]
    return len(found) / sum(1.0 / rate for rate in found)


def lines_of(wan: Wan, prompts: int, tokens: int, drafter_s: float) -> list[Line]:
    with toy_swarm(wan) as swarm:
        host, jobs = host_results(swarm, toy_jobs(prompts, tokens))
        plain = run(swarm, PLAIN, jobs)
        lap_s = 1.0 / decode_rate(plain)
        ring = route(wan, lap_s)
        host_rate = sum(len(r.tokens) for r in host) / sum(r.seconds for r in host)
        lines = []
        for acceptance, depth in DRAFTERS:
            results = run(swarm, method(acceptance, depth, drafter_s), jobs)
            hits, misses = total(results, "hits"), total(results, "misses")
            realised = hits / max(1.0, hits + misses)  # a few hundred draws do not hit the script's figure exactly
            layer_s = total(results, "draft_s") / max(1.0, total(results, "proposed"))
            laps, around_s = total(results, "laps"), lap_s + wan.delay_ms / 1e3
            lines.append(
                Line(
                    str(wan), acceptance, realised, depth, decode_rate(results),
                    simulated(ring, realised, depth, tokens, layer_s),
                    stream_formula(hits / (hits + laps), around_s, layer_s), host_rate, layer_s,
                    laps / max(1.0, misses),
                    _same(results, host) and _same(plain, host),
                )
            )  # fmt: skip
            print(f"  {lines[-1]}", flush=True)
    return lines


def _same(results: Sequence[Result], host: Sequence[Result]) -> bool:
    return [result.tokens for result in results] == [result.tokens for result in host]


def table(lines: Sequence[Line]) -> str:
    head = (
        "network",
        "h",
        "realised",
        "in flight",
        "measured",
        "simulated",
        "error",
        "formula",
        "of it",
        "ms/layer",
        "host",
        "laps/miss",
        "same text",
    )
    rows = [
        (
            x.network, f"{x.acceptance:g}", f"{x.realised:.3f}", str(x.depth), f"{x.measured_tok_s:.2f}",
            f"{x.simulated_tok_s:.2f}",
            f"{x.error:+.0%}", f"{x.formula_tok_s:.2f}", f"{x.measured_tok_s / x.formula_tok_s:.2f}",
            f"{1e3 * x.layer_s:.1f}", f"{x.host_tok_s:.2f}", f"{x.laps_per_miss:.2f}",
            "yes" if x.identical else "NO",
        )
        for x in lines
    ]  # fmt: skip
    return aligned(head, rows)


def plot(lines: Sequence[Line], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 5), layout="constrained")
    for network in dict.fromkeys(x.network for x in lines):
        points = [x for x in lines if x.network == network]
        axes.plot([x.measured_tok_s for x in points], [x.simulated_tok_s for x in points], "o", label=network)
    top = max(max(x.measured_tok_s, x.simulated_tok_s) for x in lines) * 1.1
    axes.plot([0, top], [0, top], color="grey", linewidth=0.8)
    axes.fill_between([0, top], [0, 0.85 * top], [0, 1.15 * top], alpha=0.15, label="within 15 %")
    axes.set_xlabel("tokens per second, emulated WAN")
    axes.set_ylabel("tokens per second, simulator")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--layer-ms", type=float, default=12.0, help="the drafter's time per layer")
    parser.add_argument("--networks", type=int, nargs="+", default=list(range(len(NETWORKS))))
    parser.add_argument("--name", default="validate")
    args = parser.parse_args()
    lines: list[Line] = []
    for wan in [NETWORKS[i] for i in args.networks]:
        print(wan, flush=True)
        lines += lines_of(wan, args.prompts, args.new_tokens, args.layer_ms / 1e3)
    print(table(lines))
    path = write(args.name, {"settings": vars(args), "lines": [{**asdict(x), "error": x.error} for x in lines]})
    plot(lines, path.with_suffix(".png"))
    print(f"\n{path} and {path.with_suffix('.png')}")
    within = sum(abs(x.error) <= 0.15 for x in lines)
    print(f"the simulator is within 15 % in {within} of {len(lines)} configurations")
    return 0 if all(x.identical for x in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
