"""Tiny random checkpoints on disk, one per family that the hosts serve, made so that greedy decoding is a real test.

The usual initialisation (every weight about 0.02) gives nearly flat logits and one token repeated for ever, on which a
wrong implementation looks right. Here each matrix keeps the variance of its input, attention is sharp enough to depend
on the context, and the logits have a standard deviation of about three: varied tokens with clear margins. The final
norm flips the sign of a random half of the features: with tied embeddings a token would otherwise mostly predict
itself.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

LOGIT_STD = 3.0
BRANCH_GAIN = 2.0  # what each attention or MLP output adds to the residual stream
ATTENTION_GAIN = 2.0  # of queries and keys: scores with a standard deviation of four
NORM_NOISE = 0.1
BIAS_STD = 0.1
_BRANCH_OUTPUTS = ("o_proj", "down_proj", "w2", "dense.weight", "dense_4h_to_h", "self_attention.dense")
_FINAL_NORMS = ("model.norm.weight", "transformer.ln_f.weight")
_QUERY_KEY = ("q_proj", "k_proj", "query_key_value")

# `original_max_position_embeddings` is short, so that the scaling matters within a short test.
ROPE_SCALING: dict[str, dict[str, Any] | None] = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


def make_toy_llama(
    path: Path | str,
    *,
    hidden_size: int = 96,
    num_heads: int = 6,
    num_kv_heads: int = 2,
    num_layers: int = 8,
    intermediate_size: int = 160,
    vocab_size: int = 211,
    rope_theta: float = 10_000.0,
    rope_scaling: dict[str, Any] | None = None,
    max_positions: int = 2048,
    attention_bias: bool = False,
    tied: bool = False,
    eos_token_id: int | None = None,
    seed: int = 0,
) -> Path:
    """A Llama checkpoint in fp32 with grouped-query attention and sizes that are no powers of two.

    :param rope_scaling: as in the configuration file, for example a value of `ROPE_SCALING`
    :param eos_token_id: None: nothing ends a generation early
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=hidden_size,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        num_hidden_layers=num_layers,
        intermediate_size=intermediate_size,
        vocab_size=vocab_size,
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        max_position_embeddings=max_positions,
        attention_bias=attention_bias,
        tie_word_embeddings=tied,
        **_special_ids(eos_token_id),
    )
    return _save(LlamaForCausalLM, config, path, seed)


def make_light_llama(path: Path | str, *, num_layers: int = 8, vocab_size: int = 1000, seed: int = 0) -> Path:
    """A Llama whose compute is negligible next to any network delay: for tests and benchmarks of scheduling."""
    return make_toy_llama(
        path,
        hidden_size=256,
        num_heads=8,
        num_kv_heads=4,
        num_layers=num_layers,
        intermediate_size=512,
        vocab_size=vocab_size,
        seed=seed,
    )


def make_toy_mixtral(
    path: Path | str,
    *,
    num_layers: int = 4,
    num_experts: int = 4,
    vocab_size: int = 211,
    sliding_window: int | None = None,
    seed: int = 0,
) -> Path:
    """A Mixtral checkpoint (mixture of experts, two per token, grouped-query attention)."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=96,
        num_attention_heads=6,
        num_key_value_heads=2,
        num_hidden_layers=num_layers,
        intermediate_size=112,
        num_local_experts=num_experts,
        num_experts_per_tok=2,
        vocab_size=vocab_size,
        max_position_embeddings=2048,
        sliding_window=sliding_window,
        **_special_ids(None),
    )
    return _save(MixtralForCausalLM, config, path, seed)


def make_toy_falcon(
    path: Path | str,
    *,
    num_layers: int = 4,
    vocab_size: int = 211,
    new_decoder_architecture: bool = True,
    multi_query: bool = True,
    parallel_attention: bool = True,
    alibi: bool = False,
    bias: bool = False,
    tied: bool = True,
    seed: int = 0,
) -> Path:
    """A Falcon checkpoint; by default the layout of the 40B model: grouped queries, two norms, rotary, tied."""
    from transformers import FalconConfig, FalconForCausalLM

    config = FalconConfig(
        hidden_size=96,
        num_attention_heads=6,
        num_kv_heads=2 if new_decoder_architecture else None,
        num_hidden_layers=num_layers,
        vocab_size=vocab_size,
        new_decoder_architecture=new_decoder_architecture,
        multi_query=multi_query,
        parallel_attn=parallel_attention,
        alibi=alibi,
        bias=bias,
        tie_word_embeddings=tied,
        max_position_embeddings=2048,
        **_special_ids(None),
    )
    return _save(FalconForCausalLM, config, path, seed)


def make_toy_bloom(path: Path | str, *, num_layers: int = 4, vocab_size: int = 211, seed: int = 0) -> Path:
    """A BLOOM checkpoint (ALiBi, biases everywhere, tied embeddings behind a norm).

    Parameters are named as in the published checkpoints, without the prefix "transformer.": the hosts look for those.
    """
    from transformers import BloomConfig, BloomForCausalLM

    config = BloomConfig(
        hidden_size=96, n_head=6, n_layer=num_layers, vocab_size=vocab_size, seq_length=2048, **_special_ids(None)
    )
    model = BloomForCausalLM(config).float()
    initialise(model, seed)
    model.transformer.save_pretrained(str(path), safe_serialization=True)
    model.config.architectures = ["BloomForCausalLM"]
    model.config.save_pretrained(str(path))
    return Path(path)


def _special_ids(eos_token_id: int | None) -> dict[str, int | None]:
    return {"bos_token_id": None, "eos_token_id": eos_token_id, "pad_token_id": None}


def _save(model_class: Any, config: Any, path: Path | str, seed: int) -> Path:
    model = model_class(config).float()
    initialise(model, seed)
    model.save_pretrained(str(path), safe_serialization=True)
    return Path(path)


def initialise(model: nn.Module, seed: int) -> None:
    """Overwrite all parameters of a causal LM; see the top of this file for what the scales are for."""
    generator = torch.Generator().manual_seed(seed)
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            values = BIAS_STD * noise if name.endswith("bias") else 1 + NORM_NOISE * noise
            flips = name.endswith(_FINAL_NORMS)
            parameter.data.copy_(values * noise.sign() if flips else values)
            continue
        scale = 1 / math.sqrt(parameter.shape[-1])
        if id(parameter) in embeddings or name.endswith("lm_head.weight"):
            scale *= LOGIT_STD
        elif any(part in name for part in _BRANCH_OUTPUTS):
            # GELU's mean is not zero: each block would add the same vector everywhere, and one token would win.
            noise -= noise.mean(dim=-1, keepdim=True)
            scale *= BRANCH_GAIN
        elif any(part in name for part in _QUERY_KEY):
            scale *= ATTENTION_GAIN
        parameter.data.copy_(scale * noise)
