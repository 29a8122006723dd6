"""Mixtral: Llama's attention, and a sparse mixture of experts instead of the MLP.

All rows of a forward, of all lanes and all branches, go through the block's own router at once, so each expert's
weights are read once for all rows that chose it.
"""

from __future__ import annotations

from typing import Any

import torch

from bloombee_spec.server.families.base import UnsupportedModel
from bloombee_spec.server.families.llama import LlamaFamily


class MixtralFamily(LlamaFamily):
    name = "mixtral"
    feed_forward_part = "block_sparse_moe"

    def __init__(self, config: Any):
        super().__init__(config)
        window = getattr(config, "sliding_window", None)
        if window is not None:
            raise UnsupportedModel(
                f"attention over a sliding window of {window} positions: here a row sees all of its ancestors"
            )

    def feed_forward(self, block: Any, normed: torch.Tensor) -> torch.Tensor:
        out = block.block_sparse_moe(normed)
        return out[0] if isinstance(out, tuple) else out  # some versions return the router's logits too
