"""The KV rows of a drafter: a contiguous committed prefix, then candidates in the order of their computation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

try:
    from transformers.cache_utils import Cache
except ImportError as e:
    raise ImportError("model drafters need transformers 4.37 or newer; the suffix drafter works with any") from e


class TreeCache(Cache):  # type: ignore[misc]
    """Writes new rows behind the old ones in place, and drops any of them without recomputing the rest.

    Implements what attention layers ask of a cache in transformers 4.37 to 5.x; `transformers.DynamicCache` copies the
    whole past at each step, and how it is cropped depends on the version. One batch row. Layers may differ in shape.
    """

    def __init__(
        self,
    ) -> None:  # the parent's constructor takes other arguments in each version, and none that are needed
        self.rows = 0  # rows that are kept; the ones of a forward in progress lie behind them
        self.layers: list[Any] = []  # transformers 5 looks at it
        self._keys: list[torch.Tensor] = []  # per layer [1, kv_heads, capacity, head_dim]
        self._values: list[torch.Tensor] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append rows `[1, kv_heads, new, head_dim]` of one layer; returns all its rows, the new ones included."""
        end = self.rows + key_states.shape[2]
        if layer_idx == len(self._keys):
            self._keys.append(_room_for(key_states, end))
            self._values.append(_room_for(value_states, end))
        if self._keys[layer_idx].shape[2] < end:
            self._keys[layer_idx] = _moved(self._keys[layer_idx], self.rows, end)
            self._values[layer_idx] = _moved(self._values[layer_idx], self.rows, end)
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        keys[:, :, self.rows : end] = key_states
        values[:, :, self.rows : end] = value_states
        return keys[:, :, :end], values[:, :, :end]

    def advance(self, new: int) -> None:
        """Keep the rows that the last forward appended."""
        self.rows += new

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def keep(self, prefix: int, rows: Sequence[int]) -> None:
        """Drop all but the first `prefix` rows and the given ones, which follow the prefix in the given order."""
        if not 0 <= prefix <= self.rows or not all(prefix <= row < self.rows for row in rows):
            raise ValueError(f"cannot keep {prefix} rows and {list(rows)}: there are {self.rows}")
        if list(rows) != list(range(prefix, prefix + len(rows))):
            for buffers in (self._keys, self._values):
                for buffer in buffers:
                    index = torch.tensor(rows, device=buffer.device)
                    buffer[:, :, prefix : prefix + len(rows)] = buffer.index_select(2, index)
        self.rows = prefix + len(rows)

    def get_seq_length(self, layer_idx: int | None = 0) -> int:
        return self.rows

    def get_usable_length(self, new_seq_length: int, layer_idx: int | None = 0) -> int:
        return self.rows

    def get_max_length(self) -> int | None:
        return None

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return -1

    def get_mask_sizes(self, query_length: Any, layer_idx: int) -> tuple[int, int]:
        new = query_length if isinstance(query_length, int) else int(query_length.shape[0])
        return self.rows + new, 0

    def __len__(self) -> int:
        return len(self._keys)


def _room_for(states: torch.Tensor, rows: int) -> torch.Tensor:
    capacity = max(256, 1 << (rows - 1).bit_length())
    return states.new_zeros((1, states.shape[1], capacity, states.shape[3]))


def _moved(buffer: torch.Tensor, used: int, rows: int) -> torch.Tensor:
    larger = _room_for(buffer, rows)
    larger[:, :, :used] = buffer[:, :, :used]
    return larger
