"""One real swarm for all tests that only decode: plugin servers with overlapping spans, in this process."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from host_helpers import BLOOMBEE_MAIN, OLD_TRANSFORMERS, PACKAGE, VERSION
from hypothesis import settings
from swarm_helpers import SPANS, VOCAB, load_local

torch.set_num_threads(1)
collect_ignore = []
if OLD_TRANSFORMERS:  # model drafters need its cache class; it lacks options whose fate the others try
    collect_ignore = ["test_draft_model.py", "test_draft_model_fit.py", "test_draft_registry.py"]
    collect_ignore += ["test_generate_parity.py", "test_generate_rules.py"]
_cache = tempfile.TemporaryDirectory(prefix="bloombee-spec-test-")  # nothing of the user's is read or written
os.environ["XDG_CACHE_HOME"] = _cache.name
# The same examples on every machine and in every run, so that a red run can be looked at again.
# Explore with --hypothesis-profile=default.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


def pytest_report_header() -> str:
    left_out = f"; left out for this transformers: {', '.join(collect_ignore)}" if collect_ignore else ""
    return f"host: {PACKAGE} {VERSION}{left_out}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("swarm") and "swarm" not in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.own_swarm)


def pytest_sessionfinish() -> None:
    if BLOOMBEE_MAIN:  # its TorchDisk, when collected, waits for threads that have ended: for ever
        gc.freeze()


@pytest.fixture(scope="session")
def toy_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from benchmarks.toy_models import make_toy_llama

    return make_toy_llama(tmp_path_factory.mktemp("toy") / "llama", num_layers=8, vocab_size=VOCAB, eos_token_id=None)


@pytest.fixture(scope="session")
def toy_local(toy_path: Path) -> Any:
    return load_local(toy_path)


@pytest.fixture(scope="session")
def swarm(toy_path: Path) -> Iterator[Any]:
    if BLOOMBEE_MAIN:
        pytest.skip(f"{PACKAGE} {VERSION} serves no Llama on a CPU; tests/test_bloombee_main.py is for it")
    from benchmarks.inprocess_swarm import InProcessSwarm
    from bloombee_spec.hosts.base import load_host
    from bloombee_spec.server.config import SpecServerConfig

    server = load_host().server_class(SpecServerConfig(alloc_timeout=10.0))
    with InProcessSwarm(toy_path, SPANS, server_factory=server, attn_cache_tokens=16384) as running:
        yield running
