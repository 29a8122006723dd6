"""One lever at a time on an emulated WAN: ring, tree, streaming, direct commits, hedges, planner.

    python -m benchmarks.ablation --acceptance 0.8 --delay-ms 50

The drafter is scripted (it replays the host's own output with seeded errors) and takes some time per layer, as a model
would. Every text is compared with the host's plain decoding, which runs in the same swarm.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.methods import Method
from benchmarks.report import aligned, write
from benchmarks.runner import Result
from benchmarks.scenario import Wan, decode_rate, host_results, run, total, toy_jobs, toy_swarm

LEVERS: dict[str, dict[str, Any]] = {
    "ring only": {"speculate": False, "direct_commits": False},
    "+ tree": {"plan": "tree", "direct_commits": False, "hedges": 0},
    "+ streaming": {"plan": "none", "direct_commits": False, "hedges": 0},
    "+ direct commits": {"plan": "none", "hedges": 0},
    "+ hedges": {"plan": "none"},
    "+ planner": {},
}


@dataclass(frozen=True)
class Line:
    lever: str
    tokens_per_second: float
    speedup: float
    laps_per_token: float
    wasted_rows_per_token: float
    bytes_per_token: float
    hedge_hits: int
    draft_s: float
    hedge_s: float
    modes: dict[str, int]
    identical: bool


def method(name: str, config: dict[str, Any], script: dict[str, Any]) -> Method:
    found: Method = {"name": name, "kind": "plugin", "config": config}
    return found if config.get("speculate") is False else {**found, "script": script}


def line(lever: str, results: Sequence[Result], host_rate: float, expected: Sequence[tuple[int, ...]], n: int) -> Line:
    tokens = sum(len(result.tokens) for result in results)
    stages = len(results[0].stats["route"])
    rate = decode_rate(results)
    modes: dict[str, int] = {}
    for result in results:
        for mode, count in result.stats["modes"].items():
            modes[mode] = modes.get(mode, 0) + count
    return Line(
        lever=lever, tokens_per_second=rate, speedup=rate / host_rate,
        laps_per_token=total(results, "laps") / tokens,
        wasted_rows_per_token=(total(results, "rows_computed") - stages * (tokens + n)) / tokens,
        bytes_per_token=(total(results, "bytes_up") + total(results, "bytes_down")) / tokens,
        hedge_hits=int(total(results, "hedge_hits")), draft_s=total(results, "draft_s"),
        hedge_s=total(results, "hedge_s"), modes=modes,
        identical=[result.tokens for result in results] == list(expected),
    )  # fmt: skip


def table(lines: Sequence[Line]) -> str:
    head = (
        "lever",
        "tok/s",
        "x host",
        "laps/token",
        "wasted rows/token",
        "B/token",
        "hedge hits",
        "modes",
        "same text",
    )
    rows = [
        (
            x.lever, f"{x.tokens_per_second:.2f}", f"{x.speedup:.2f}", f"{x.laps_per_token:.2f}",
            f"{x.wasted_rows_per_token:.1f}", f"{x.bytes_per_token:.1f}", str(x.hedge_hits),
            " ".join(f"{mode} {count}" for mode, count in x.modes.items()), "yes" if x.identical else "NO",
        )
        for x in lines
    ]  # fmt: skip
    return aligned(head, rows)


def plot(lines: Sequence[Line], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    axes.bar([x.lever for x in lines], [x.speedup for x in lines])
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_ylabel("times the host's plain decoding")
    axes.set_title(title, fontsize=9)
    axes.tick_params(axis="x", rotation=20)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--delay-ms", type=float, default=50.0, help="one way, every link")
    parser.add_argument("--mbps", type=float, default=100.0)
    parser.add_argument("--acceptance", type=float, default=0.8, help="chance that the drafter's favourite is right")
    parser.add_argument("--siblings", type=float, nargs="*", default=[0.06, 0.03], help="the same for its others")
    parser.add_argument("--layer-ms", type=float, default=5.0, help="the drafter's time per layer")
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--name", default="ablation")
    args = parser.parse_args()
    wan = Wan(args.stages, args.delay_ms, args.mbps)
    script = {
        "acceptance": args.acceptance, "siblings": tuple(args.siblings), "layer_seconds": args.layer_ms / 1e3,
        "depth": 16,
    }  # fmt: skip
    title = f"{wan}, scripted drafter h = {args.acceptance:g}, {args.layer_ms:g} ms per layer"
    print(f"{title}: starting …", flush=True)
    with toy_swarm(wan) as swarm:
        host, jobs = host_results(swarm, toy_jobs(args.prompts, args.new_tokens))
        host_rate = sum(len(r.tokens) for r in host) / sum(r.seconds for r in host)
        expected = [result.tokens for result in host]
        prompt = sum(len(job.ids) for job in jobs)
        lines = []
        for lever, config in LEVERS.items():
            results = run(swarm, method(lever, config, script), jobs)
            lines.append(line(lever, results, host_rate, expected, prompt))
            print(f"{lever}: {lines[-1].tokens_per_second:.2f} tok/s", flush=True)
    print(f"\n{title}\nhost plain: {host_rate:.2f} tok/s\n{table(lines)}")
    document = {"settings": vars(args), "host_tokens_per_second": host_rate, "lines": [asdict(x) for x in lines]}
    path = write(args.name, document)
    plot(lines, title, path.with_suffix(".png"))
    print(f"\n{path} and {path.with_suffix('.png')}")
    return 0 if all(x.identical for x in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
