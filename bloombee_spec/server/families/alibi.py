"""ALiBi: a penalty per head that grows with the distance, here from positions that are kept beside the keys.

In a tree the order of the columns says nothing about distance, so the column of a row also holds the row's position,
in one more head of the KV buffer. Positions thus move with their rows when a candidate is committed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from bloombee_spec.kv.buffer import MASK_ELEMENTS, LaneView

POSITION_HEADS = 1  # the KV buffer's last head: positions instead of keys
_DIGITS = (65_536, 256, 1)  # a position is kept as three digits: bfloat16 holds integers up to 256 exactly


def alibi_slopes(heads: int) -> torch.Tensor:
    """`[heads]` in fp32: a geometric series from `2 ** (-8 / heads)`, and for other than powers of two every second
    member of the next longer series (Press et al. 2022, "Train Short, Test Long")."""
    regular = 2 ** math.floor(math.log2(heads))
    exponents = [-8 * (i + 1) / regular for i in range(regular)]
    exponents += [-4 * (2 * i + 1) / regular for i in range(heads - regular)]
    return torch.tensor([2.0**exponent for exponent in exponents])


def attend_alibi(
    block: int,
    lanes: Sequence[LaneView],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    slopes: torch.Tensor,
    scale: float = 1.0,
) -> torch.Tensor:
    """`kv.buffer.attend` with a bias of `slopes * position of the key`: softmax ignores what all keys of a row share,
    so that is the same as a penalty for the distance.

    :param q: `[n, heads, head_dim]`; `k` and `v` `[n, kv_heads, head_dim]`
    :param positions: `[n]`
    :param slopes: `[heads]`
    :param scale: the bias is multiplied with it, after rounding to the dtype of `q` as the hosts' blocks do
    :returns: `[n, heads, head_dim]`
    """
    out = torch.empty_like(q)
    values_of_digits = torch.tensor(_DIGITS, device=positions.device)
    digits = positions[:, None] // values_of_digits % _DIGITS[1]
    for lane in lanes:
        keys, values = lane.buffer[0, block], lane.buffer[1, block]
        keys[:-1].index_copy_(1, lane.columns, k[lane.rows].transpose(0, 1).to(keys.dtype))
        values[:-1].index_copy_(1, lane.columns, v[lane.rows].transpose(0, 1).to(values.dtype))
        keys[-1, :, : len(_DIGITS)].index_copy_(0, lane.columns, digits[lane.rows].to(keys.dtype))
        keys, values = keys[:, lane.begin : lane.end], values[:-1, lane.begin : lane.end]
        key_positions = keys[-1, :, : len(_DIGITS)].float() @ values_of_digits.float()
        bias = (slopes[:, None] * key_positions).to(q.dtype) * scale
        queries = q[lane.rows]
        n, heads, _ = queries.shape
        step = max(1, MASK_ELEMENTS // max(1, (lane.end - lane.begin) * heads))
        for at in range(0, n, step):
            part = queries[at : at + step]
            mask = None if lane.mask is None else lane.mask[at : at + step]
            out[lane.rows][at : at + step] = _biased_attention(part, keys[:-1], values, bias, mask)
    return out


def _biased_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """`keys` and `values` `[kv_heads, columns, head_dim]`, `bias` `[heads, columns]`, `mask` `[n, columns]`"""
    n, heads, head_dim = q.shape
    kv_heads = keys.shape[0]
    full = bias[:, None, :].expand(heads, n, -1)
    if mask is not None:
        full = full.masked_fill(~mask, -math.inf)  # also what a column holds that no row sees
    grouped = q.transpose(0, 1).reshape(kv_heads, -1, head_dim)  # `[kv_heads, group * n, head_dim]`
    full = full.reshape(kv_heads, -1, full.shape[-1])
    out = F.scaled_dot_product_attention(grouped[None], keys[None], values[None], attn_mask=full[None])[0]
    return out.view(heads, n, head_dim).transpose(0, 1)
