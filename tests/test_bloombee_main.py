"""BloomBee's main branch on a CPU: what the plugin promises there on Qwen3 and Falcon, and the faults that its patches
mend. `make test-bloombee-main HOST=CHECKOUT` builds the environment and runs this."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from connect_helpers import at_once, connect
from host_helpers import host_module, only_on
from patching_helpers import SET_FOLDER
from swarm_helpers import PLAIN, VOCAB, Knowing, assert_exact_in_every_way, decode, prompts, reference, respec
from transformers import AutoModelForCausalLM

from benchmarks.inprocess_swarm import InProcessSwarm
from benchmarks.swarm import LocalSwarm, ServerSpec
from benchmarks.toy_models import initialise, make_toy_falcon
from bloombee_spec import SpecConfig
from bloombee_spec.draft.scripted import Script
from bloombee_spec.hosts.base import load_host
from bloombee_spec.server.config import SpecServerConfig

pytestmark = [pytest.mark.swarm, only_on("bloombee", "2.3.0.dev2")]
NEW = 20
BLOCKS = 3
TREE = Script(0.6, siblings=(0.2, 0.1), depth=6)


def make_toy_qwen3(path: Path, **options: Any) -> Path:
    """Grouped KV heads, and heads whose width is not hidden / heads."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        hidden_size=96, num_attention_heads=6, num_key_value_heads=2, head_dim=24, num_hidden_layers=BLOCKS,
        intermediate_size=160, vocab_size=VOCAB, max_position_embeddings=2048, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None, pad_token_id=None, **options,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).float()
    initialise(model, seed=0)
    model.save_pretrained(str(path))
    return path


SERVED: dict[str, Callable[[Path], Path]] = {
    "qwen3": make_toy_qwen3,
    "falcon": lambda path: make_toy_falcon(path, num_layers=BLOCKS, new_decoder_architecture=False),
    "falcon-grouped": lambda path: make_toy_falcon(path, num_layers=BLOCKS),
}
BY_THE_HOST = ("qwen3", "falcon")  # its own Falcon block cannot read grouped KV heads back from its cache
RUN_SERVER = (sys.executable, "-m", "bloombee.cli.run_server")
SERVE = (sys.executable, "-m", "bloombee_spec.cli.main", "serve")


class Families:
    def __init__(self, swarm: InProcessSwarm, paths: dict[str, Path]) -> None:
        self.swarm, self.paths = swarm, paths

    @contextmanager
    def client(self, name: str, spec: SpecConfig) -> Iterator[Any]:
        with connect(self.paths[name], self.swarm.initial_peers, name, spec) as model:
            yield model

    def local(self, name: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.paths[name], torch_dtype=torch.float32)

    def stage(self, name: str, index: int) -> Any:
        return self.swarm.servers[2 * list(SERVED).index(name) + index].module_container.spec


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Families]:
    folder = tmp_path_factory.mktemp("main")
    paths = {name: make(folder / name) for name, make in SERVED.items()}
    described = [(name, part) for name in SERVED for part in ((0, 1), (1, BLOCKS))]
    names = iter([name for name, _ in described])

    def start(**arguments: Any) -> Any:
        name = next(names)
        arguments.update(converted_model_name_or_path=str(paths[name]), dht_prefix=name)
        return load_host().server_class(SpecServerConfig(alloc_timeout=5.0))(**arguments)

    ranges = [part for _, part in described]
    with InProcessSwarm(paths["qwen3"], ranges, server_factory=start, startup_timeout_s=200.0) as swarm:
        yield Families(swarm, paths)


def expected_of(families: Families, name: str, seed: int, n: int = 3) -> list[tuple[list[int], list[int]]]:
    local = families.local(name)
    found = [(ids, reference(local, ids, NEW)) for ids in prompts(n, VOCAB, seed=seed)]
    assert len({tuple(target) for _, target in found}) == n
    return found


@pytest.mark.parametrize("name", SERVED)
def test_the_same_tokens_as_transformers(families: Families, name: str) -> None:
    """Plain, with the suffix drafter, with trees that are wrong on purpose, with both ends at the client."""
    texts = expected_of(families, name, seed=40)
    with families.client(name, PLAIN) as model:
        assert_exact_in_every_way(model, texts, NEW, TREE)


@pytest.mark.parametrize("name", BY_THE_HOST)
def test_a_stock_client_and_a_plugin_client_decode_at_once(families: Families, name: str) -> None:
    """Batch 1, the only one that this host serves exactly."""
    texts = expected_of(families, name, seed=41)
    known = [[*ids, *target] for ids, target in texts]
    stock_class = host_module("utils.auto_config").AutoDistributedModelForCausalLM
    stock = stock_class.from_pretrained(
        str(families.paths[name]), initial_peers=families.swarm.initial_peers, dht_prefix=name,
        torch_dtype=torch.float32, show_route=False, max_retries=2,
    )  # fmt: skip
    try:
        with families.client(name, PLAIN) as model:
            respec(model, speculate=True, drafter=lambda: Knowing(known, VOCAB, TREE))
            through_host, through_ring = at_once(
                lambda: [decode(stock, ids, NEW, do_sample=False) for ids, _ in texts],
                lambda: [decode(model, ids, NEW) for ids, _ in texts * 3],
            )
            assert model.last_stats.mode == "ring" and model.last_stats.hits > 0
    finally:
        load_host().close(stock)
    assert through_host == [target for _, target in texts]  # more than one token: patch generate-lengths
    assert through_ring == [target for _, target in texts] * 3


