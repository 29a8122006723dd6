"""What waits and moves in a lane: rows, answers, batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from bloombee_spec.tree import Node
from bloombee_spec.wire.frames import PrefixFrame


@dataclass(eq=False, slots=True)
class Row:
    """One row to compute. `node` is None for a canonical row: its position is committed and its KV goes to the
    prefix."""

    id: int
    parent: int
    token: int
    position: int
    epoch: int
    column: int
    node: Node | None
    hidden: torch.Tensor | None = None  # [hidden]; None when this stage embeds the token
    started: bool = False
    computed: bool = False
    output: torch.Tensor | None = None  # [hidden], of a candidate that may yet be committed


@dataclass(frozen=True, slots=True)
class Answer:
    """End of a client frame in the queue: once everything before it left, `seq` is answered."""

    seq: int


@dataclass(eq=False, slots=True)
class LaneBatch:
    """What one forward computes for one lane: a prefix chunk, if any, then candidate rows."""

    rows: list[Row]
    epoch: int
    prefix: PrefixFrame | None = None
    prefix_rows: int = 0
    seq: int = 0
    columns: np.ndarray[Any, np.dtype[Any]] = field(
        default_factory=lambda: np.empty(0, dtype=np.int64)
    )  # [n] destination of each row
    mask: np.ndarray[Any, np.dtype[Any]] | None = None  # [n, end - begin]; None when every row sees the whole slice
    begin: int = 0  # the attended slice of the KV buffer
    end: int = 0

    @property
    def canonical(self) -> bool:
        return bool(self.rows) and self.rows[0].node is None


class RowLog(Protocol):
    """Output rows of committed tokens, by position. See `server.boundary`."""

    first: int
    end: int

    @property
    def row_bytes(self) -> int: ...

    def put(self, start: int, rows: torch.Tensor) -> None: ...

    def skip(self, end: int) -> None: ...

    def truncate(self, end: int) -> None: ...

    def read(self, start: int, end: int) -> torch.Tensor: ...

    def close(self) -> None: ...
