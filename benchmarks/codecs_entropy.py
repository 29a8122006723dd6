"""Which library should code the symbols of the lossless codec? constriction, zstandard, blosc2 compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.codecs_rows import BOUNDARIES, Recording
from bloombee_spec.wire.activations import bits_of
from bloombee_spec.wire.entropy import put_plane, take_plane
from bloombee_spec.wire.lossless import LAYOUTS, symbols_of

Plane = npt.NDArray[np.uint8]


def stage_table(recordings: Sequence[Recording]) -> str:
    """Bits per symbol and nanoseconds per symbol of each stage;

    the models of constriction are fitted on other prompts.
    """
    from benchmarks.codecs import SIZES, least_time

    rows = {half: torch.cat([r.steps[b][:, 0] for b in BOUNDARIES for r in recordings[half::2]]) for half in (0, 1)}
    counts = np.bincount(symbol_plane(rows[0]), minlength=128)
    plane, hidden = symbol_plane(rows[1]), rows[1].shape[1]
    lines = [
        "| stage | bits per symbol, 1 row | 8 rows | 64 rows | encode / decode, ns per symbol: 1 row | 64 rows |",
        "|---|---|---|---|---|---|",
    ]
    for name, encode, decode in _stages((counts + 0.1) / (counts + 0.1).sum()):
        bits, times = [], []
        for n in SIZES:
            parts = [plane[i : i + n * hidden] for i in range(0, len(plane) - n * hidden + 1, n * hidden)]
            bits.append(sum(len(bytes(encode(p))) for p in parts) * 8 / sum(map(len, parts)))
            data = encode(parts[0])
            assert bytes(decode(data, len(parts[0]))) == parts[0].tobytes()
            spent = [least_time(lambda: encode(parts[0])), least_time(lambda: decode(data, len(parts[0])))]  # noqa: B023
            times.append(" / ".join(f"{t * 1e9 / len(parts[0]):.1f}" for t in spent))
        lines.append(f"| {name} | {' | '.join(f'{b:.3f}' for b in bits)} | {times[0]} | {times[2]} |")
    shares = np.bincount(plane, minlength=128) / len(plane)
    entropy = -float((shares[shares > 0] * np.log2(shares[shares > 0])).sum())
    return "\n".join(lines) + f"\n\nEntropy of the symbols: {entropy:.3f} bits."


def symbol_plane(rows: torch.Tensor) -> Plane:
    return symbols_of(bits_of(rows).numpy().view(np.uint16), LAYOUTS[rows.dtype])[1].reshape(-1)


def _stages(shares: npt.NDArray[np.float64]) -> list[tuple[str, Callable[[Plane], Any], Callable[[Any, int], Any]]]:
    import blosc2
    import constriction
    import zstandard

    model = constriction.stream.model.Categorical(shares.astype(np.float32), perfect=False)

    def ours(plane: Plane) -> bytes:
        out = bytearray()
        put_plane(out, plane.tobytes(), trained=True)
        return bytes(out)

    def ans(plane: Plane) -> Any:
        coder = constriction.stream.stack.AnsCoder()
        coder.encode_reverse(plane.astype(np.int32), model)
        return coder.get_compressed()

    def range_coder(plane: Plane) -> Any:
        coder = constriction.stream.queue.RangeEncoder()
        coder.encode(plane.astype(np.int32), model)
        return coder.get_compressed()

    def plain(level: int) -> tuple[Callable[[Plane], Any], Callable[[Any, int], Any]]:
        packer, unpacker = zstandard.ZstdCompressor(level=level), zstandard.ZstdDecompressor()
        return lambda plane: packer.compress(plane.tobytes()), lambda data, size: unpacker.decompress(data)

    settings = {
        "typesize": 1,
        "codec": blosc2.Codec.ZSTD,
        "clevel": 5,
        "nthreads": 1,
        "filters": [blosc2.Filter.NOFILTER],
    }
    return [
        (
            "zstandard as in `wire/entropy.py`",
            ours,
            lambda data, size: take_plane(memoryview(data), size)[0].tobytes(),
        ),
        ("zstandard, level 1", *plain(1)),
        ("zstandard, level 3", *plain(3)),
        (
            "blosc2 (zstd, level 5)",
            lambda p: blosc2.compress2(p.tobytes(), **settings),
            lambda d, s: blosc2.decompress2(d),
        ),
        (
            "constriction, ANS, one static model",
            ans,
            lambda d, s: constriction.stream.stack.AnsCoder(d).decode(model, s).astype(np.uint8).tobytes(),
        ),
        (
            "constriction, range coder, one static model",
            range_coder,
            lambda d, s: constriction.stream.queue.RangeDecoder(d).decode(model, s).astype(np.uint8).tobytes(),
        ),
    ]
