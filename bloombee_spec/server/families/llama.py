"""Llama 2/3, SmolLM2 and everything else with a Llama block: RMSNorm, rotary positions, grouped KV heads, gated MLP.

The block's own sub-modules are called, so quantised linear layers and LoRA adapters keep working.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from bloombee_spec.kv.buffer import LaneView, attend
from bloombee_spec.server.families.base import BlockFamily, UnsupportedModel
from bloombee_spec.server.families.rotary import rotary_factors, rotate

ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # frequencies do not depend on the sequence length


class LlamaFamily(BlockFamily):
    name = "llama"
    feed_forward_part = "mlp"
    rotary_part = "self_attn.rotary_emb"

    def __init__(self, config: Any):
        super().__init__(config)
        scaling = getattr(config, "rope_scaling", None) or getattr(config, "rope_parameters", None) or {}
        rope_type = scaling.get("rope_type", scaling.get("type", "default"))
        if rope_type not in ROPE_TYPES:
            raise UnsupportedModel(
                f"RoPE scaling {rope_type!r} changes with the sequence length, so keys that are already cached would "
                f"have to change too; supported: {', '.join(ROPE_TYPES)}"
            )

    @property
    def kv_heads(self) -> int:
        return int(getattr(self.config, "num_key_value_heads", None) or self.config.num_attention_heads)

    @property
    def head_dim(self) -> int:
        return int(
            getattr(self.config, "head_dim", None) or self.config.hidden_size // self.config.num_attention_heads
        )

    def check(self, block: nn.Module) -> None:
        self.require(
            block, "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
            self.rotary_part, "post_attention_layernorm", self.feed_forward_part,
        )  # fmt: skip

    def prepare(
        self, block: nn.Module, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return rotary_factors(block.get_submodule(self.rotary_part), hidden[None, :, : self.head_dim], positions)

    def forward(
        self, index: int, block: Any, hidden: torch.Tensor, shared: Any, lanes: Sequence[LaneView]
    ) -> torch.Tensor:
        attention, n = block.self_attn, hidden.shape[0]
        normed = block.input_layernorm(hidden)[None]  # [1, n, hidden]: quantised layers and adapters expect a batch
        q, k, v = self.project(attention, normed)
        attended = attend(index, lanes, rotate(q, *shared), rotate(k, *shared), v)
        hidden = hidden + attention.o_proj(attended.reshape(1, n, -1))[0]
        return hidden + self.feed_forward(block, block.post_attention_layernorm(hidden)[None])[0]

    def project(self, attention: Any, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries `[n, heads, head_dim]`, and keys and values `[n, kv_heads, head_dim]`, before rotation."""
        n = normed.shape[1]
        q = attention.q_proj(normed).view(n, -1, self.head_dim)
        k = attention.k_proj(normed).view(n, self.kv_heads, self.head_dim)
        v = attention.v_proj(normed).view(n, self.kv_heads, self.head_dim)
        return q, k, v

    def feed_forward(self, block: Any, normed: torch.Tensor) -> torch.Tensor:
        """`[1, n, hidden]` to `[1, n, hidden]`"""
        return block.mlp(normed)  # type: ignore[no-any-return]
