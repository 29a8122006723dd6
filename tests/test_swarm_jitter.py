"""The same text over links whose delay changes from one frame to the next, with drafters that keep no time."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from swarm_helpers import HOSTILE, Knowing, decode, load_local, prompts, reference, replayed, respec

from benchmarks.chaos import plugin_client
from benchmarks.compare import SPEC_SERVER
from benchmarks.swarm import LocalSwarm, split_blocks
from benchmarks.toy_models import make_toy_llama
from benchmarks.wan import LinkShape
from bloombee_spec.draft.base import Proposal
from bloombee_spec.draft.scripted import Script

pytestmark = pytest.mark.swarm
VOCAB, NEW = 1009, 28
SCRIPTS = {"tree": Script(0.8, siblings=(0.1,), depth=12), **HOSTILE}


class Moody(Knowing):
    """Takes a random time for each answer, and has none for its first two seconds."""

    def __init__(self, texts: Sequence[Sequence[int]], script: Script):
        super().__init__(texts, VOCAB, script)
        self._rng, self._since = random.Random(0), time.monotonic()

    def propose(self, path: Sequence[int], budget: int, **options: Any) -> list[Proposal]:
        time.sleep(self._rng.uniform(0, 0.04))
        return super().propose(path, budget, **options) if time.monotonic() - self._since > 2 else []


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_llama(tmp_path_factory.mktemp("jitter") / "model", num_layers=3, vocab_size=VOCAB)


@pytest.fixture(scope="module")
def model(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with LocalSwarm(
        model_path, split_blocks(3, 3), work_dir=tmp_path_factory.mktemp("jitter-swarm"),
        wan=LinkShape(delay_s=0.001, jitter_s=0.2), server_command=SPEC_SERVER, extra_args=("--num_handlers", "1"),
    ) as swarm:  # fmt: skip
        found = plugin_client(swarm, mode="ring")
        yield found
        found.close()


@pytest.fixture(scope="module")
def expected(model_path: Path) -> tuple[list[int], list[int]]:
    (ids,) = prompts(1, VOCAB, seed=41)
    return ids, reference(load_local(model_path), ids, NEW)


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_text_does_not_depend_on_when_frames_arrive(
    model: Any, expected: tuple[list[int], list[int]], name: str
) -> None:
    ids, target = expected
    text = replayed(name, ids, target, VOCAB)
    respec(model, drafter=lambda: Moody([text], SCRIPTS[name]))
    assert decode(model, ids, NEW) == target
    stats = model.last_stats
    assert stats.retries == 0 and stats.misses <= stats.laps <= stats.misses + 1
    assert stats.proposed > 0 and (stats.hits > 0) == (name in ("tree", "always right", "duplicates"))
