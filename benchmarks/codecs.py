"""Activation codecs on real rows: `python -m benchmarks.codecs rows|speed|entropy|deltas|ids|plots|quality`, tables in
Markdown.

Times are the least processor time of one thread over many repetitions, which other load on the machine hardly moves.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import (
    codecs_deltas,
    codecs_entropy,
    codecs_ids,
    codecs_plots,
    codecs_quality,
    codecs_rivals,
    codecs_rows,
    prompts,
)
from benchmarks.codecs_rivals import Candidate
from benchmarks.codecs_rows import BOUNDARIES, Recording

SIZES = (1, 8, 64)


def least_time(call: Callable[[], Any], seconds: float = 0.05, most: int = 60) -> float:
    """The least processor time of one call in this thread, in seconds."""
    call()
    best, end = float("inf"), time.monotonic() + seconds
    for turn in range(most):
        start = time.thread_time()
        call()
        best = min(best, time.thread_time() - start)
        if turn >= 4 and time.monotonic() > end:
            break
    return best


def record(siblings: int) -> list[Recording]:
    """Four prompts of each kind, 40 decoding steps, bf16."""
    model, tokenizer = codecs_rows.load_model(torch.bfloat16)
    chosen = [*prompts.CHAT[:4], *prompts.CODE[:4], *prompts.EDIT[:4]]
    return codecs_rows.record(model, tokenizer, chosen, steps=40, siblings=siblings)


def row_tables(recordings: Sequence[Recording], candidates: Sequence[Candidate]) -> str:
    tables = []
    for boundary in BOUNDARIES:
        rows = torch.cat([r.steps[boundary][:, 0] for r in recordings])
        lines = [
            f"After block {boundary}:\n",
            "| codec | bits per value, 1 row | 8 rows | 64 rows | % of bf16, 1 row | 64 rows | relative error | "
            "encode / decode, µs per row: 1 row | 8 rows | 64 rows |",
            "|---|---|---|---|---|---|---|---|---|---|",
        ]
        for candidate in candidates:
            bits = [_bits(candidate, rows, n) for n in SIZES]
            times = [_times(candidate, rows[:n]) for n in SIZES]
            lines.append(
                f"| {candidate.name} | {' | '.join(f'{b:.2f}' for b in bits)} | {bits[0] / 0.16:.1f} | "
                f"{bits[2] / 0.16:.1f} | {_error(candidate, rows)} | {' | '.join(times)} |"
            )
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def _bits(candidate: Candidate, rows: torch.Tensor, n: int) -> float:
    """Mean bits per value when rows travel n at a time."""
    frames = [frame for frame in rows.split(n) if len(frame) == n]
    return sum(candidate.size(candidate.encode(f)) for f in frames) * 8 / sum(f.numel() for f in frames)


def _times(candidate: Candidate, rows: torch.Tensor) -> str:
    data = candidate.encode(rows)
    encode = least_time(lambda: candidate.encode(rows))
    decode = least_time(lambda: candidate.decode(data, rows.shape, rows.dtype))
    return f"{encode * 1e6 / len(rows):.1f} / {decode * 1e6 / len(rows):.1f}"


def _error(candidate: Candidate, rows: torch.Tensor) -> str:
    back = candidate.decode(candidate.encode(rows), rows.shape, rows.dtype)
    error = float((back.double() - rows.double()).norm() / rows.double().norm())
    return f"{error:.4f}" if error else "0"


def speed_table(recordings: Sequence[Recording], candidates: Sequence[Candidate]) -> str:
    """64 rows of 4,096, made of rows of the model laid end to end."""
    values = torch.cat([r.steps[16][:, 0].flatten() for r in recordings])
    rows = values.repeat(64 * 4096 // len(values) + 1)[: 64 * 4096].view(64, 4096)
    target = torch.empty_like(rows)
    copy = least_time(lambda: target.copy_(rows), seconds=0.5)
    lines = ["| codec | encode, ms | decode, ms | sum | × memcpy |", "|---|---|---|---|---|"]
    for candidate in candidates:
        data = candidate.encode(rows)
        encode = least_time(lambda c=candidate: c.encode(rows), seconds=1.0)  # type: ignore[misc]
        decode = least_time(lambda c=candidate, d=data: c.decode(d, rows.shape, rows.dtype), seconds=1.0)  # type: ignore[misc]
        lines.append(
            f"| {candidate.name} | {encode * 1e3:.2f} | {decode * 1e3:.2f} | {(encode + decode) * 1e3:.2f} | "
            f"{(encode + decode) / copy:.0f} |"
        )
    return f"memcpy of the same {rows.numel() * 2 >> 10} KiB: {copy * 1e6:.0f} µs\n\n" + "\n".join(lines)


def quality(tokens: int) -> str:
    model, tokenizer = codecs_rows.load_model(torch.float32)
    chosen = [*prompts.CHAT[:10], *prompts.CODE[:10], *prompts.EDIT[:10]]
    run = codecs_quality.GreedyRun(model, tokenizer, chosen, new_tokens=64)
    names = ("lossless", "int8", "tah4", "tah-mixed", "tah3")
    candidates = [*codecs_rivals.own(names), *codecs_rivals.of_host()]
    results = codecs_quality.measure(model, tokenizer, candidates, run, tokens)
    assert results[1].loss == results[0].loss and results[1].same == len(chosen), "lossless changed something"
    return codecs_quality.quality_table(results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("rows", "speed", "entropy", "deltas", "ids", "plots", "quality"))
    parser.add_argument("--tokens", type=int, default=20_480, help="of prose, for perplexity")
    parser.add_argument("--out", default="docs/img", help="folder for plots")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.part == "quality":
        print(quality(options.tokens))
    elif options.part in ("rows", "speed"):
        candidates = [*codecs_rivals.own(), *codecs_rivals.general(), *codecs_rivals.of_host()]
        table = row_tables if options.part == "rows" else speed_table
        print(table(record(siblings=1), candidates))
    elif options.part == "ids":
        model, tokenizer = codecs_rows.load_model(torch.float32)
        chosen = [*prompts.CHAT[:4], *prompts.CODE[:4], *prompts.EDIT[:4]]
        print(codecs_ids.id_table(model, tokenizer, chosen, new_tokens=64))
    elif options.part == "entropy":
        print(codecs_entropy.stage_table(record(siblings=1)))
    elif options.part == "deltas":
        recordings = record(siblings=16)
        for build in (
            codecs_deltas.outlier_table,
            codecs_deltas.variance_table,
            codecs_deltas.entropy_table,
            codecs_deltas.error_table,
        ):
            print(build.__doc__ or "", build(recordings), sep="\n\n", end="\n\n")
    else:
        codecs_plots.draw(record(siblings=16), options.out)


if __name__ == "__main__":
    main()
