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

ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # frequencies do not depend on the sequence length


class LlamaFamily(BlockFamily):
    name = "llama"

    def __init__(self, config: Any):
        super().__init__(config)
        scaling = getattr(config, "rope_scaling", None) or {}
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
        for path in (
            "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
            "self_attn.rotary_emb", "post_attention_layernorm", "mlp",
        ):  # fmt: skip
            try:
                block.get_submodule(path)
            except AttributeError:
                raise UnsupportedModel(
                    f"{type(block).__name__} has no {path}: not a Llama block that this version knows"
                ) from None

    def prepare(
        self, block: nn.Module, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = block.self_attn.rotary_emb(hidden[None, :, : self.head_dim], positions[None])  # type: ignore[union-attr, operator]
        return cos[0, :, None, :], sin[0, :, None, :]

    def forward(
        self, index: int, block: Any, hidden: torch.Tensor, shared: Any, lanes: Sequence[LaneView]
    ) -> torch.Tensor:
        attention, n = block.self_attn, hidden.shape[0]
        normed = block.input_layernorm(hidden)[None]  # [1, n, hidden]: quantised layers and adapters expect a batch
        q = attention.q_proj(normed).view(n, -1, self.head_dim)
        k = attention.k_proj(normed).view(n, self.kv_heads, self.head_dim)
        v = attention.v_proj(normed).view(n, self.kv_heads, self.head_dim)
        attended = attend(index, lanes, _rotate(q, *shared), _rotate(k, *shared), v)
        hidden = hidden + attention.o_proj(attended.reshape(1, n, -1))[0]
        return hidden + block.mlp(block.post_attention_layernorm(hidden)[None])[0]


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`x` `[n, heads, head_dim]`, `cos`/`sin` `[n, 1, head_dim]`; halves are paired as in the Llama checkpoints."""
    half = x.shape[-1] // 2
    swapped = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + swapped * sin
