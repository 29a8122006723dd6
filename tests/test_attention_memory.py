"""A prompt of 8k tokens in chunks: no mask, and no score matrix that a mask stands for, grows with its square."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from bloombee_spec.kv import buffer as kv
from bloombee_spec.kv.buffer import KVShape, LaneView, attend
from bloombee_spec.lane import Lane, LaneBatch
from bloombee_spec.server.config import SpecServerConfig
from bloombee_spec.tree import NodeSpec
from bloombee_spec.wire.frames import NodesFrame, PrefixFrame

LENGTH, CHUNK = 8192, SpecServerConfig().max_prefill
ARENA, HEADS, KV_HEADS, DIM = 32, 8, 2, 8


class Attended:
    """Every call of torch's attention: elements of its mask, and of its score matrices."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.masks: list[int] = []
        self.scores: list[int] = []
        real = F.scaled_dot_product_attention

        def recorded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: Any = None, **kw: Any) -> Any:
            self.masks.append(0 if attn_mask is None else attn_mask.numel())
            self.scores.append(q.shape[-3] * q.shape[-2] * k.shape[-2])
            return real(q, k, v, attn_mask=attn_mask, **kw)

        monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)


def taken(lane: Lane) -> tuple[LaneBatch, int]:
    """The next forward, and the peak of what making it allocated (numpy tells tracemalloc)."""
    tracemalloc.start()
    try:
        batch = lane.take(64)
        return batch, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def forward(lane: Lane, batch: LaneBatch, buffer: torch.Tensor) -> torch.Tensor:
    n = len(batch.rows)
    generator = torch.Generator().manual_seed(batch.rows[0].position)
    q, k, v = (torch.randn(n, heads, DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS))
    view = LaneView.make(buffer, slice(0, n), batch.columns, batch.mask, batch.begin, batch.end)
    out = attend(0, [view], q, k, v)
    lane.finish(batch, n, batch.rows)
    return out


@pytest.mark.parametrize("budget", [kv.MASK_ELEMENTS, 1 << 20])
def test_a_long_prompt_in_chunks_needs_no_quadratic_memory(monkeypatch: pytest.MonkeyPatch, budget: int) -> None:
    monkeypatch.setattr(kv, "MASK_ELEMENTS", budget)
    attended = Attended(monkeypatch)
    lane = Lane(arena=ARENA, max_length=LENGTH + 64, inject=False)
    buffer = torch.zeros(KVShape(1, KV_HEADS, DIM, ARENA, LENGTH + 64).size)
    masks, peaks = [], []
    for start in range(0, LENGTH, CHUNK):
        tokens = tuple(range(CHUNK))
        last = start + CHUNK == LENGTH
        lane.accept_prefix(PrefixFrame(0, 0, start // CHUNK, start, tokens, last, LENGTH + 64), torch.zeros(CHUNK, 1))
        batch, peak = taken(lane)
        assert len(batch.rows) == CHUNK and batch.mask is not None
        masks.append(batch.mask.nbytes)
        peaks.append(peak)
        with torch.inference_mode():
            assert torch.isfinite(forward(lane, batch, buffer)).all()
    assert max(masks) == CHUNK * LENGTH, "one byte per row of a chunk and column that it can see"
    assert max(peaks) < 4 * CHUNK * LENGTH, "the mask, and what it is computed from"
    assert max(attended.scores) <= budget and max(attended.masks) <= budget // KV_HEADS
    assert max(masks) < LENGTH * LENGTH // 16 and sum(attended.scores) > LENGTH * LENGTH

    specs = (NodeSpec(1, -LENGTH, 5), NodeSpec(2, 1, 6), NodeSpec(3, 1, 7), NodeSpec(4, -LENGTH, 8))
    lane.accept_nodes(NodesFrame(0, 0, 99, specs), torch.zeros(len(specs), 1))
    batch, peak = taken(lane)
    assert [row.id for row in batch.rows] == [1, 2, 3, 4] and batch.mask is not None
    assert batch.mask.shape == (len(specs), batch.end - batch.begin) and batch.end - batch.begin <= ARENA + LENGTH
    assert peak < 16 * batch.mask.nbytes, "a tree's mask has a row per candidate, whatever the prefix"
    prefix = batch.mask[:, ARENA - batch.begin :]
    assert prefix.all() and np.count_nonzero(~batch.mask) > 0