@pytest.mark.parametrize("name", BY_THE_HOST)
def test_speculation_through_the_hosts_own_sessions(families: Families, name: str) -> None:
    """As on servers without the plugin: the open session goes back after each miss."""
    texts = expected_of(families, name, seed=42)
    known = [[*ids, *target] for ids, target in texts]
    with families.client(name, PLAIN) as model:
        respec(model, mode="relay", speculate=True, drafter=lambda: Knowing(known, VOCAB, Script(0.7)))
        for ids, target in texts:
            assert decode(model, ids, NEW) == target
            stats = model.last_stats
            assert stats.mode == "relay" and stats.hits > 0 and stats.misses > 0 and stats.laps < NEW


def test_servers_started_by_both_commands(families: Families, tmp_path: Path) -> None:
    kinds = [
        ServerSpec(0, 1, command=SERVE),
        ServerSpec(1, BLOCKS, command=RUN_SERVER, extra_args=("--spec", "--spec-heads", "lm_head")),
    ]
    texts = expected_of(families, "qwen3", seed=46)
    with (
        LocalSwarm(families.paths["qwen3"], kinds, work_dir=tmp_path) as swarm,
        connect(swarm.model, swarm.initial_peers, swarm.dht_prefix, PLAIN) as model,
    ):
        respec(model, speculate=True, drafter="suffix")
        for ids, target in texts:
            assert decode(model, ids, NEW) == target
        assert [line.split()[1] for line in model.last_stats.route] == [one.peer_id for one in swarm.servers]


def test_several_generate_calls_of_a_stock_client_in_one_session(families: Families) -> None:
    ids = prompts(1, VOCAB, seed=43)[0]
    expected = reference(families.local("qwen3"), ids, NEW)
    with families.client("qwen3", SpecConfig(mode="off")) as model, torch.inference_mode():
        inputs = torch.tensor([ids])
        host = load_host()
        session = host.new_session(model, len(ids) + NEW)
        try:
            with model.use_session(session):
                first = model.generate(inputs, max_new_tokens=NEW // 2, do_sample=False)[0, len(ids) :].tolist()
                rest = model.generate(None, max_new_tokens=NEW // 2, do_sample=False)[0].tolist()
        finally:
            host.close_session(session)
    assert first + rest == expected


def test_kv_is_counted_by_the_host_and_given_back(families: Families) -> None:
    stage = families.stage("qwen3", 1)
    cache, free = stage._loaded.memory_cache, stage.info()["cache_bytes_left"]
    per_token = 2 * (BLOCKS - 1) * 2 * 24 * 4
    ids = prompts(1, VOCAB, seed=44)[0]
    with families.client("qwen3", PLAIN) as model:
        with model.inference_session(max_length=64):
            model.generate(torch.tensor([ids]), max_new_tokens=4)
            (session,) = stage.stage.sessions.values()
            columns = session.open.arena + session.open.max_length
            assert free - stage.info()["cache_bytes_left"] == columns * per_token
            (tensor,) = cache._tensors.values()
            assert tensor.shape[3] == columns and tensor.dtype == torch.float32
            assert not tensor[:, :, :, session.open.arena + len(ids) + 4 :].any(), "unused columns must not be NaN"
        for _ in range(100):
            if not cache._tensors and stage.info()["cache_bytes_left"] == free:
                break
            decode(model, ids, 1)
        decode(model, ids, 1)
    assert len(cache._tensors) <= 1


def test_a_closed_session_leaves_the_models_routing_alive(families: Families) -> None:
    """This host shuts a sequence manager down when it is collected, and sessions have copies of the model's."""
    with families.client("qwen3", PLAIN) as model:
        manager = model.transformer.h.sequence_manager
        host = load_host()
        assert host.route(model, None, 64)
        session = host.new_session(model, 32, timeout=20.0)
        host.close_session(session)
        del session
        gc.collect()
        assert not manager._closed and manager._thread.is_alive() and not manager._thread.should_shutdown
        assert host.route(model, None, 64)


# --- the faults that the optional patches mend ---------------------------------------------------------------------


def test_a_failing_block_is_an_error_for_the_client(families: Families, monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch raise-errors: as published, the block's input comes back as its output, and tokens are made of it."""
    assert (SET_FOLDER / "raise-errors.patch").is_file()
    container = families.swarm.servers[1].module_container
    backend = container.module_backends[sorted(container.module_backends)[0]]

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("injected")

    monkeypatch.setattr(backend.module._module, "forward", fails)
    host, ids = load_host(), prompts(1, VOCAB, seed=45)[0]
    logging.disable(logging.CRITICAL)
    try:
        with families.client("qwen3", PLAIN) as model, torch.inference_mode():
            session = host.new_session(model, 32, timeout=20.0)
            try:
                with pytest.raises(Exception, match="injected"):
                    session.step(host.embed(model, ids)[None])
            finally:
                host.close_session(session)
    finally:
        logging.disable(logging.NOTSET)
