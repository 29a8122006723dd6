"""Rotary factors at any positions, if possible from a block's own rotary module: its call differs between
transformers versions."""

from __future__ import annotations

import inspect
from typing import Any

import torch


def rotary_factors(rotary: Any, like: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    :param like: any tensor of the wanted dtype and device
    :param positions: `[n]`
    :returns: cosines and sines, `[n, 1, head_dim]` each: to broadcast over heads
    """
    if "position_ids" in inspect.signature(rotary.forward).parameters:
        cos, sin = rotary(like, positions[None])
        return cos[0, :, None, :], sin[0, :, None, :]
    cos, sin = rotary(like, seq_len=int(positions.max()) + 1)  # before 4.38; [1, 1, length, head_dim]
    return cos.reshape(-1, cos.shape[-1])[positions, None, :], sin.reshape(-1, sin.shape[-1])[positions, None, :]


def inverse_frequencies(theta: float, head_dim: int) -> torch.Tensor:
    """`[head_dim / 2]` angles per position, in fp32 (Su et al. 2021)."""
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def factors_at(
    frequencies: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Like `rotary_factors`, for blocks without a usable rotary module of their own."""
    angles = positions[:, None].float() * frequencies.to(positions.device)
    angles = torch.cat((angles, angles), dim=-1)[:, None, :]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`x` `[n, heads, head_dim]`, `cos`/`sin` `[n, 1, head_dim]`; the first half is paired with the second one."""
    half = x.shape[-1] // 2
    swapped = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + swapped * sin
