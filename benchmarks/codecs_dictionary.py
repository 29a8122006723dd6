"""Computes the Huffman weights in wire/entropy.py:

`python -m benchmarks.codecs_dictionary` prints them, as hex digits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.codecs_entropy import symbol_plane
from benchmarks.codecs_rows import load_model, rows_of_text

_LONGEST = 11  # bits of a code, the most that zstd allows
_SYMBOLS = 124
_FROM = 40  # symbols below, except 0, are too rare to deserve a code


def code_lengths(counts: npt.NDArray[np.float64], longest: int) -> npt.NDArray[np.int64]:
    """Lengths of the best prefix code for symbols with these counts (0: no code) and no code above `longest` bits.

    The package-merge algorithm of Larmore and Hirschberg (1990).
    """
    coins = sorted((float(count), (symbol,)) for symbol, count in enumerate(counts) if count > 0)
    packages: list[tuple[float, tuple[int, ...]]] = []
    for _ in range(longest):
        pairs = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(packages[0::2], packages[1::2])]
        packages = sorted(coins + pairs, key=lambda package: package[0])
    lengths = np.zeros(len(counts), dtype=np.int64)
    for _, symbols in packages[: 2 * len(coins) - 2]:
        for symbol in symbols:
            lengths[symbol] += 1
    return lengths


def weights(counts: npt.NDArray[np.float64]) -> str:
    """Weights as in RFC 8878, section 4.2.1.1: longest + 1 - length, or 0;

    the last symbol's is implied, hence the 0.
    """
    wanted = np.maximum(counts[:_SYMBOLS], 1e-9 * counts.sum())
    wanted[1:_FROM] = 0
    lengths = code_lengths(wanted, _LONGEST)
    assert sum(2.0 ** -int(length) for length in lengths if length) == 1.0
    digits = [f"{_LONGEST + 1 - length:x}" if length else "0" for length in lengths]
    return "".join([*digits[:-1], "0"])


def main() -> None:
    torch.set_num_threads(1)
    model, tokenizer = load_model(torch.bfloat16)
    rows = rows_of_text(model, tokenizer, windows=24)
    # without the first rows of a window, which are sinks of attention with values of their own
    planes = [symbol_plane(window[8:]) for windows in rows.values() for window in windows]
    print(weights(sum(np.bincount(plane, minlength=128) for plane in planes).astype(np.float64)))  # type: ignore[union-attr]


if __name__ == "__main__":
    main()
