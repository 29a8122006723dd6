"""A model that is a hash: cheap, and any wrong mask, position, move, stale or reused KV column changes the tokens.

A row's key hashes its input and position; its output hashes the sum of all keys that it sees, so it depends on exactly
the set that attention would see.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from bloombee_spec.choose import make_chooser
from bloombee_spec.kv.buffer import LaneView
from bloombee_spec.server.families.base import BlockFamily

POISON = float((1 << 51) + 12345)  # what columns hold that nobody may see
_U = np.uint64


def _mix(values: np.ndarray) -> np.ndarray:
    """Hash uint64 `values` to 52 bits, which a float64 holds exactly; overwrites them."""
    values *= _U(0xBF58476D1CE4E5B9)
    values ^= values >> _U(32)
    values *= _U(0x94D049BB133111EB)
    values >>= _U(12)
    return values


def _key(hidden: np.ndarray, position: np.ndarray, block: int) -> np.ndarray:
    return _mix(hidden * _U(0x9E3779B97F4A7C15) + position * _U(0xD1B54A32D192ED03) + _U(block + 1))


def _output(hidden: np.ndarray, position: np.ndarray, seen: np.ndarray, block: int) -> np.ndarray:
    mixed = hidden * _U(0xAEF17502108EF2D9) + seen * _U(0x9FB21C651E98DF25)
    return _mix(mixed + position * _U(0x2545F4914F6CDD1D) + _U(block))


def _rows(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.float64))[:, None]


class HashModel:
    """:param blocks: total number of blocks; hidden states are `[n, 1]` float64 that hold 52-bit integers"""

    def __init__(self, vocab: int, blocks: int, seed: int = 0):
        self.vocab, self.blocks, self.seed = vocab, blocks, seed
        self.config = SimpleNamespace(vocab_size=vocab, hidden_size=1)
        self._memo = {(): (np.zeros(blocks, _U), torch.empty(0))}

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        return _rows(_mix(np.asarray(tokens, _U) * _U(0x9E3779B97F4A7C15) + _U(self.seed * 977 + 1)))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[n, vocab]` between 0 and 4."""
        options = np.arange(self.vocab, dtype=_U) * _U(0xD1B54A32D192ED03)
        return torch.from_numpy(_mix(hidden.numpy().astype(_U) + options) / float(1 << 50)).float()

    def after(self, prefix: tuple[int, ...]) -> tuple[np.ndarray, torch.Tensor]:
        """Sums of keys per block, and `[vocab]` logits, after a non-empty prefix: one token at a time, without
        lanes."""
        if prefix not in self._memo:
            sums = self.after(prefix[:-1])[0].copy()
            hidden, position = self.embed(prefix[-1:])[:, 0].numpy().astype(_U), np.array([len(prefix) - 1], _U)
            for block in range(self.blocks):
                sums[block : block + 1] += _key(hidden, position, block)
                hidden = _output(hidden, position, sums[block : block + 1], block)
            self._memo[prefix] = sums, self.logits(_rows(hidden))[0]
        return self._memo[prefix]

    def greedy(self, prefix: Sequence[int]) -> int:
        return int(self.after(tuple(prefix))[1].argmax())

    def decode(
        self, tokens: Sequence[int], limit: int, stops: Sequence[int] = (), sampling: Any = None, row: int = 0
    ) -> list[int]:
        """What plain decoding generates: the reference for everything else."""
        choose = make_chooser(sampling or {}, row, self.vocab)
        text = list(tokens)
        while len(text) < limit and (len(text) == len(tokens) or text[-1] not in stops):
            text.append(choose(self.after(tuple(text))[1], text))
        return text[len(tokens) :]


class HashFamily(BlockFamily):
    """:param before: called before each forward; `within` at every point of a forward where something may arrive"""

    name = "hash"

    def __init__(self, model: HashModel, before: Callable[[], None], within: Callable[[], None]):
        super().__init__(model.config)
        self._before, self._within = before, within

    kv_heads = property(lambda self: 1)  # type: ignore[assignment]
    head_dim = property(lambda self: 1)  # type: ignore[assignment]

    def check(self, block: Any) -> None:
        pass

    def prepare(self, block: Any, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor]:
        self._before()
        return (positions,)

    def forward(
        self, index: int, block: Any, hidden: torch.Tensor, shared: Any, lanes: Sequence[LaneView]
    ) -> torch.Tensor:
        self._within()
        x, position = hidden[:, 0].numpy().astype(_U), shared[0].numpy().astype(_U)
        keys, out = _key(x, position, block), np.zeros_like(x)
        for lane in lanes:
            column, rows = lane.buffer[0, index, 0, :, 0].numpy(), lane.rows
            column[lane.columns.numpy()] = keys[rows]
            visible = column[lane.begin : lane.end].astype(_U)
            mask = np.ones((len(x[rows]), len(visible)), _U) if lane.mask is None else lane.mask.numpy().astype(_U)
            out[rows] = _output(x[rows], position[rows], mask @ visible, block)
        self._within()
        return _rows(out)
