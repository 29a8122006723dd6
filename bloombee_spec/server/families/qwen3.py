"""Qwen3 (dense): Llama's block with a norm over each head of queries and keys. Hosts that know it keep the rotary
module at the block."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bloombee_spec.server.families.base import UnsupportedModel
from bloombee_spec.server.families.llama import LlamaFamily


class Qwen3Family(LlamaFamily):
    name = "qwen3"
    rotary_part = "_rotary_emb"

    def __init__(self, config: Any):
        super().__init__(config)
        if getattr(config, "use_sliding_window", False):
            raise UnsupportedModel(
                f"attention over a sliding window of {config.sliding_window} positions: here a row sees all of its "
                f"ancestors"
            )

    def check(self, block: nn.Module) -> None:
        super().check(block)
        self.require(block, "self_attn.q_norm", "self_attn.k_norm")

    def project(self, attention: Any, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = super().project(attention, normed)
        return attention.q_norm(q), attention.k_norm(k), v
