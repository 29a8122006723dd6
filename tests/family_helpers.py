"""Blocks of every family with random weights, what is true of them by a dense computation, and the tree forward."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from host_helpers import host_module
from packaging.version import Version
from torch import nn

from bloombee_spec.kv.buffer import LaneView
from bloombee_spec.server.families.base import BlockFamily
from bloombee_spec.server.families.registry import family_for

ARENA, PREFIX = 24, 64
POISON = 1e30  # finite: a masked column has weight exactly zero
HIDDEN = 48
ADDITIVE_FALCON = Version(transformers.__version__) >= Version("4.36")  # before: True where nothing is seen

Dense = Callable[[torch.Tensor, list[int], torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """
    :param chain: the host's own block on `[n, hidden]` at positions 0, 1, ...
    :param dense: `[n, hidden]` at any positions, with a mask `[n, n]` of what each row sees
    """

    family: BlockFamily
    block: Any
    chain: Callable[[torch.Tensor], torch.Tensor]
    dense: Dense

    def buffer(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        size = (2, 1, self.family.kv_heads, ARENA + PREFIX, self.family.head_dim)
        return torch.full(size, POISON, dtype=dtype)

    @torch.inference_mode()
    def run(self, hidden: torch.Tensor, positions: list[int], *views: LaneView) -> torch.Tensor:
        shared = self.family.prepare(self.block, hidden, torch.tensor(positions))
        return self.family.forward(0, self.block, hidden, shared, views)

    def prefill(self, buffer: torch.Tensor, hidden: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Rows `start` to `stop` of a chain whose earlier rows are in the buffer."""
        columns = np.arange(ARENA + start, ARENA + stop)
        mask = np.tri(stop - start, stop, start, dtype=bool)
        view = LaneView.make(buffer, slice(0, stop - start), columns, mask, ARENA, ARENA + stop)
        return self.run(hidden[start:stop], list(range(start, stop)), view)


def bloom_case(heads: int = 6, **options: Any) -> Case:
    module = host_module("models.bloom.block")
    config = host_module("models.bloom.config").DistributedBloomConfig(hidden_size=HIDDEN, n_head=heads, **options)
    block = randomised(module.WrappedBloomBlock(config))

    def dense(hidden: torch.Tensor, positions: list[int], sees: torch.Tensor) -> torch.Tensor:
        alibi = module.build_alibi_tensor(torch.ones(1, max(positions) + 1), heads, hidden.dtype)[:, :, positions]
        return module.BloomBlock.forward(block, hidden[None], alibi, ~sees[None, None])[0][0]

    return Case(family_for(config), block, lambda hidden: block(hidden[None])[0][0], dense)


def mixtral_case(kv_heads: int = 2, experts: int = 4) -> Case:
    pytest.importorskip("transformers.models.mixtral", reason="this transformers version has no Mixtral")
    module = host_module("models.mixtral.block")
    config = host_module("models.mixtral.config").DistributedMixtralConfig(
        hidden_size=HIDDEN, num_attention_heads=6, num_key_value_heads=kv_heads, intermediate_size=40,
        num_local_experts=experts, num_experts_per_tok=2, max_position_embeddings=256,
    )  # fmt: skip
    config._attn_implementation = "eager"
    block = randomised(module.WrappedMixtralBlock(config, 0))

    def dense(hidden: torch.Tensor, positions: list[int], sees: torch.Tensor) -> torch.Tensor:
        mask, ids = additive(sees)[None, None], torch.tensor([positions])
        return module.MixtralDecoderLayer.forward(block, hidden[None], attention_mask=mask, position_ids=ids)[0][0]

    return Case(family_for(config), block, lambda hidden: block(hidden[None])[0][0], dense)


