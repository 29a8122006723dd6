"""KV of one lane at one stage, and attention over it: one softmax over `[arena | prefix]`, without concatenating the
past."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

MASK_ELEMENTS = 1 << 24  # rows are attended in chunks so that no mask or score matrix grows beyond this


@dataclass(frozen=True, slots=True)
class KVShape:
    """Shape of a lane's buffer: `[2, blocks, kv_heads, arena + max_length, head_dim]` (keys, values)."""

    blocks: int
    kv_heads: int
    head_dim: int
    arena: int
    max_length: int

    @property
    def columns(self) -> int:
        return self.arena + self.max_length

    @property
    def size(self) -> tuple[int, int, int, int, int]:
        return 2, self.blocks, self.kv_heads, self.columns, self.head_dim


def move_columns(buffer: torch.Tensor, moves: Sequence[tuple[int, int]]) -> None:
    """Copy columns of all blocks, `(from, to)` each; no target is also a source."""
    if moves:
        source, target = torch.tensor(moves, device=buffer.device).T
        buffer.index_copy_(3, target, buffer.index_select(3, source))


@dataclass(eq=False, slots=True)
class LaneView:
    """What a forward needs to know about one lane: its rows in the batch, where their KV goes, what they see.

    :param rows: slice of the batch's rows that belong to this lane
    :param columns: `[n]` destination columns
    :param mask: `[n, end - begin]` bool, or None when every row sees the whole slice
    :param positions: `[n]` positions of the rows and `key_positions` `[end - begin]` of the columns, for position
        biases
    """

    buffer: torch.Tensor
    rows: slice
    columns: torch.Tensor
    mask: torch.Tensor | None
    begin: int
    end: int

    @classmethod
    def make(
        cls,
        buffer: torch.Tensor,
        rows: slice,
        columns: np.ndarray[Any, np.dtype[Any]],
        mask: np.ndarray[Any, np.dtype[Any]] | None,
        begin: int,
        end: int,
    ) -> LaneView:
        device = buffer.device
        torch_mask = None if mask is None else torch.from_numpy(mask).to(device)
        return cls(buffer, rows, torch.from_numpy(columns).to(device), torch_mask, begin, end)

    def keep(self, rows: slice, kept: torch.Tensor) -> LaneView:
        """The same lane with only the rows `kept` (`[k]` indices into its rows), now at `rows` of the batch."""
        mask = None if self.mask is None else self.mask[kept]
        return LaneView(self.buffer, rows, self.columns[kept], mask, self.begin, self.end)


def attend(block: int, lanes: Sequence[LaneView], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Store the keys and values of a batch of rows, then attend.

    :param block: index of the block inside the buffers
    :param q: `[n, heads, head_dim]`, rotated
    :param k: `[n, kv_heads, head_dim]`, rotated; `v` alike
    :returns: `[n, heads, head_dim]`
    """
    out = torch.empty_like(q)
    kv_heads = k.shape[1]
    for lane in lanes:
        keys, values = lane.buffer[0, block], lane.buffer[1, block]
        keys.index_copy_(1, lane.columns, k[lane.rows].transpose(0, 1).to(keys.dtype))
        values.index_copy_(1, lane.columns, v[lane.rows].transpose(0, 1).to(values.dtype))
        keys, values = keys[:, lane.begin : lane.end], values[:, lane.begin : lane.end]
        queries = q[lane.rows]
        n, heads, head_dim = queries.shape
        step = max(1, MASK_ELEMENTS // max(1, (lane.end - lane.begin) * heads))
        for at in range(0, n, step):
            part = queries[at : at + step]
            mask = None if lane.mask is None else lane.mask[at : at + step]
            out[lane.rows][at : at + step] = _grouped_attention(part, keys, values, mask, heads // kv_heads)
    return out


def _grouped_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, group: int
) -> torch.Tensor:
    """Heads that share a KV head become more query rows of it, so keys and values are never repeated in memory."""
    n, heads, head_dim = q.shape
    grouped = (
        q.view(n, heads // group, group, head_dim).permute(1, 2, 0, 3).reshape(heads // group, group * n, head_dim)
    )
    if mask is not None:
        mask = mask.repeat(group, 1)
    out = F.scaled_dot_product_attention(grouped[None], keys[None], values[None], attn_mask=mask)[0]
    return out.view(heads // group, group, n, head_dim).permute(2, 0, 1, 3).reshape(n, heads, head_dim)
