"""The tree forward against the host's own block, one path of the tree at a time, on every host."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from test_llama_forward import ARENA, SCALINGS, TOLERANCE, make, poisoned, run

from bloombee_spec.server.families.llama import LlamaFamily


@pytest.mark.parametrize("seed", range(4))
def test_each_row_of_a_tree_is_the_last_row_of_its_path(seed: int) -> None:
    rng = random.Random(seed)
    config, block = make(*rng.choice(((6, 2, 16), (4, 1, 8))), SCALINGS[rng.choice(list(SCALINGS))])
    family = LlamaFamily(config)
    prefix, nodes = rng.randint(1, 9), rng.randint(3, 12)
    paths: list[list[int]] = []
    for i in range(nodes):
        parent = rng.randrange(-1, i)
        paths.append([*(paths[parent] if parent >= 0 else []), i])
    hidden = torch.randn(prefix + nodes, config.hidden_size)
    with torch.inference_mode():
        chains = [hidden[[*range(prefix), *[prefix + j for j in path]]] for path in paths]
        expected = torch.stack([block(chain[None])[0][0, -1] for chain in chains])
    columns = rng.sample(range(ARENA), nodes)
    begin, end, buffer = min(columns), ARENA + prefix, poisoned(family)
    run(family, block, buffer, hidden[:prefix], list(range(prefix)), [ARENA + p for p in range(prefix)],
        np.tri(prefix, dtype=bool), ARENA, end)  # fmt: skip
    mask = np.zeros((nodes, end - begin), dtype=bool)
    mask[:, ARENA - begin :] = True
    for row, path in enumerate(paths):
        mask[row, [columns[j] - begin for j in path]] = True
    positions = [prefix + len(path) - 1 for path in paths]
    got = run(family, block, buffer, hidden[prefix:], positions, columns, mask, begin, end)
    assert (got - expected).abs().max() < TOLERANCE
