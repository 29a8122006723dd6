"""The family seam: what a model family's block does to tree rows. A family is one file that knows the names inside its
block, and the names of the model's two ends in its checkpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bloombee_spec.kv.buffer import LaneView


class UnsupportedModel(ValueError):
    """This model, or this way of loading it, cannot be served by the plugin; the host still serves it."""


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """What the model's two ends are called in its checkpoints.

    :param norm: module name of the final norm
    :param eps: of all norms named here
    :param embedding_norm: module name of a LayerNorm behind the embeddings, or None
    :param layer_norm: the final norm is a LayerNorm with a bias; else an RMSNorm without
    :param lm_head: only read when the config does not tie it to the embeddings
    """

    embedding: str
    norm: str
    eps: float
    embedding_norm: str | None = None
    layer_norm: bool = False
    lm_head: str = "lm_head.weight"


class BlockFamily(ABC):
    """Forward of rows at given positions through one block, attending through the lanes' KV buffers.

    :param config: the host's block config
    :raises UnsupportedModel: the config asks for something that the forward does not implement
    """

    name: str

    def __init__(self, config: Any):
        self.config = config

    @property
    @abstractmethod
    def kv_heads(self) -> int:
        """Heads per column of a lane's KV buffer: the block's own, and what else `forward` keeps there."""

    @property
    @abstractmethod
    def head_dim(self) -> int: ...

    @property
    def heads(self) -> HeadLayout:
        """Llama's, unless a family says otherwise."""
        return HeadLayout("model.embed_tokens.weight", "model.norm", float(self.config.rms_norm_eps))

    @abstractmethod
    def check(self, block: nn.Module) -> None:
        """:raises UnsupportedModel: the block lacks a part that `forward` uses"""

    @abstractmethod
    def prepare(self, block: nn.Module, hidden: torch.Tensor, positions: torch.Tensor) -> Any:
        """What all blocks of a span share in one forward (e.g. rotary factors). `hidden` `[n, hidden]`, `positions`
        `[n]`."""

    @abstractmethod
    def forward(
        self, index: int, block: nn.Module, hidden: torch.Tensor, shared: Any, lanes: Sequence[LaneView]
    ) -> torch.Tensor:
        """`[n, hidden]` to `[n, hidden]` through one block; `index` is the block's place in the KV buffers."""

    def select(self, shared: Any, kept: torch.Tensor) -> Any:
        """`shared` for the rows `kept` only."""
        return None if shared is None else tuple(part[kept] for part in shared)

    def require(self, block: nn.Module, *parts: str) -> None:
        """:raises UnsupportedModel: the block lacks one of these sub-modules (dotted names)"""
        for part in parts:
            try:
                block.get_submodule(part)
            except AttributeError:
                known = f"not a {self.name.capitalize()} block that this version knows"
                raise UnsupportedModel(f"{type(block).__name__} has no {part}: {known}") from None
