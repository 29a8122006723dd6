"""Qwen3 over tree rows against transformers' own block. The reference host has no Qwen3, and its transformers version
neither: these run where transformers has it (4.51 or later)."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from family_helpers import HIDDEN, Case, Tree, additive, randomised

from bloombee_spec.server.families.base import UnsupportedModel
from bloombee_spec.server.families.qwen3 import Qwen3Family
from bloombee_spec.server.families.registry import family_for

TOLERANCE = 1e-5


def qwen3_case(**options: Any) -> Case:
    qwen3 = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    config = qwen3.Qwen3Config(
        hidden_size=HIDDEN, num_attention_heads=6, num_key_value_heads=2, head_dim=16, intermediate_size=40, **options
    )
    config._attn_implementation = "eager"
    block = randomised(qwen3.Qwen3DecoderLayer(config, 0))
    rotary = qwen3.Qwen3RotaryEmbedding(config)
    block._rotary_emb = rotary  # where BloomBee's main branch keeps it

    def dense(hidden: torch.Tensor, positions: list[int], sees: torch.Tensor) -> torch.Tensor:
        ids = torch.tensor([positions])
        out = block(
            hidden[None], attention_mask=additive(sees)[None, None], position_ids=ids,
            position_embeddings=rotary(hidden[None], ids),
        )  # fmt: skip
        return out[0][0] if isinstance(out, tuple) else out[0]

    def chain(hidden: torch.Tensor) -> torch.Tensor:
        n = len(hidden)
        return dense(hidden, list(range(n)), torch.ones(n, n, dtype=torch.bool).tril())

    return Case(family_for(config), block, chain, dense)


@pytest.mark.parametrize("options", [{}, {"attention_bias": True}])
def test_chains_equal_transformers_block(options: dict[str, Any]) -> None:
    case = qwen3_case(**options)
    case.family.check(case.block)
    hidden, buffer = torch.randn(20, HIDDEN), case.buffer()
    got = [case.prefill(buffer, hidden, *part) for part in ((0, 7), (7, 8), (8, 20))]
    assert (torch.cat(got) - case.chain(hidden)).abs().max() < TOLERANCE


@pytest.mark.parametrize("seed", range(4))
def test_random_trees_equal_a_dense_masked_reference(seed: int) -> None:
    case, tree = qwen3_case(), Tree.random(random.Random(seed))
    n, prefix = len(tree.paths), tree.prefix
    hidden, buffer = torch.randn(prefix + n, HIDDEN), case.buffer()
    got = [
        case.prefill(buffer, hidden, 0, prefix),
        case.run(hidden[prefix:], tree.positions[prefix:], tree.view(buffer, 0, n)),
    ]
    assert (torch.cat(got) - case.dense(hidden, tree.positions, tree.sees)).abs().max() < TOLERANCE


def test_a_sliding_window_is_refused() -> None:
    config = SimpleNamespace(model_type="qwen3", use_sliding_window=True, sliding_window=512)
    with pytest.raises(UnsupportedModel, match="sliding window of 512"):
        family_for(config)
    assert isinstance(family_for(SimpleNamespace(model_type="qwen3", use_sliding_window=False)), Qwen3Family)


def test_a_llama_block_is_refused() -> None:
    family = family_for(SimpleNamespace(model_type="qwen3"))
    with pytest.raises(UnsupportedModel, match="not a Qwen3 block"):
        family.check(torch.nn.Linear(2, 2))
