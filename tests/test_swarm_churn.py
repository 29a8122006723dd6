"""Servers freeze, lose their links and die in mid-text; another replica takes over and the text is the same."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from swarm_helpers import load_local, reference, respec

from benchmarks.chaos import Faults, Trigger, on_route, plugin_client
from benchmarks.compare import SPEC_SERVER
from benchmarks.recovery import forgive
from benchmarks.scenario import toy_jobs
from benchmarks.swarm import LocalSwarm
from benchmarks.toy_models import make_toy_llama
from benchmarks.wan import LinkShape
from bloombee_spec.wire.steering import Statistics

pytestmark = pytest.mark.swarm
LONG = 192


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_llama(tmp_path_factory.mktemp("churn") / "model", num_layers=4, vocab_size=1009)


@pytest.fixture(scope="module")
def replicas(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSwarm]:
    spans = [(0, 2), (0, 2), (2, 4), (2, 4)]
    with LocalSwarm(
        model_path, spans, work_dir=tmp_path_factory.mktemp("churn-swarm"), wan=LinkShape(delay_s=0.005),
        server_command=SPEC_SERVER,
        extra_args=("--num_handlers", "1", "--spec-leave-timeout", "6", "--spec-park-timeout", "40"),
    ) as swarm:  # fmt: skip
        yield swarm


@pytest.fixture(scope="module")
def model(replicas: LocalSwarm) -> Iterator[Any]:
    found = plugin_client(replicas, mode="ring")
    yield found
    found.close()


def strike(
    replicas: LocalSwarm, model: Any, model_path: Path, fault: str, at: int, surely: bool = True
) -> Statistics | None:
    """Decode `LONG` tokens and hit a server of the route after `at` of them; the text must be the same.

    :param surely: the fault cannot miss the ring
    :returns: what the stage in the place of the one that was hit counted afterwards
    """
    (job,) = toy_jobs(1, LONG)
    expected, faults = reference(load_local(model_path), job.ids, LONG), Faults(replicas)
    ids = torch.tensor([job.ids])
    victim = None
    try:
        with model.inference_session(max_length=len(job.ids) + LONG) as session:
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2)
            victim = on_route(replicas, model, random.Random(0))
            peer = replicas.servers[victim].peer_id
            index = next(i for i, line in enumerate(model.last_stats.route) if peer in line)
            trigger = Trigger(at, lambda: faults.kinds[fault](victim))
            out = model.generate(None, max_new_tokens=LONG - 2, streamer=trigger)
            assert out[0].tolist() == expected[2:]
            assert model.last_stats.tokens == LONG - 2, "what was counted before the break counts"
            if surely:
                assert model.last_stats.resumed >= len(job.ids), "the ring began anew"
                assert all(peer not in line for line in model.last_stats.route)
            counted: Statistics | None = session.close()[index]
    finally:
        if victim is not None:
            faults.repair(fault, victim)
            forgive(model, replicas.servers[victim].peer_id)
    return counted


def test_a_standby_takes_over_with_what_it_was_given_before(
    replicas: LocalSwarm, model: Any, model_path: Path
) -> None:
    respec(model, speculate=False, standby=True)
    counted = strike(replicas, model, model_path, "kill -9", 150)
    assert model.last_stats.retries == 1
    respec(model, standby=False)
    assert counted is not None and counted.computed_rows < 150, "the standby had to compute the text first"


@pytest.mark.parametrize("way", ["rows", "kv"])
def test_a_server_that_leaves_hands_over_what_it_holds(
    replicas: LocalSwarm, model: Any, model_path: Path, way: str
) -> None:
    respec(model, speculate=False, moving=way)  # plainly, so that there are laps left to move in
    strike(replicas, model, model_path, "leave", 8)
    assert model.last_stats.moves == 1 and model.last_stats.retries == 0


@pytest.mark.parametrize("fault", ["freeze", "kill -9", "cut"])
def test_a_server_of_the_route_fails_in_mid_text(
    replicas: LocalSwarm, model: Any, model_path: Path, fault: str
) -> None:
    respec(model, speculate=False)  # so that the fault surely finds laps left to spoil
    surely = fault != "cut"  # peers may talk over a connection that the victim opened, and no relay carries
    strike(replicas, model, model_path, fault, 2, surely)
    assert model.last_stats.retries >= surely, "the fault did not hit the ring"
    if fault != "kill -9":  # which takes long to mend
        respec(model, speculate=True)  # in mid-tree
        strike(replicas, model, model_path, fault, 20, surely=False)
