"""BLOOM: ALiBi, one key per query, biases everywhere, a norm behind the embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from bloombee_spec.kv.buffer import LaneView
from bloombee_spec.server.families.alibi import POSITION_HEADS, alibi_slopes, attend_alibi
from bloombee_spec.server.families.base import BlockFamily, HeadLayout
from bloombee_spec.server.families.fused import split_fused


class BloomFamily(BlockFamily):
    name = "bloom"

    def __init__(self, config: Any):
        super().__init__(config)
        self._heads = int(config.num_attention_heads)
        self._slopes = alibi_slopes(self._heads)

    @property
    def kv_heads(self) -> int:
        return self._heads + POSITION_HEADS

    @property
    def head_dim(self) -> int:
        return int(self.config.hidden_size // self._heads)

    @property
    def heads(self) -> HeadLayout:
        """As in the published checkpoints, which have no prefix `transformer.`; the host reads no other."""
        return HeadLayout(
            "word_embeddings.weight", "ln_f", float(self.config.layer_norm_epsilon),
            embedding_norm="word_embeddings_layernorm", layer_norm=True,
        )  # fmt: skip

    def check(self, block: nn.Module) -> None:
        self.require(
            block, "input_layernorm", "self_attention.query_key_value", "self_attention.dense",
            "post_attention_layernorm", "mlp",
        )  # fmt: skip

    def prepare(self, block: nn.Module, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor]:
        self._slopes = self._slopes.to(positions.device)
        return (positions,)

    def forward(
        self, index: int, block: Any, hidden: torch.Tensor, shared: Any, lanes: Sequence[LaneView]
    ) -> torch.Tensor:
        attention, n = block.self_attention, hidden.shape[0]
        after_norm = bool(self.config.apply_residual_connection_post_layernorm)
        normed = block.input_layernorm(hidden)
        q, k, v = split_fused(attention.query_key_value(normed[None])[0], self._heads, self.head_dim)
        attended = attend_alibi(index, lanes, q, k, v, shared[0], self._slopes).reshape(1, n, -1)
        hidden = (normed if after_norm else hidden) + attention.dense(attended)[0]
        normed = block.post_attention_layernorm(hidden)[None]
        return block.mlp(normed, normed if after_norm else hidden[None])[0]  # type: ignore[no-any-return]
