"""In bf16 the tree forward rounds no worse than the host's own blocks do: both against the same weights in fp32."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from host_helpers import host_module

from benchmarks.toy_models import make_toy_llama
from bloombee_spec.kv.buffer import KVShape, LaneView
from bloombee_spec.server.families.llama import LlamaFamily

BLOCKS, LENGTH, ARENA = 2, 40, 8
STEPS = [(0, 20), *[(i, i + 1) for i in range(20, LENGTH)]]  # a prefill, then single rows


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[Any]]:
    load_pretrained_block = host_module("server.from_pretrained").load_pretrained_block
    path: Path = make_toy_llama(tmp_path_factory.mktemp("bf16") / "model", num_layers=BLOCKS)
    config = host_module("utils.auto_config").AutoDistributedConfig.from_pretrained(str(path))
    return config, [load_pretrained_block(str(path), i, config=config, torch_dtype=torch.bfloat16) for i in range(2)]


def through_host(blocks: Sequence[Any], rows: torch.Tensor) -> torch.Tensor:
    past: list[Any] = [None] * len(blocks)
    outputs = []
    for start, stop in STEPS:
        hidden = rows[None, start:stop]
        for i, block in enumerate(blocks):
            hidden, past[i] = block(hidden, layer_past=past[i], use_cache=True)[:2]
        outputs.append(hidden[0])
    return torch.cat(outputs).float()


def through_tree(config: Any, blocks: Sequence[Any], rows: torch.Tensor) -> torch.Tensor:
    family = LlamaFamily(config)
    shape = KVShape(len(blocks), family.kv_heads, family.head_dim, ARENA, LENGTH)
    buffer = torch.zeros(shape.size, dtype=rows.dtype)
    outputs = []
    for start, stop in STEPS:
        hidden, n = rows[start:stop], stop - start
        columns, mask = np.arange(ARENA + start, ARENA + stop), np.tri(n, stop, start, dtype=bool)
        view = LaneView.make(buffer, slice(0, n), columns, mask, ARENA, ARENA + stop)
        shared = family.prepare(blocks[0], hidden, torch.arange(start, stop))
        for i, block in enumerate(blocks):
            hidden = family.forward(i, block, hidden, shared, [view])
        outputs.append(hidden)
    return torch.cat(outputs).float()


@torch.inference_mode()
def test_rounding_errors_are_no_larger_than_the_hosts(blocks: tuple[Any, list[Any]]) -> None:
    config, rounded = blocks
    exact = [copy.deepcopy(block).float() for block in rounded]
    generator = torch.Generator().manual_seed(0)
    of_host, of_tree = [], []
    for _ in range(20):
        rows = torch.randn(LENGTH, config.hidden_size, generator=generator).to(torch.bfloat16)
        truth = through_host(exact, rows.float())
        of_host.append(float((through_host(rounded, rows) - truth).pow(2).mean()))
        of_tree.append(float((through_tree(config, rounded, rows) - truth).pow(2).mean()))
        assert (through_tree(config, exact, rows.float()) - truth).abs().max() < 1e-4
    assert sum(of_tree) < 1.3 * sum(of_host)  # of mean squares
