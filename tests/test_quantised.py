"""Quantised blocks where they compute: the plugin's tokens are those of the host's own decoding on the same servers.
Where they do not, `tests/test_swarm_variants.py` shows that they are refused with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from connect_helpers import connect
from host_helpers import BLOOMBEE_MAIN, host_module
from quantised_helpers import quantised_layers_compute
from swarm_helpers import PLAIN, VOCAB, Knowing, decode, prompts, respec

from benchmarks.inprocess_swarm import InProcessSwarm
from benchmarks.toy_models import make_toy_llama
from bloombee_spec.draft.scripted import Script
from bloombee_spec.server.config import SpecServerConfig

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.skipif(BLOOMBEE_MAIN, reason="this host quantises nothing on a CPU"),
    pytest.mark.skipif(not quantised_layers_compute(), reason="this version of bitsandbytes computes on CUDA only"),
]
NEW = 16
KINDS = ("INT8", "NF4")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_llama(
        tmp_path_factory.mktemp("quantised") / "model", num_layers=2, hidden_size=128, num_heads=8, vocab_size=VOCAB,
        intermediate_size=256,
    )  # fmt: skip


@pytest.fixture(scope="module")
def servers(model_path: Path) -> Iterator[InProcessSwarm]:
    from bloombee_spec.hosts.base import load_host

    kinds = iter(KINDS)

    def start(**arguments: Any) -> Any:
        kind = next(kinds)
        arguments.update(dht_prefix=kind, quant_type=host_module("utils.convert_block").QuantType[kind])
        return load_host().server_class(SpecServerConfig())(**arguments)

    with InProcessSwarm(model_path, [(0, 2)] * len(KINDS), server_factory=start) as swarm:
        yield swarm


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_tokens_as_the_hosts_own_decoding(servers: InProcessSwarm, model_path: Path, kind: str) -> None:
    texts = prompts(3, VOCAB, seed=60)
    with connect(model_path, servers.initial_peers, kind, PLAIN) as model:
        respec(model, mode="off", strict=False)
        expected = [decode(model, ids, NEW, do_sample=False) for ids in texts]
        assert len({tuple(target) for target in expected}) == len(texts) and model.last_stats is None
        known = [[*ids, *target] for ids, target in zip(texts, expected)]
        for changes in (
            {"speculate": False},
            {"speculate": True, "drafter": lambda: Knowing(known, VOCAB, Script(1.0))},
            {"speculate": True, "drafter": lambda: Knowing(known, VOCAB, Script(0.6, siblings=(0.2, 0.1), depth=6))},
        ):
            respec(model, mode="auto", strict=True, **changes)
            assert [decode(model, ids, NEW) for ids in texts] == expected, changes
            assert model.last_stats.mode == "ring"
        assert model.last_stats.hits > 0 and model.last_stats.misses > 0
