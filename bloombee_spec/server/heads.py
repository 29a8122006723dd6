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
from bloombee_spec.server.families.registry import family_for

logger = get_logger(__name__)

EMBEDDING = "model.embed_tokens.weight"
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_SINGLE = ("model.safetensors", "pytorch_model.bin")


class Heads:
    """Embeddings and/or norm + LM head of a checkpoint, tied or not, called as the model's family says.

    :param embed: load the token embeddings
    :param lm_head: load the final norm and the LM head
    :raises UnsupportedModel: no family knows the model, or the checkpoint does not have what it says
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
        layout = family_for(config).heads
        head = layout.embedding if getattr(config, "tie_word_embeddings", False) else layout.lm_head
        norms = _norm_names(layout.norm, layout.layer_norm) if lm_head else []
        embedding_norms = _norm_names(layout.embedding_norm, True) if embed and layout.embedding_norm else []
        tables = ([layout.embedding] if embed else []) + ([head] if lm_head else [])
        names = list(dict.fromkeys(tables + norms + embedding_norms))
        tensors = {name: t.to(device=device, dtype=dtype) for name, t in load_tensors(model, names, **hub).items()}
        for name, tensor in tensors.items():
            expected = (config.vocab_size, config.hidden_size) if name in tables else (config.hidden_size,)
            if tuple(tensor.shape) != expected:
                raise UnsupportedModel(f"{name} has shape {tuple(tensor.shape)}, the config says {expected}")
        self.vocab_size = int(config.vocab_size)
        self._eps = layout.eps
        self._embedding = tensors[layout.embedding] if embed else None
        self._embedding_norm = [tensors[name] for name in embedding_norms]
        self._norm = [tensors[name] for name in norms]
        self._lm_head = tensors[head] if lm_head else None

    @property
    def embeds(self) -> bool:
        return self._embedding is not None

    @property
    def verifies(self) -> bool:
        return self._lm_head is not None

    def embed(self, tokens: list[int]) -> torch.Tensor:
        """:returns: `[n, hidden]`"""
        assert self._embedding is not None, "this stage has no embeddings"
        embedded = self._embedding[torch.tensor(tokens, device=self._embedding.device)]
        return self._apply(self._embedding_norm, embedded) if self._embedding_norm else embedded

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[n, hidden]` before the final norm to `[n, vocab]` in fp32."""
        assert self._lm_head is not None, "this stage has no LM head"
        return F.linear(self._apply(self._norm, hidden), self._lm_head).float()

    def _apply(self, norm: list[torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        """:param norm: weight of an RMSNorm, or weight and bias of a LayerNorm"""
        if len(norm) == 1:
            return rms_norm(hidden, norm[0], self._eps)
        return F.layer_norm(hidden, norm[0].shape, norm[0], norm[1], self._eps)


def _norm_names(module: str, layer_norm: bool) -> list[str]:
    return [f"{module}.weight", f"{module}.bias"] if layer_norm else [f"{module}.weight"]


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
