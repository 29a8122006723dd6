"""Falcon: old and new decoder architecture, multi-query or grouped KV heads, rotary positions or ALiBi, attention and
MLP in parallel or in sequence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from bloombee_spec.kv.buffer import LaneView, attend
from bloombee_spec.server.families.alibi import POSITION_HEADS, alibi_slopes, attend_alibi
from bloombee_spec.server.families.base import BlockFamily, HeadLayout, UnsupportedModel
from bloombee_spec.server.families.fused import split_fused
from bloombee_spec.server.families.rotary import factors_at, inverse_frequencies, rotate


class FalconFamily(BlockFamily):
    name = "falcon"

    def __init__(self, config: Any):
        super().__init__(config)
        scaling = getattr(config, "rope_scaling", None) or {}  # transformers 5 also keeps what scales nothing there
        if scaling.get("rope_type", scaling.get("type", "default")) != "default" and not config.alibi:
            raise UnsupportedModel(f"RoPE scaling {scaling!r}, which the host's Falcon block ignores")
        heads = int(config.num_attention_heads)
        if config.new_decoder_architecture:
            self._kv_heads = int(config.num_kv_heads)
        else:
            self._kv_heads = 1 if config.multi_query else heads
        self._frequencies = inverse_frequencies(_theta(config), self.head_dim)
        self._slopes = alibi_slopes(heads).bfloat16().float()  # rounded as in the host's block

    @property
    def kv_heads(self) -> int:
        return self._kv_heads + (POSITION_HEADS if self.config.alibi else 0)

    @property
    def head_dim(self) -> int:
        return int(self.config.hidden_size // self.config.num_attention_heads)

    @property
    def heads(self) -> HeadLayout:
        eps = float(self.config.layer_norm_epsilon)
        return HeadLayout("transformer.word_embeddings.weight", "transformer.ln_f", eps, layer_norm=True)

    def check(self, block: nn.Module) -> None:
        norms = ["ln_attn", "ln_mlp"] if hasattr(block, "ln_attn") else ["input_layernorm"]
        if not (self.config.parallel_attn or self.config.new_decoder_architecture):
            norms.append("post_attention_layernorm")
        self.require(block, *norms, "self_attention.query_key_value", "self_attention.dense", "mlp")
        for name, own in block.named_buffers():
            if name.endswith("inv_freq") and not torch.allclose(own.cpu().float(), self._frequencies, rtol=1e-2):
                raise UnsupportedModel(f"the host's block ignores the config's rope_theta ({_theta(self.config):g})")

    def prepare(self, block: nn.Module, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.config.alibi:
            self._slopes = self._slopes.to(positions.device)
            return (positions,)
        self._frequencies = self._frequencies.to(positions.device)
        return factors_at(self._frequencies, positions, hidden.dtype)

    def forward(
        self, index: int, block: Any, hidden: torch.Tensor, shared: Any, lanes: Sequence[LaneView]
    ) -> torch.Tensor:
        attention, n = block.self_attention, hidden.shape[0]
        two_norms = hasattr(block, "ln_attn")
        normed = (block.ln_attn if two_norms else block.input_layernorm)(hidden)[None]
        q, k, v = split_fused(attention.query_key_value(normed)[0], self._kv_heads, self.head_dim)
        if self.config.alibi:
            attended = attend_alibi(index, lanes, q, k, v, shared[0], self._slopes, scale=1 / math.sqrt(self.head_dim))
        else:
            attended = attend(index, lanes, rotate(q, *shared), rotate(k, *shared), v)
        attended = attention.dense(attended.reshape(1, n, -1))[0]
        if two_norms:
            normed = block.ln_mlp(hidden)[None]
        elif not (self.config.parallel_attn or self.config.new_decoder_architecture):
            normed = block.post_attention_layernorm(hidden + attended)[None]
        return hidden + (block.mlp(normed)[0] + attended)


def _theta(config: Any) -> float:
    parameters = getattr(config, "rope_parameters", None) or {}  # where transformers 5 keeps it
    return float(getattr(config, "rope_theta", None) or parameters.get("rope_theta", 10_000.0))