def falcon_case(heads: int = 6, **options: Any) -> Case:
    """The host's wrapper calls a function that newer transformers versions do not have; its parent class works."""
    module = host_module("models.falcon.block")
    config = host_module("models.falcon.config").DistributedFalconConfig(
        hidden_size=HIDDEN, num_attention_heads=heads, max_position_embeddings=256, **options
    )
    config._attn_implementation = "eager"
    block = randomised(module.OptimizedFalconDecoderLayer(config))
    reference = module.FalconDecoderLayer(config).eval()
    reference.load_state_dict(block.state_dict())

    def alibi(positions: list[int]) -> torch.Tensor | None:
        if not config.alibi:
            return None
        return module.build_alibi_tensor(torch.ones(1, max(positions) + 1), heads, torch.float32)[:, :, positions]

    def chain(hidden: torch.Tensor) -> torch.Tensor:
        n = len(hidden)
        unseen = ~torch.ones(n, n, dtype=torch.bool).tril()[None, None]
        return block(hidden[None], attention_mask=unseen, alibi=alibi(list(range(n))))[0][0]

    def dense(hidden: torch.Tensor, positions: list[int], sees: torch.Tensor) -> torch.Tensor:
        mask = (additive(sees) if ADDITIVE_FALCON else ~sees)[None, None]
        return reference(hidden[None], alibi(positions), mask, position_ids=torch.tensor([positions]))[0][0]

    return Case(family_for(config), block, chain, dense)


CASES: dict[str, Callable[[], Case]] = {
    "bloom": bloom_case,
    "bloom-8-heads": lambda: bloom_case(8),
    "bloom-residual-after-norm": lambda: bloom_case(apply_residual_connection_post_layernorm=True),
    "mixtral": mixtral_case,
    "mixtral-multi-query": lambda: mixtral_case(1, experts=7),
    "falcon-grouped": lambda: falcon_case(new_decoder_architecture=True, num_kv_heads=2),
    "falcon-grouped-alibi": lambda: falcon_case(new_decoder_architecture=True, num_kv_heads=3, alibi=True, bias=True),
    "falcon-multi-query": lambda: falcon_case(multi_query=True),
    "falcon-alibi": lambda: falcon_case(multi_query=False, alibi=True, bias=True),
    "falcon-multi-query-alibi": lambda: falcon_case(multi_query=True, alibi=True),
    "falcon-12-heads-alibi": lambda: falcon_case(12, multi_query=False, alibi=True),  # slopes that bfloat16 rounds
    "falcon-sequential": lambda: falcon_case(multi_query=False, parallel_attn=False),
}


def randomised(block: nn.Module) -> nn.Module:
    torch.manual_seed(sum(parameter.numel() for parameter in block.parameters()))
    for name, parameter in block.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.12)
        elif name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
        else:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return block.eval().requires_grad_(False)


def additive(sees: torch.Tensor) -> torch.Tensor:
    return torch.full(sees.shape, torch.finfo(torch.float32).min).masked_fill(sees, 0.0)


@dataclass(frozen=True)
class Tree:
    """A random tree behind a prefix; `sees` and `positions` cover the prefix rows and then the nodes."""

    prefix: int
    paths: list[list[int]]  # of each node, itself included
    columns: list[int]

    @classmethod
    def random(cls, rng: random.Random) -> Tree:
        paths: list[list[int]] = []
        for i in range(rng.randint(3, 16)):
            parent = rng.randrange(-1, i)
            paths.append([*(paths[parent] if parent >= 0 else []), i])
        return cls(rng.randint(1, 9), paths, rng.sample(range(ARENA), len(paths)))

    @property
    def positions(self) -> list[int]:
        return [*range(self.prefix), *(self.prefix + len(path) - 1 for path in self.paths)]

    @property
    def sees(self) -> torch.Tensor:
        n = len(self.paths)
        sees = np.zeros((self.prefix + n, self.prefix + n), dtype=bool)
        sees[: self.prefix, : self.prefix] = np.tri(self.prefix, dtype=bool)
        sees[self.prefix :, : self.prefix] = True
        for i, path in enumerate(self.paths):
            sees[self.prefix + i, [self.prefix + j for j in path]] = True
        return torch.from_numpy(sees)

    def view(self, buffer: torch.Tensor, first: int, last: int, at: int = 0) -> LaneView:
        """Nodes `first` to `last`, as rows from `at` on of a batch."""
        begin, end = min(self.columns), ARENA + self.prefix
        mask = np.zeros((last - first, end - begin), dtype=bool)
        mask[:, ARENA - begin :] = True
        for row in range(first, last):
            mask[row - first, [self.columns[j] - begin for j in self.paths[row]]] = True
        columns = np.array(self.columns[first:last])
        return LaneView.make(buffer, slice(at, at + last - first), columns, mask, begin, end)
