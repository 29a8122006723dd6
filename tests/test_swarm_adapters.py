"""LoRA: an adapter works through the ring as it does through the host, beside clients of the base model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from adapter_helpers import LocalHub, make_adapter
from connect_helpers import at_once, connect
from swarm_helpers import PLAIN, SUFFIX, VOCAB, Knowing, decode, prompts, reference, respec

from benchmarks.swarm import LocalSwarm, ServerSpec
from bloombee_spec import SpecConfig
from bloombee_spec.client.ring import Ring
from bloombee_spec.client.routing import open_ring
from bloombee_spec.client.stage_link import RingError
from bloombee_spec.draft.scripted import Script
from bloombee_spec.hosts.base import NoRoute, Span

pytestmark = pytest.mark.swarm
NEW = 32
ADAPTER = "toy/lora"
SERVE = (sys.executable, "-m", "bloombee_spec.cli.main", "serve")
WITH, WITHOUT = (0, 1), (2,)  # servers that have the adapter, and one that covers all blocks without it


@pytest.fixture(scope="module")
def adapted(toy_path: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("adapter")
    return folder, make_adapter(toy_path, folder)


@pytest.fixture(scope="module")
def servers(toy_path: Path, adapted: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Processes, because the host keeps the active adapter in a variable of the process."""
    work_dir = tmp_path_factory.mktemp("adapters")
    extra = ("--adapters", ADAPTER, "--cache_dir", str(work_dir / "cache"))
    blocks = [ServerSpec(0, 4, extra_args=extra), ServerSpec(4, 8, extra_args=extra), ServerSpec(0, 8)]
    with LocalHub({ADAPTER: adapted[0]}) as hub:
        env = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(work_dir / "hub")}
        with LocalSwarm(toy_path, blocks, work_dir=work_dir, server_command=SERVE, env=env) as running:
            yield running


def client_of(
    servers: Any, spec: SpecConfig, chosen: tuple[int, ...] | None, **kwargs: Any
) -> AbstractContextManager[Any]:
    peers = None if chosen is None else [servers.servers[i].peer_id for i in chosen]
    return connect(servers.model, servers.initial_peers, servers.dht_prefix, spec, peers=peers, **kwargs)


@pytest.fixture(scope="module")
def model(servers: Any) -> Iterator[Any]:
    with client_of(servers, SUFFIX, None, active_adapter=ADAPTER) as connected:
        yield connected


@pytest.fixture(scope="module")
def base(servers: Any) -> Iterator[Any]:
    with client_of(servers, SUFFIX, WITH) as connected:
        yield connected


@pytest.fixture(scope="module")
def expected(adapted: tuple[Path, Any]) -> list[tuple[list[int], list[int]]]:
    return [(ids, reference(adapted[1], ids, NEW)) for ids in prompts(5, VOCAB, seed=20)]


def test_the_adapter_is_exact_through_the_ring(servers: Any, model: Any, toy_local: Any, expected: Any) -> None:
    with_adapter = {servers.servers[i].peer_id for i in WITH}
    texts = [[*ids, *target] for ids, target in expected]
    scripted = lambda: Knowing(texts, VOCAB, Script(0.6, siblings=(0.2, 0.1), depth=6))  # noqa: E731
    for changes in ({"speculate": False}, {"drafter": "suffix"}, {"drafter": scripted}):
        respec(model, **{"speculate": True, **changes})
        for ids, target in expected:
            assert decode(model, ids, NEW) == target
            assert {line.split()[1] for line in model.last_stats.route} == with_adapter
    assert model.last_stats.hits > 0
    assert all(reference(toy_local, ids, NEW) != target for ids, target in expected), "the adapter changes the model"


def test_the_hosts_own_path_agrees(model: Any, expected: Any) -> None:
    ids, target = expected[0]
    respec(model, mode="off", strict=False)
    try:
        assert decode(model, ids, 8, do_sample=False) == target[:8]
    finally:
        respec(model, mode="auto", strict=True)


def test_the_base_model_stays_exact_on_the_same_servers(base: Any, toy_local: Any, expected: Any) -> None:
    for ids, _ in expected[:3]:
        assert decode(base, ids, NEW) == reference(toy_local, ids, NEW)


def test_clients_with_and_without_the_adapter_decode_at_once(
    model: Any, base: Any, toy_local: Any, expected: Any
) -> None:
    chosen = expected[:3]
    with_adapter, without = at_once(
        lambda: [decode(model, ids, NEW) for ids, _ in chosen], lambda: [decode(base, ids, NEW) for ids, _ in chosen]
    )
    assert with_adapter == [target for _, target in chosen]
    assert without == [reference(toy_local, ids, NEW) for ids, _ in chosen]


def test_a_server_without_the_adapter_is_not_routed_and_the_reason_names_it(servers: Any) -> None:
    with client_of(servers, PLAIN, WITHOUT, active_adapter=ADAPTER) as lonely:
        respec(lonely, mode="ring")
        with pytest.raises(NoRoute, match=ADAPTER):
            decode(lonely, [1, 2, 3], 4)


def test_a_server_without_the_adapter_refuses_the_session(servers: Any, base: Any) -> None:
    ring = open_ring(base._spec_host, base, base.spec, lanes=1, max_length=64)
    info = ring.infos[-1]
    ring.close()
    span = Span(servers.servers[WITHOUT[0]].peer_id, 0, 8)
    with pytest.raises(RingError, match=f"adapter '{ADAPTER}' is not loaded here"):
        Ring.open(
            base._spec_host, base, [span], [info], lanes=1, max_length=64, arena=8, embed=True, verify=True,
            codecs=["raw"] * 2, adapter=ADAPTER, timeout=20,
        )  # fmt: skip
