"""The demo: a real model on a real local swarm over an emulated WAN, the host's own decoding beside the plugin's."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path

from benchmarks.compare import Row, add_swarm_arguments, choose_prompts, make_jobs, start_swarm, table
from benchmarks.compare import row as make_row
from benchmarks.methods import HOST, SUFFIX
from benchmarks.runner import Job, Result, run_jobs
from benchmarks.smollm2 import ensure_smollm2

SECONDS_PER_TOKEN = 6.0


def say(line: str = "") -> None:
    print(line, flush=True)


def side_by_side(left: str, right: str, titles: tuple[str, str]) -> str:
    width = max(30, (shutil.get_terminal_size((120, 40)).columns - 3) // 2)

    def wrapped(title: str, text: str) -> list[str]:
        lines = [piece for line in text.splitlines() for piece in (textwrap.wrap(line, width) or [""])]
        return [title, "-" * width, *lines]

    columns = wrapped(titles[0], left), wrapped(titles[1], right)
    height = max(map(len, columns))
    padded = [column + [""] * (height - len(column)) for column in columns]
    return "\n".join(f"{a:<{width}} | {b}".rstrip() for a, b in zip(*padded))


def show(job: Job, plain: Result, ours: Result, texts: tuple[str, str]) -> None:
    say()
    say(f"=== {job.name} ({len(job.ids)} prompt tokens)")
    titles = (
        f"host: {plain.tokens_per_second:.2f} tok/s",
        f"plugin: {ours.tokens_per_second:.2f} tok/s, {ours.stats['laps']} laps",
    )
    say(side_by_side(*texts, titles))
    say("same tokens" if plain.tokens == ours.tokens else "DIFFERENT TOKENS")


def run(args: argparse.Namespace, model: Path) -> Sequence[Row]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    n_blocks = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    jobs = make_jobs(model, choose_prompts(1), args.new_tokens)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="bloombee-spec-") as work_dir:
        say(
            f"starting a bootstrap peer and {args.stages} servers ({n_blocks} blocks), "
            f"{args.delay_ms:g} ms one way, {args.mbps:g} Mbps …"
        )
        with start_swarm(args, model, Path(work_dir), n_blocks) as swarm:
            say("swarm is up; decoding with the host's own generate …")
            limit = SECONDS_PER_TOKEN * args.new_tokens
            plain = run_jobs(swarm, HOST, jobs, limit_s=limit)
            say("decoding with bloombee-spec …")
            ours = run_jobs(swarm, SUFFIX, jobs, limit_s=limit)
            for job, before, after in zip(jobs, plain, ours):
                decoded = tuple(
                    tokenizer.decode(result.tokens, skip_special_tokens=True) for result in (before, after)
                )
                show(job, before, after, (decoded[0], decoded[1]))
                rows += [make_row(HOST, before, before), make_row(SUFFIX, after, before)]
            say()
            say("stopping the swarm …")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_swarm_arguments(parser)
    args = parser.parse_args()
    say("preparing the model …")
    rows = run(args, args.model or ensure_smollm2())
    say()
    say(table(rows))
    say()
    identical = all(row.identical for row in rows)
    say("every text is identical" if identical else "TEXTS DIFFER")
    return 0 if identical else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\ninterrupted; the swarm has been stopped", file=sys.stderr)
        sys.exit(130)
