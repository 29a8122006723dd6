"""Keyed noise: Exp(1) numbers that are a function of (seed, row, position, token id) and of nothing else.

The generator is Philox 4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) as numpy ships it:
counter-based, so that anybody can compute any number at any time, in any order. The 256-bit counter is

    word 3 (highest): position      word 2: row      word 1: 0      word 0 (lowest): block of four token ids

Row and position are in the high words because the low word is what the generator counts up: two streams whose counters
differ by one in the low word are the same stream, shifted.

What is reproducible where: the 64-bit integers are exact on every platform. The logarithm that turns them into Exp(1)
is evaluated in float64 and rounded to float32, so two math libraries that differ in the last bit of a float64 agree on
all but about one number in 2**28, and disagree there by one part in 2**24. That changes a token only when the two best
candidates of a race are closer than that: once in about 1e15 tokens. The draw is a pure function of the inputs for all
practical purposes; the logits, which do differ between kinds of hardware, are what decides whether two machines agree.
"""

from __future__ import annotations

from operator import index

import numpy as np
import numpy.typing as npt
import torch

MAX_SEED = 2**64 - 1
MAX_ROW = 2**32 - 1
MAX_POSITION = 2**32 - 1
MAX_SIZE = 2**24  # tokens of a vocabulary; the largest ones in use have about 2**18


def exponential_noise(seed: int, row: int, position: int, size: int) -> torch.Tensor:
    """Independent Exp(1) numbers, one per token id: float32 `[size]`, all of them positive and finite.

    The first n numbers do not depend on `size`, so a drafter with a smaller vocabulary shares them.

    :param seed: key of the generation, 0 .. 2**64 - 1
    :param row: row of the batch, 0 .. 2**32 - 1
    :param position: absolute position of the token to be drawn (prompt included), 0 .. 2**32 - 1
    :param size: number of token ids
    :raises ValueError: an argument is out of range
    """
    return torch.from_numpy(_exponential(seed, row, position, size))


def race_noise(seed: int, row: int, position: int, size: int) -> torch.Tensor:
    """`-log E` of `exponential_noise`, float64 `[size]`: standard Gumbel noise, to be added to scores."""
    return torch.from_numpy(-np.log(_exponential(seed, row, position, size).astype(np.float64)))


def fresh_seed() -> int:
    """A seed for one call to `generate`, from torch's global generator: calls differ, `torch.manual_seed` repeats."""
    return int(torch.randint(0, 2**63 - 1, ()))


def _exponential(seed: int, row: int, position: int, size: int) -> npt.NDArray[np.float32]:
    for name, value, limit in (
        ("seed", seed, MAX_SEED),
        ("row", row, MAX_ROW),
        ("position", position, MAX_POSITION),
        ("size", size, MAX_SIZE),
    ):
        if not 0 <= value <= limit:
            raise ValueError(f"{name} must be in 0 .. {limit}, got {value}")
    counter = (index(position) << 192) | (index(row) << 128)
    words = np.random.Philox(key=index(seed), counter=counter).random_raw(index(size))
    # 52 random bits and a half fit a float64 exactly, and keep u inside (0, 1): E is never 0 and never infinite.
    uniform = ((words >> np.uint64(12)) + 0.5) * 2.0**-52
    noise: npt.NDArray[np.float32] = (-np.log(uniform)).astype(np.float32)
    return noise


class NoiseCache:
    """Race noise of one stream (one batch row) by position: made once, shared by all siblings, dropped once committed.

    A position costs `8 * size` bytes, so at most `capacity` of them are kept; the least recently used goes first and
    would be recomputed, bit for bit, if it were asked for again.
    """

    def __init__(self, seed: int, row: int, size: int, *, device: torch.device | str = "cpu", capacity: int = 32):
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self.seed = seed
        self.row = row
        self.size = size
        self.device = torch.device(device)
        self.capacity = capacity
        self._noise: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._noise)

    def __contains__(self, position: int) -> bool:
        return position in self._noise

    def at(self, position: int) -> torch.Tensor:
        """`-log E` at this position: float64 `[size]` on the cache's device. Do not modify it."""
        noise = self._noise.pop(position, None)
        if noise is None:
            noise = race_noise(self.seed, self.row, position, self.size).to(self.device)
            while len(self._noise) >= self.capacity:
                del self._noise[next(iter(self._noise))]
        self._noise[position] = noise  # a dict keeps insertion order: the last one is the most recently used
        return noise

    def commit(self, position: int) -> None:
        """The token at `position` is decided: forget its noise, and that of everything before it."""
        for stale in [known for known in self._noise if known <= position]:
            del self._noise[stale]
