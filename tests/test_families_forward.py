"""Mixtral, Falcon and BLOOM over tree rows, in fp32: against the host's own block (chains) and a dense masked
reference (trees)."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from family_helpers import ARENA, CASES, HIDDEN, Case, Tree, bloom_case, mixtral_case

from bloombee_spec.kv.buffer import LaneView, move_columns
from bloombee_spec.server.families import alibi
from bloombee_spec.server.families.alibi import alibi_slopes, attend_alibi

TOLERANCE = 1e-5
MULTI_QUERY = ("falcon-multi-query", "falcon-multi-query-alibi")  # the host's own block cannot compute these


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]()


@pytest.mark.parametrize("name", [name for name in CASES if name not in MULTI_QUERY])
def test_chains_equal_the_hosts_block(name: str) -> None:
    case = CASES[name]()
    case.family.check(case.block)
    hidden = torch.randn(20, HIDDEN)
    expected = case.chain(hidden)
    buffer = case.buffer()
    got = [case.prefill(buffer, hidden, *part) for part in ((0, 7), (7, 8), (8, 20))]
    assert (torch.cat(got) - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("seed", range(4))
def test_random_trees_equal_a_dense_masked_reference(case: Case, seed: int) -> None:
    """Prefix, then a random tree in two forwards; stale columns are poisoned and none reaches an output."""
    rng = random.Random(seed)
    tree = Tree.random(rng)
    n, prefix = len(tree.paths), tree.prefix
    hidden = torch.randn(prefix + n, HIDDEN)
    expected = case.dense(hidden, tree.positions, tree.sees)
    buffer = case.buffer()
    got = [case.prefill(buffer, hidden, 0, prefix)]
    cut = rng.randint(1, n - 1)
    for first, last in ((0, cut), (cut, n)):
        rows = slice(prefix + first, prefix + last)
        got.append(case.run(hidden[rows], tree.positions[rows], tree.view(buffer, first, last)))
    assert (torch.cat(got) - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("seed", range(3))
def test_a_committed_path_becomes_prefix(case: Case, seed: int) -> None:
    """The columns of a path move into the prefix, and what follows sees them at their positions."""
    tree = Tree.random(random.Random(seed))
    path = max(tree.paths, key=len)
    hidden = torch.randn(tree.prefix + len(tree.paths), HIDDEN)
    chain = torch.cat([hidden[: tree.prefix], hidden[[tree.prefix + i for i in path]], torch.randn(3, HIDDEN)])
    buffer = case.buffer()
    case.prefill(buffer, hidden, 0, tree.prefix)
    nodes = slice(tree.prefix, None)
    case.run(hidden[nodes], tree.positions[nodes], tree.view(buffer, 0, len(tree.paths)))
    move_columns(buffer, [(tree.columns[i], ARENA + tree.prefix + depth) for depth, i in enumerate(path)])
    n = len(chain)
    expected = case.dense(chain, list(range(n)), torch.ones(n, n, dtype=torch.bool).tril())
    got = case.prefill(buffer, chain, n - 3, n)
    assert (got - expected[-3:]).abs().max() < TOLERANCE


def test_lanes_of_one_forward_do_not_see_each_other(case: Case) -> None:
    trees = [Tree.random(random.Random(seed)) for seed in (5, 6)]
    buffers, hidden, views, alone = [], [], [], []
    for tree in trees:
        buffer, text = case.buffer(), torch.randn(tree.prefix, HIDDEN)
        case.prefill(buffer, text, 0, tree.prefix)
        rows = torch.randn(len(tree.paths), HIDDEN)
        views.append(tree.view(buffer, 0, len(rows), at=sum(len(other) for other in hidden)))
        alone.append(case.run(rows, tree.positions[tree.prefix :], tree.view(buffer.clone(), 0, len(rows))))
        buffers.append(buffer)
        hidden.append(rows)
    positions = [position for tree in trees for position in tree.positions[tree.prefix :]]
    together = case.run(torch.cat(hidden), positions, *views)
    assert (together - torch.cat(alone)).abs().max() < TOLERANCE


def test_rows_that_died_leave_the_shared_part_of_a_forward(case: Case) -> None:
    hidden = torch.randn(6, HIDDEN)
    kept = torch.tensor([0, 2, 5])
    whole = case.family.prepare(case.block, hidden, torch.arange(6) * 7)
    part = case.family.prepare(case.block, hidden[kept], kept * 7)
    for selected, expected in zip(case.family.select(whole, kept), part, strict=True):
        assert torch.equal(selected, expected)


def test_each_expert_computes_once_for_all_rows_of_all_lanes() -> None:
    case = mixtral_case(experts=3)
    calls: Counter[int] = Counter()
    rows = 0

    def count(expert: int) -> Any:
        def hook(_: Any, inputs: tuple[torch.Tensor, ...]) -> None:
            nonlocal rows
            calls[expert] += 1
            rows += len(inputs[0])

        return hook

    for index, expert in enumerate(case.block.block_sparse_moe.experts):
        expert.register_forward_pre_hook(count(index))
    n = 12
    lanes = [(slice(0, 5), 5), (slice(5, n), n - 5)]
    views = [
        LaneView.make(case.buffer(), part, np.arange(ARENA, ARENA + k), np.tri(k, dtype=bool), ARENA, ARENA + k)
        for part, k in lanes
    ]
    case.run(torch.randn(n, HIDDEN), [*range(5), *range(n - 5)], *views)
    assert calls == {0: 1, 1: 1, 2: 1} and rows == 2 * n


@pytest.mark.parametrize("heads", [1, 2, 6, 8, 12, 20, 71, 112])
def test_slopes_are_the_hosts(heads: int) -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    theirs = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    assert torch.allclose(alibi_slopes(heads), theirs, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("positions_of", "factor"), [(range(1000, 1024), 1.0), ([0, 255, 256, 257, 1023, 4099, 65_000, 131_073], 1 / 4096)]
)
def test_far_positions_are_exact_in_every_dtype(
    dtype: torch.dtype, positions_of: Sequence[int], factor: float
) -> None:
    """Keys are zero, so the weights are the bias's alone: a dense softmax of `slope * position` in this dtype."""
    positions = torch.tensor([*positions_of])
    n, heads = len(positions), 12
    slopes = alibi_slopes(heads) * factor
    buffer = torch.zeros(2, 1, heads + 1, n, 8, dtype=dtype)
    v = torch.randn(n, heads, 8).to(dtype)
    zeros = torch.zeros_like(v)
    view = LaneView.make(buffer, slice(0, n), np.arange(n), np.tri(n, dtype=bool), 0, n)
    got = attend_alibi(0, [view], zeros, zeros, v, positions, slopes)
    bias = (slopes[:, None, None] * positions).to(dtype).float().expand(heads, n, n)
    weights = bias.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -math.inf).softmax(-1)
    expected = torch.einsum("hnm,mhd->nhd", weights, v.float())
    assert (got.float() - expected).abs().max() < (1e-5 if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize("name", [name for name in CASES if name not in MULTI_QUERY])
def test_bf16_is_as_far_from_fp32_as_the_hosts_block(name: str) -> None:
    case = CASES[name]()
    hidden = torch.randn(40, HIDDEN)
    exact = case.chain(hidden)
    case.block.to(torch.bfloat16)
    rows = hidden.bfloat16()
    theirs = (case.chain(rows).float() - exact).abs()
    buffer = case.buffer(torch.bfloat16)
    got = torch.cat([case.prefill(buffer, rows, *part) for part in ((0, 25), (25, 40))])
    ours = (got.float() - exact).abs()
    assert got.dtype == torch.bfloat16
    assert ours.mean() < 1.5 * theirs.mean()


def test_biased_attention_in_small_chunks_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    case = bloom_case()
    hidden = torch.randn(15, HIDDEN)
    whole = case.prefill(case.buffer(), hidden, 0, 15)
    monkeypatch.setattr(alibi, "MASK_ELEMENTS", 15 * 6 * 2)
    assert torch.allclose(case.prefill(case.buffer(), hidden, 0, 15), whole, atol=1e-6)


def test_one_row_without_a_mask_sees_the_whole_slice() -> None:
    case = bloom_case()
    hidden = torch.randn(9, HIDDEN)
    buffer = case.buffer()
    case.prefill(buffer, hidden, 0, 8)
    view = LaneView.make(buffer, slice(0, 1), np.array([ARENA + 8]), None, ARENA, ARENA + 9)
    assert (case.run(hidden[8:], [8], view) - case.chain(hidden)[8:]).abs().max() < TOLERANCE
