"""What a step costs behind a long prefix: one block, the host's own way and the plugin's, in turns.

    python -m benchmarks.long_prefix

The host's way is what its server does in a step: views of its cache go into its block, which joins them with the new
rows' keys and values, and the new ones are written back. The plugin's is its family's forward over the lane's buffer.
Both on the same random weights; outputs are compared. A tree's rows all see the prefix and their ancestors, which the
host can only compute as a chain. Medians over `--repeats`, in milliseconds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.report import aligned, write
from bloombee_spec.hosts.base import host_package
from bloombee_spec.kv.buffer import LaneView
from bloombee_spec.server.families.llama import LlamaFamily

SHAPES = {"SmolLM2-135M": (576, 9, 3, 1536), "Llama-3.2-1B": (2048, 32, 8, 8192)}  # hidden, heads, KV heads, MLP
ROWS = (1, 16, 256)
ARENA = 64


@dataclass(frozen=True)
class Cell:
    shape: str
    prefix: int
    rows: int
    host_ms: float
    plugin_ms: float
    tree_ms: float | None  # the same number of rows as a binary tree
    difference: float


class Block:
    """One block of the host, with a prefix of random keys and values in both caches."""

    def __init__(self, shape: str, length: int):
        hidden, heads, kv_heads, mlp = SHAPES[shape]
        package = host_package()
        models = import_module(f"{package}.models.llama")
        config = models.DistributedLlamaConfig(
            hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=kv_heads, intermediate_size=mlp,
            num_hidden_layers=1, vocab_size=32, max_position_embeddings=length + 2 * max(ROWS),
        )  # fmt: skip
        config._attn_implementation = "eager"
        torch.manual_seed(0)
        self.block = models.WrappedLlamaBlock(config).eval()
        self.family = LlamaFamily(config)
        self.hidden, dim, columns = hidden, hidden // heads, length + max(ROWS)
        backend = import_module(f"{package}.server.backend").TransformerBackend
        self._update = backend._update_cache_inplace
        keys, values = torch.randn(kv_heads, columns, dim), torch.randn(kv_heads, columns, dim)
        self.cache = (keys.transpose(1, 2)[None].contiguous(), values[None].contiguous())
        self.buffer = torch.zeros(2, 1, kv_heads, ARENA + columns, dim)
        self.buffer[0, 0, :, ARENA:], self.buffer[1, 0, :, ARENA:] = keys, values

    def host(self, rows: torch.Tensor, prefix: int) -> torch.Tensor:
        """`[n, hidden]` behind `prefix` tokens, as the host's `inference_step` has it."""
        keys, values = self.cache
        past = (keys.flatten(0, 1)[:, :, :prefix], values.flatten(0, 1)[:, :prefix])
        out, new = self.block.forward(rows[None], layer_past=past, use_cache=True)
        self._update(SimpleNamespace(), self.cache, new, prefix)
        return out[0]  # type: ignore[no-any-return]

    def plugin(self, rows: torch.Tensor, prefix: int) -> torch.Tensor:
        n = len(rows)
        mask = None if n == 1 else np.tri(n, prefix + n, prefix, dtype=bool)
        return self._forward(
            rows, np.arange(prefix, prefix + n), ARENA + np.arange(prefix, prefix + n), mask, prefix + n
        )

    def tree(self, rows: torch.Tensor, prefix: int) -> torch.Tensor:
        """Row 0 is the root, behind the prefix; rows 2i+1 and 2i+2 are children of row i, in the arena."""
        n = len(rows)
        sees = np.eye(n, dtype=bool)
        for row in range(1, n):
            sees[row] |= sees[(row - 1) // 2]
        mask = np.ones((n, ARENA + prefix + 1), dtype=bool)
        mask[:, :ARENA] = False
        mask[:, ARENA - n + 1 : ARENA] = sees[:, 1:]
        columns = np.array([ARENA + prefix, *range(ARENA - n + 1, ARENA)])
        positions = prefix + np.log2(np.arange(1, n + 1)).astype(int)
        return self._forward(rows, positions, columns, mask[:, ARENA - n + 1 :], prefix + 1, ARENA - n + 1)

    def _forward(
        self, rows: torch.Tensor, positions: Any, columns: Any, mask: Any, length: int, begin: int = ARENA
    ) -> torch.Tensor:
        view = LaneView.make(self.buffer, slice(0, len(rows)), columns, mask, begin, ARENA + length)
        shared = self.family.prepare(self.block, rows, torch.from_numpy(positions))
        return self.family.forward(0, self.block, rows, shared, [view])


def timed(ways: Sequence[Callable[[], torch.Tensor]], repeats: int) -> list[float]:
    """Medians in milliseconds; the ways take turns, so that what slows the machine slows all."""
    taken: list[list[float]] = [[] for _ in ways]
    for way in ways:
        way()
    for _ in range(repeats):
        for times, way in zip(taken, ways):
            started = time.perf_counter()
            way()
            times.append(1e3 * (time.perf_counter() - started))
    return [statistics.median(times) for times in taken]


@torch.inference_mode()
def measure(shape: str, prefixes: list[int], repeats: int) -> list[Cell]:
    cells, block = [], Block(shape, max(prefixes))
    for prefix in prefixes:
        for n in ROWS:
            rows = torch.randn(n, block.hidden)
            difference = float((block.host(rows, prefix) - block.plugin(rows, prefix)).abs().max())
            methods = [block.host, block.plugin, *([block.tree] if 1 < n <= ARENA else [])]
            ways = [partial(method, rows, prefix) for method in methods]
            host, plugin, *tree = timed(ways, repeats if n < 256 else max(3, repeats // 5))
            cells.append(Cell(shape, prefix, n, host, plugin, tree[0] if tree else None, difference))
            print(cells[-1], flush=True)
    return cells


def table(cells: list[Cell]) -> str:
    head = (
        "shape",
        "prefix",
        "rows",
        "host, ms",
        "plugin, ms",
        "as a tree, ms",
        "host / plugin",
        "largest difference",
    )
    rows = [
        (
            x.shape, x.prefix, x.rows, f"{x.host_ms:.2f}", f"{x.plugin_ms:.2f}",
            "" if x.tree_ms is None else f"{x.tree_ms:.2f}", f"{x.host_ms / x.plugin_ms:.2f}", f"{x.difference:.0e}",
        )
        for x in cells
    ]  # fmt: skip
    return aligned(head, rows, rule=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--prefixes", type=int, nargs="+", default=[256, 2048, 8192])
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--name", default="long-prefix")
    args = parser.parse_args()
    torch.set_num_threads(1)
    cells = [cell for shape in args.shapes for cell in measure(shape, args.prefixes, args.repeats)]
    print(f"\n{table(cells)}")
    print(f"\n{write(args.name, {'settings': vars(args), 'cells': [asdict(cell) for cell in cells]})}")
    return 0 if all(cell.difference < 1e-3 for cell in cells) else 1


if __name__ == "__main__":
    sys.exit(main())
