"""Expected accepted tokens of candidate trees: which nodes are worth a row, and what layers of them cover.

The chance that a node is on the committed path is the product of the acceptances along its path, and the expected
number of tokens of a lap is one plus the sum of these products over the tree.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bloombee_spec.plan.acceptance import Rates

NEGLIGIBLE = 1e-3  # layers that are reached less often than this end an expansion


@dataclass(frozen=True, slots=True)
class TreeNode:
    """:param parent: index in the same list, -1 for the root; :param depth: from 1; :param reach: chance of being
    committed
    """

    parent: int
    rank: int
    depth: int
    reach: float


def best_first(rates: Rates, size: int, depth: int) -> list[TreeNode]:
    """The `size` candidates with the largest reach within `depth` layers, best first (parents before children).

    A child's reach never exceeds its parent's and falls with the rank, so taking the best remaining candidate
    maximises the expected tokens for *every* size at once: it solves the recurrence of `sequoia_table` in O(size·log
    size), also when the acceptance depends on the depth.

    :param rates: `[depth][rank]`, each row falling; the last row holds for all deeper layers
    """
    chosen: list[TreeNode] = []
    heap: list[tuple[float, int, int, int, float]] = []  # (-reach, depth, parent, rank, reach of the parent)

    def offer(parent: int, parent_reach: float, at: int, rank: int) -> None:
        row = rates[min(at, len(rates)) - 1]
        if at <= depth and rank < len(row) and row[rank] > 0:
            heapq.heappush(heap, (-parent_reach * row[rank], at, parent, rank, parent_reach))

    offer(-1, 1.0, 1, 0)
    while heap and len(chosen) < size:
        negative, at, parent, rank, parent_reach = heapq.heappop(heap)
        chosen.append(TreeNode(parent, rank, at, -negative))
        offer(parent, parent_reach, at, rank + 1)
        offer(len(chosen) - 1, -negative, at + 1, 0)
    return chosen


def expected_tokens(nodes: Sequence[TreeNode]) -> float:
    """Tokens per lap of a tree, the verifier's own next token included."""
    return 1.0 + sum(node.reach for node in nodes)


def sequoia_table(acceptance: Sequence[float], size: int, depth: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Best expected tokens of a tree with at most `m` nodes (root included) and `l` layers (root included): `[size+1,
    depth+1]`.

    Sequoia's optimiser (NeurIPS'24): with `p[b]` the acceptance of the b-th sibling, whatever the depth, `T[m][l][b]
    = max_y T[y][l][b−1] + p[b]·T[m−y][l−1]`, where `T[m][l][b]` may give the root at most b children. The time that a
    size costs is not in here; with the WAN's `T_lap(m)` it is what `sizing` maximises.

    :param acceptance: p[b], falling
    """
    table = np.zeros((size + 1, depth + 1))
    table[1:, 1:] = 1.0
    for layer in range(2, depth + 1):
        below = table[:, layer - 1]
        best = table[:, 1].copy()  # b = 0: the root alone
        for chance in acceptance:
            more = best.copy()
            for m in range(2, size + 1):
                more[m] = max(best[m], float(np.max(best[1:m] + chance * below[m - 1 : 0 : -1])))
            best = more
        table[:, layer] = best
    return table


def beam_coverage(rates: Rates, width: int, depth: int) -> list[float]:
    """Chance that the committed path stays inside a tree grown layer by layer, `width` best nodes each: `[layers +
    1]`.

    Entry d is the chance that the first d tokens are all among the candidates; entry 0 is 1. Ends early where nothing
    is left.
    """
    coverage = [1.0]
    layer = np.ones(1)
    for at in range(1, depth + 1):
        row = rates[min(at, len(rates)) - 1]
        if width == 1:
            layer = layer * row[0]
        else:
            reach = np.outer(layer, np.asarray(row[:width])).ravel()
            layer = np.sort(reach[reach > 0])[: -width - 1 : -1]
        covered = float(layer.sum())
        coverage.append(min(covered, coverage[-1]))
        if covered < NEGLIGIBLE:
            break
    return coverage
