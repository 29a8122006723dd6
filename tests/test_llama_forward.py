"""The tree forward against the host's own block (chains) and a dense masked reference (trees), in fp32."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from host_helpers import OLD_PETALS, host_module, not_on_old_petals

from bloombee_spec.kv import buffer as kv
from bloombee_spec.kv.buffer import LaneView, attend, move_columns
from bloombee_spec.server.families.base import UnsupportedModel
from bloombee_spec.server.families.llama import LlamaFamily

TOLERANCE = 1e-5
ARENA, PREFIX = 24, 64
POISON = 1e30  # finite: a masked column has weight exactly zero
SCALINGS: dict[str, Any] = {
    "default": None,
    "linear": {"type": "linear", "rope_type": "linear", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}  # fmt: skip
if OLD_PETALS:  # its transformers know no other, and take no other key
    SCALINGS = {"default": None, "linear": {"type": "linear", "factor": 2.0}}


def make(heads: int, kv_heads: int, head_dim: int, scaling: Any = None) -> tuple[Any, Any]:
    torch.manual_seed(heads * 100 + head_dim)
    config = host_module("models.llama").DistributedLlamaConfig(
        hidden_size=heads * head_dim, num_attention_heads=heads, num_key_value_heads=kv_heads, intermediate_size=48,
        num_hidden_layers=1, vocab_size=32, rope_scaling=scaling, max_position_embeddings=256,
    )  # fmt: skip
    config._attn_implementation = "eager"
    block = host_module("models.llama").WrappedLlamaBlock(config).eval()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.08) if parameter.ndim > 1 else torch.nn.init.uniform_(
            parameter, 0.5, 1.5
        )
    return config, block


def poisoned(family: LlamaFamily) -> torch.Tensor:
    return torch.full((2, 1, family.kv_heads, ARENA + PREFIX, family.head_dim), POISON)


@torch.inference_mode()
def run(family: LlamaFamily, block: Any, buffer: torch.Tensor, hidden: torch.Tensor, positions: list[int],
        columns: list[int], mask: np.ndarray, begin: int, end: int) -> torch.Tensor:  # fmt: skip
    view = LaneView.make(buffer, slice(0, len(positions)), np.array(columns), mask, begin, end)
    shared = family.prepare(block, hidden, torch.tensor(positions))
    return family.forward(0, block, hidden, shared, [view])


@pytest.mark.parametrize("scaling", list(SCALINGS))
@pytest.mark.parametrize("shape", [(6, 2, 16), (4, 4, 8), (3, 1, 6)])
def test_chains_equal_the_hosts_block(shape: tuple[int, int, int], scaling: str) -> None:
    config, block = make(*shape, SCALINGS[scaling])
    family = LlamaFamily(config)
    family.check(block)
    hidden = torch.randn(20, config.hidden_size)
    with torch.inference_mode():
        expected = block(hidden[None])[0][0]
    buffer, got = poisoned(family), []
    for start, stop in ((0, 7), (7, 8), (8, 20)):  # chunks: prefill, one row, several rows
        n = stop - start
        mask = np.tri(n, stop, start, dtype=bool)
        columns = [ARENA + position for position in range(start, stop)]
        got.append(
            run(
                family, block, buffer, hidden[start:stop], list(range(start, stop)), columns, mask, ARENA, ARENA + stop
            )
        )
    assert (torch.cat(got) - expected).abs().max() < TOLERANCE


@not_on_old_petals  # the other host's block takes no positions
@pytest.mark.parametrize("seed", range(6))
def test_random_trees_equal_a_dense_masked_reference(seed: int) -> None:
    """Prefix, then a random tree in two forwards; stale columns are poisoned and none reaches an output."""
    rng = random.Random(seed)
    config, block = make(*rng.choice(((6, 2, 16), (4, 1, 8))), SCALINGS[rng.choice(list(SCALINGS))])
    family = LlamaFamily(config)
    prefix, nodes = rng.randint(1, 9), rng.randint(3, 16)
    parents = [rng.randrange(-1, i) for i in range(nodes)]
    depth, paths = [], []
    for i, parent in enumerate(parents):
        depth.append(0 if parent < 0 else depth[parent] + 1)
        paths.append([*([] if parent < 0 else paths[parent]), i])
    hidden = torch.randn(prefix + nodes, config.hidden_size)
    positions = [*range(prefix), *[prefix + d for d in depth]]
    sees = np.zeros((prefix + nodes, prefix + nodes), dtype=bool)
    sees[:prefix, :prefix] = np.tri(prefix, dtype=bool)
    sees[prefix:, :prefix] = True
    for i, path in enumerate(paths):
        sees[prefix + i, [prefix + j for j in path]] = True
    dense = torch.full(sees.shape, torch.finfo(torch.float32).min).masked_fill(torch.from_numpy(sees), 0.0)
    with torch.inference_mode():
        expected = host_module("models.llama.block").OptimizedLlamaDecoderLayer.forward(
            block, hidden[None], attention_mask=dense[None, None], position_ids=torch.tensor([positions])
        )[0][0]
    columns = rng.sample(range(ARENA), nodes)
    begin, end = min(columns), ARENA + prefix
    buffer = poisoned(family)
    got = [run(family, block, buffer, hidden[:prefix], positions[:prefix], [ARENA + p for p in range(prefix)],
               np.tri(prefix, dtype=bool), ARENA, end)]  # fmt: skip
    cut = rng.randint(1, nodes - 1)
    for first, last in ((0, cut), (cut, nodes)):
        mask = np.zeros((last - first, end - begin), dtype=bool)
        mask[:, ARENA - begin :] = True
        for row in range(first, last):
            mask[row - first, [columns[j] - begin for j in paths[row]]] = True
        rows = slice(prefix + first, prefix + last)
        got.append(run(family, block, buffer, hidden[rows], positions[rows], columns[first:last], mask, begin, end))
    assert (torch.cat(got) - expected).abs().max() < TOLERANCE


def test_attention_in_small_chunks_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(12, 6, 8), torch.randn(12, 2, 8), torch.randn(12, 2, 8)

    def attended() -> torch.Tensor:
        view = LaneView.make(torch.zeros(2, 1, 2, 12, 8), slice(0, 12), np.arange(12), np.tri(12, dtype=bool), 0, 12)
        return attend(0, [view], q, k, v)

    whole = attended()
    monkeypatch.setattr(kv, "MASK_ELEMENTS", 12 * 6 * 2)
    assert torch.allclose(attended(), whole, atol=1e-6)
    keys, values = (part.repeat_interleave(3, 1).transpose(0, 1)[None] for part in (k, v))
    dense = F.scaled_dot_product_attention(q.transpose(0, 1)[None], keys, values, is_causal=True)[0].transpose(0, 1)
    assert torch.allclose(whole, dense, atol=1e-5)


def test_lanes_of_one_forward_do_not_see_each_other() -> None:
    torch.manual_seed(1)
    q, k, v = torch.randn(5, 4, 8), torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    buffers = [torch.zeros(2, 1, 2, 6, 8) for _ in range(2)]
    parts = [slice(0, 2), slice(2, 5)]
    views = [
        LaneView.make(buffer, rows, np.arange(rows.stop - rows.start), np.tri(rows.stop - rows.start, dtype=bool), 0,
                      rows.stop - rows.start) for buffer, rows in zip(buffers, parts)
    ]  # fmt: skip
    both = attend(0, views, q, k, v)
    for rows in parts:
        n = rows.stop - rows.start
        view = LaneView.make(torch.zeros(2, 1, 2, 6, 8), slice(0, n), np.arange(n), np.tri(n, dtype=bool), 0, n)
        assert torch.allclose(attend(0, [view], q[rows], k[rows], v[rows]), both[rows], atol=1e-6)


def test_moves_copy_all_blocks_of_keys_and_values() -> None:
    buffer = torch.randn(2, 3, 2, 10, 4)
    before = buffer.clone()
    move_columns(buffer, [(1, 7), (3, 8)])
    assert torch.equal(buffer[..., 7, :], before[..., 1, :]) and torch.equal(buffer[..., 8, :], before[..., 3, :])
    untouched = [0, 1, 2, 3, 4, 5, 6, 9]
    assert torch.equal(buffer[..., untouched, :], before[..., untouched, :])


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_scaling_that_depends_on_the_length_is_refused(kind: str) -> None:
    from types import SimpleNamespace

    config = SimpleNamespace(rope_scaling={"rope_type": kind, "factor": 2.0})
    with pytest.raises(UnsupportedModel, match="sequence length"):
        LlamaFamily(config)
    with pytest.raises(UnsupportedModel, match="not a Llama block"):
        LlamaFamily(SimpleNamespace(rope_scaling=None)).check(torch.nn.Linear(2, 2))
