"""The promise for every family: two plugin servers of a tiny checkpoint, the same tokens as local transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from connect_helpers import connect
from host_helpers import OLD_PETALS, not_on_old_petals
from swarm_helpers import (
    PLAIN,
    VOCAB,
    adapter_errors,
    assert_exact_in_every_way,
    decode,
    prompts,
    reference,
    respec,
)
from transformers import AutoModelForCausalLM

from benchmarks.inprocess_swarm import InProcessSwarm
from benchmarks.toy_models import make_toy_bloom, make_toy_falcon, make_toy_mixtral
from bloombee_spec import SpecConfig
from bloombee_spec.client.model import UnsupportedCall
from bloombee_spec.draft.scripted import Script
from bloombee_spec.server.config import SpecServerConfig

pytestmark = pytest.mark.swarm
NEW = 20
BLOCKS = 3
TREE = Script(0.6, siblings=(0.2, 0.1), depth=6)
SERVED: dict[str, Callable[[Path], Path]] = {
    "mixtral": lambda path: make_toy_mixtral(path, num_layers=BLOCKS),
    "falcon": lambda path: make_toy_falcon(path, num_layers=BLOCKS),
    "falcon-multi-query": lambda path: make_toy_falcon(path, num_layers=BLOCKS, new_decoder_architecture=False),
    "falcon-alibi": lambda path: make_toy_falcon(
        path, num_layers=BLOCKS, new_decoder_architecture=False, multi_query=False, alibi=True, bias=True, tied=False
    ),
    "bloom": lambda path: make_toy_bloom(path, num_layers=BLOCKS),
}
if OLD_PETALS:  # it has no Mixtral
    del SERVED["mixtral"]
WINDOW = "mixtral-window"  # of 4,096 positions: the plugin refuses it, the host serves it


class Families:
    def __init__(self, swarm: InProcessSwarm, paths: dict[str, Path], log: list[str]) -> None:
        self.swarm, self.paths, self.log = swarm, paths, log

    def client(self, name: str, spec: SpecConfig) -> AbstractContextManager[Any]:
        return connect(self.paths[name], self.swarm.initial_peers, name, spec)

    def local(self, name: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.paths[name], torch_dtype=torch.float32)


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Families]:
    from bloombee_spec.hosts.base import load_host

    folder = tmp_path_factory.mktemp("families")
    paths = {name: make(folder / name) for name, make in SERVED.items()}
    described = [(name, part) for name in SERVED for part in ((0, 1), (1, BLOCKS))]
    if not OLD_PETALS:
        paths[WINDOW] = make_toy_mixtral(folder / WINDOW, num_layers=BLOCKS, sliding_window=4096)
        described.append((WINDOW, (0, BLOCKS)))
    names = iter([name for name, _ in described])

    def start(**arguments: Any) -> Any:
        name = next(names)
        arguments.update(converted_model_name_or_path=str(paths[name]), dht_prefix=name)
        return load_host().server_class(SpecServerConfig())(**arguments)

    with adapter_errors() as messages:
        ranges = [part for _, part in described]
        with InProcessSwarm(paths["bloom"], ranges, server_factory=start, startup_timeout_s=200.0) as swarm:
            yield Families(swarm, paths, messages)


@pytest.mark.parametrize("name", SERVED)
def test_the_same_tokens_as_transformers(families: Families, name: str) -> None:
    """Plain, with the suffix drafter, and with trees that are wrong on purpose; then with both ends at the client."""
    local = families.local(name)
    texts = prompts(4, VOCAB, seed=40)
    expected = [reference(local, ids, NEW) for ids in texts]
    assert len({tuple(target) for target in expected}) == len(texts)
    with families.client(name, PLAIN) as model:
        assert_exact_in_every_way(model, list(zip(texts, expected)), NEW, TREE)


@not_on_old_petals
def test_what_a_family_refuses_is_served_by_the_host(families: Families) -> None:
    ids, local = prompts(1, VOCAB, seed=41)[0], families.local(WINDOW)
    expected = reference(local, ids, NEW)
    assert any("sliding window of 4096" in message for message in families.log)
    assert families.swarm.servers[-1].module_container.spec is None
    with families.client(WINDOW, SpecConfig(strict=True, mode="ring", plan="none")) as model:
        with pytest.raises(UnsupportedCall):
            decode(model, ids, NEW)
        respec(model, mode="auto", strict=False)
        assert decode(model, ids, NEW) == expected
        assert model.last_stats.mode == "relay"
