"""Whether this environment's quantised layers compute on this device: bitsandbytes 0.41 needs CUDA, 0.50 does not."""

from __future__ import annotations

from functools import cache

import torch


@cache
def quantised_layers_compute() -> bool:
    import bitsandbytes

    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        for layer in (
            bitsandbytes.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False),
            bitsandbytes.nn.LinearNF4(64, 64, bias=False),
        ):
            with torch.inference_mode():
                layer.to(device)(torch.ones(1, 1, 64, device=device))
    except (AssertionError, AttributeError, NameError, RuntimeError, TypeError):
        return False
    return True
