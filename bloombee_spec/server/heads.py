"""The model's two ends at a server: token embeddings at the first stage, final norm and LM head at the last one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from hivemind.utils.logging import get_logger
from safetensors import safe_open
from transformers.utils import cached_file

from bloombee_spec.server.families.base import UnsupportedModel

logger = get_logger(__name__)

EMBEDDING, NORM, LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_SINGLE = ("model.safetensors", "pytorch_model.bin")


class Heads:
    """Embeddings and/or norm + LM head of a checkpoint with the Llama layout, tied or not.

    :param embed: load the token embeddings
    :param lm_head: load the final norm and the LM head
    """

    def __init__(
        self,
        model: str,
        config: Any,
        *,
        embed: bool,
        lm_head: bool,
        dtype: torch.dtype,
        device: torch.device,
        **hub: Any,
    ):
        tied = bool(getattr(config, "tie_word_embeddings", False))
        names = ([EMBEDDING] if embed or (lm_head and tied) else []) + ([NORM] if lm_head else [])
        if lm_head and not tied:
            names.append(LM_HEAD)
        tensors = {name: t.to(device=device, dtype=dtype) for name, t in load_tensors(model, names, **hub).items()}
        expected = {EMBEDDING: (config.vocab_size, config.hidden_size), NORM: (config.hidden_size,)}
        expected[LM_HEAD] = expected[EMBEDDING]
        for name, tensor in tensors.items():
            if tuple(tensor.shape) != expected[name]:
                raise UnsupportedModel(f"{name} has shape {tuple(tensor.shape)}, the config says {expected[name]}")
        self.vocab_size = int(config.vocab_size)
        self._eps = float(config.rms_norm_eps)
        self._embedding = tensors[EMBEDDING] if embed else None
        self._norm = tensors.get(NORM)
        self._lm_head = tensors.get(EMBEDDING if tied else LM_HEAD) if lm_head else None

    @property
    def embeds(self) -> bool:
        return self._embedding is not None

    @property
    def verifies(self) -> bool:
        return self._lm_head is not None

    def embed(self, tokens: list[int]) -> torch.Tensor:
        """:returns: `[n, hidden]`"""
        assert self._embedding is not None, "this stage has no embeddings"
        return self._embedding[torch.tensor(tokens, device=self._embedding.device)]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[n, hidden]` before the final norm to `[n, vocab]` in fp32."""
        assert self._lm_head is not None and self._norm is not None, "this stage has no LM head"
        return F.linear(rms_norm(hidden, self._norm, self._eps), self._lm_head).float()


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = hidden.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(hidden.dtype)


def load_tensors(model: str, names: list[str], **hub: Any) -> dict[str, torch.Tensor]:
    """Only the named tensors of a checkpoint (directory or hub name), from safetensors or PyTorch files, sharded or
    not.

    :raises UnsupportedModel: the checkpoint cannot be found, or lacks a tensor
    """
    files: dict[str, str] = {}
    for index in _INDEXES:
        path = _find(model, index, **hub)
        if path is not None:
            weight_map = json.loads(Path(path).read_text())["weight_map"]
            files = {name: weight_map[name] for name in names if name in weight_map}
            break
    else:
        single = next((name for name in _SINGLE if _find(model, name, **hub) is not None), None)
        if single is None:
            raise UnsupportedModel(f"no checkpoint found for {model!r}: looked for {', '.join(_SINGLE + _INDEXES)}")
        files = dict.fromkeys(names, single)
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(set(files.values())):
        path = _find(model, file, **hub)
        wanted = [name for name, holder in files.items() if holder == file]
        if path is None:
            raise UnsupportedModel(f"the checkpoint index of {model!r} names {file}, which is not there")
        if file.endswith(".safetensors"):
            with safe_open(path, framework="pt") as handle:
                tensors.update({name: handle.get_tensor(name) for name in wanted if name in handle.keys()})  # noqa: SIM118
        else:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            tensors.update({name: state[name] for name in wanted if name in state})
    missing = [name for name in names if name not in tensors]
    if missing:
        raise UnsupportedModel(f"the checkpoint of {model!r} has no {', '.join(missing)}")
    return tensors


def _find(model: str, file: str, **hub: Any) -> str | None:
    try:
        path: str | None = cached_file(
            model,
            file,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            **hub,
        )
    except OSError:
        return None
    return path
