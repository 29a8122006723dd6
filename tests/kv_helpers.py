"""What the KV tests share: KV that looks like a model's, and KV that looks like nothing at all."""

from __future__ import annotations

import torch

from bloombee_spec.kv.chunks import Depth
from bloombee_spec.kv.span import SpanShape
from tests.codec_helpers import any_bits

KEY, OTHER_KEY = bytes(range(16)), bytes(range(1, 17))
DEPTH = Depth(first_block=2, model_blocks=8)


def model_like(
    blocks: int = 2, heads: int = 2, tokens: int = 40, dim: int = 8, dtype: torch.dtype = torch.float32, seed: int = 0
) -> torch.Tensor:
    """`[2, blocks, heads, tokens, dim]`: channels with a mean and a spread of their own, tokens that resemble the last
    one, and a first token far away from all others."""
    generator = torch.Generator().manual_seed(seed)
    size = (2, blocks, heads, tokens, dim)
    kv = torch.randn(size, generator=generator)
    for token in range(1, tokens):
        kv[:, :, :, token] = 0.6 * kv[:, :, :, token - 1] + 0.8 * kv[:, :, :, token]
    spread = torch.exp(torch.randn(2, blocks, heads, 1, dim, generator=generator))
    mean = 2 * torch.randn(2, blocks, heads, 1, dim, generator=generator)
    kv = kv * spread + mean
    kv[:, :, :, 0] *= 10
    return kv.to(dtype)


def random_bits(blocks: int, heads: int, tokens: int, dim: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """The same shape with uniformly random bit patterns: NaN, infinities, denormals, all magnitudes."""
    return any_bits(2 * blocks * heads * tokens, dim, dtype, seed).view(2, blocks, heads, tokens, dim)


def shape_of(kv: torch.Tensor) -> SpanShape:
    return SpanShape.of(kv)


def relative_error(back: torch.Tensor, kv: torch.Tensor) -> float:
    """Mean squared error as a part of the channels' variance, first token left out."""
    kv, back = kv.double()[:, :, :, 1:], back.double()[:, :, :, 1:]
    return float((back - kv).pow(2).mean() / (kv - kv.mean(3, keepdim=True)).pow(2).mean())
