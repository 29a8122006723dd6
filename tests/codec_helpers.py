"""What the codec tests share: every codec, every dtype, and rows that look like activations or like nothing at all."""

from __future__ import annotations

import torch

from bloombee_spec.wire.activations import WIRE_DTYPES, ActivationCodec, bits_of, get_codec

CODECS = ("raw", "lossless", "int8", "tah4", "tah3", "tah-mixed")
LOSSY = ("int8", "tah4", "tah3", "tah-mixed")
DTYPES = WIRE_DTYPES


def codec(name: str) -> ActivationCodec:
    return get_codec(name)


def activations(n: int, hidden: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Rows with channels of different scale, rows of different scale, and a few outlier channels."""
    generator = torch.Generator().manual_seed(seed)
    channels = torch.exp(0.5 * torch.randn(hidden, generator=generator))
    channels[:: max(1, hidden // 3)] *= 20
    rows = torch.exp(0.3 * torch.randn(n, 1, generator=generator))
    return (torch.randn(n, hidden, generator=generator) * channels * rows).to(dtype)


def any_bits(n: int, hidden: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Uniformly random bit patterns: NaN with payloads, infinities, denormals, both zeros, all magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    count = n * hidden * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype).view(n, hidden)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and bool(torch.equal(bits_of(left.contiguous()), bits_of(right.contiguous())))
