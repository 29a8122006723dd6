"""Two small plots for docs/codecs.md: how far references help, and where the energy of a row sits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.codecs_deltas import gather, spectrum
from benchmarks.codecs_rows import BOUNDARIES, Recording


def draw(recordings: Sequence[Recording], folder: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    Path(folder).mkdir(parents=True, exist_ok=True)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for boundary in BOUNDARIES:
        energy = gather(recordings, boundary).rows.pow(2).mean(0).sqrt().sort(descending=True).values
        left.plot(range(1, len(energy) + 1), energy, label=f"after block {boundary}")
    left.set(xscale="log", yscale="log", xlabel="channel, by rank", ylabel="rms", title="A few channels are outliers")
    left.legend(fontsize=8)
    for boundary in BOUNDARIES:
        data = gather(recordings, boundary)
        whole = data.rows.pow(2).mean(0)
        ratio = ((data.rows - data.parents).pow(2).mean(0) / whole).sort().values
        right.plot([i / len(ratio) for i in range(len(ratio))], ratio, label=f"after block {boundary}")
    right.axhline(1.0, color="grey", linewidth=0.8)
    right.set(
        xlabel="share of channels", ylabel="energy of (row − parent) / row", title="Deltas enlarge most channels"
    )
    figure.savefig(Path(folder) / "codec-deltas.png", dpi=80)

    figure, axis = pyplot.subplots(figsize=(4.5, 3.2), layout="constrained")
    for boundary in BOUNDARIES:
        shares = spectrum(recordings, boundary)
        axis.plot(range(1, len(shares) + 1), shares, marker=".", label=f"after block {boundary}")
    axis.set(xlabel="directions", ylabel="share of the energy", ylim=(0, 1), title="16 candidates with one parent")
    axis.legend(fontsize=8)
    figure.savefig(Path(folder) / "codec-siblings.png", dpi=80)
