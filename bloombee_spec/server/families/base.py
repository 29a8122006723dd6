"""The family seam: what a model family's block does to tree rows. A family is one file that knows the names inside its
block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from bloombee_spec.kv.buffer import LaneView


class UnsupportedModel(ValueError):
    """This model, or this way of loading it, cannot be served by the plugin; the host still serves it."""


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
    def kv_heads(self) -> int: ...

    @property
    @abstractmethod
    def head_dim(self) -> int: ...

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
