"""Tables and the plot of benchmarks/kv_codec.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LEVELS = ("lossless", "int8", "fine", "coarse")


def tables(results: dict[str, Any]) -> str:
    parts = []
    if results["quality"]:
        parts.append(f"{len(results['quality'])} texts: {', '.join(results['quality'])}\n")
        parts += [quality_table(results["quality"]), text_table(results["quality"])]
    if "speed" in results:
        parts.append(speed_table(results["speed"]))
    if "entropy" in results:
        parts.append(entropy_table(results["entropy"]))
    return "\n\n".join(parts)


def quality_table(by_text: dict[str, Any]) -> str:
    lines = [
        "| level | bits per value | of fp16 | below 8-bit | perplexity | divergence, nats | same choice | greedy "
        "tokens before the first difference |",
        "|---|---|---|---|---|---|---|---|",
    ]
    values = sum(text["values"] for text in by_text.values())
    eight = sum(text["int8"]["bytes"] for text in by_text.values())
    for level in LEVELS:
        found = [text[level] for text in by_text.values()]
        size = sum(f["bytes"] for f in found)
        change = math.expm1(_mean([f["loss"] - text["loss"] for f, text in zip(found, by_text.values())]))
        lines.append(
            f"| {level} | {8 * size / values:.2f} | {50 * size / values:.1f} % | {eight / size:.2f} × | "
            f"{100 * change:+.2f} % | {_mean([f['divergence'] for f in found]):.5f} | "
            f"{100 * _mean([f['forced'] for f in found]):.1f} % | {_mean([f['greedy'] for f in found]):.1f} of 64 |"
        )
    return "\n".join(lines)


def speed_table(result: dict[str, Any]) -> str:
    raw = result["raw_bytes"]
    lines = [
        f"{result['tokens']} tokens of 8 blocks in fp16: {raw / 1e6:.1f} MB, {raw * 8 / 1e8:.2f} s at 100 Mbps\n",
        "| level | MB | encode, MB/s | decode, MB/s | encode + decode, s | send at 100 Mbps, s |",
        "|---|---|---|---|---|---|",
    ]
    for level in LEVELS:
        f = result[level]
        lines.append(
            f"| {level} | {f['bytes'] / 1e6:.2f} | {raw / f['encode_s'] / 1e6:.0f} | "
            f"{raw / f['decode_s'] / 1e6:.0f} | {f['encode_s'] + f['decode_s']:.2f} | {f['bytes'] * 8 / 1e8:.2f} |"
        )
    return "\n".join(lines)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def text_table(by_text: dict[str, Any]) -> str:
    """Perplexity change and bits per value of each text."""
    lines = ["| text | perplexity | int8 | fine | coarse |", "|---|---|---|---|---|"]
    for name, text in by_text.items():
        cells = [_cell(text, text[level]) for level in LEVELS[1:]]
        lines.append(f"| {name} | {math.exp(text['loss']):.2f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(text: dict[str, Any], found: dict[str, Any]) -> str:
    change = 100 * math.expm1(found["loss"] - text["loss"])
    return f"{change:+.2f} % at {8 * found['bytes'] / text['values']:.2f}"


def entropy_table(result: dict[str, Any]) -> str:
    lines = ["| coder | bits per symbol | encode + decode, ns per symbol |", "|---|---|---|"]
    for name in ("one table", "a table per class", "a table per channel", "tables of all channels"):
        lines.append(f"| entropy, {name} | {result[name]:.3f} | |")
    for name, seconds in (("zstandard", "zstandard_s"), ("ANS, classes", "ANS_s")):
        lines.append(f"| {name} | {result[name]:.3f} | {1e9 * result[seconds] / result['symbols']:.1f} |")
    return "\n".join(lines)


def plot(results: dict[str, Any], path: Path) -> Path:
    """Each text and level: bits per value against divergence, which is less noisy than perplexity."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(5.5, 3.6), layout="constrained")
    for level in LEVELS[1:]:
        found = [
            (8 * text[level]["bytes"] / text["values"], text[level]["divergence"])
            for text in results["quality"].values()
        ]
        axis.plot(*zip(*found), "o", label=level)
    axis.set(xlabel="bits per value", ylabel="divergence from the untouched KV, nats", yscale="log", xlim=(0, None))
    axis.grid(alpha=0.3, which="both")
    axis.legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path
