"""Queries, keys and values that come out of one linear layer, as in BLOOM and Falcon."""

from __future__ import annotations

import torch


def split_fused(fused: torch.Tensor, kv_heads: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each KV head's queries come first, then its key and its value. One KV head for all queries (multi-query) and one
    per query are the two ends of the same layout.

    :param fused: `[n, (heads + 2 * kv_heads) * head_dim]`
    :returns: `[n, heads, head_dim]`, `[n, kv_heads, head_dim]`, `[n, kv_heads, head_dim]`
    """
    n = fused.shape[0]
    groups = fused.view(n, kv_heads, -1, head_dim)
    return groups[:, :, :-2].reshape(n, -1, head_dim), groups[:, :, -2], groups[:, :, -1]
