"""A stage's server leaves, as far as the client is told: what other servers are prepared with, and how exactly."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from swarm_helpers import PLAIN, ROUTES, VOCAB, client, free_cache, prompts, reference, respec

from benchmarks.chaos import Trigger

pytestmark = pytest.mark.swarm
NEW = 160
LAST, HALVES = ROUTES[3][-1], ROUTES[4][-2:]  # one server for the last blocks, or two


@pytest.fixture(scope="module")
def model(swarm: Any) -> Iterator[Any]:
    with client(swarm, PLAIN, [*ROUTES[3], *HALVES]) as connected:
        yield connected


def move_away(swarm: Any, model: Any, ids: list[int], seconds: float = 10.0) -> list[int]:
    """Decode `NEW` tokens; after a few, the last stage's server is said to leave, and two servers share its blocks."""
    peers = [swarm.servers[i].dht.peer_id.to_base58() for i in range(len(swarm.servers))]
    away = model.__dict__.setdefault("_spec_leaving", {})
    away.clear()
    away.update({peers[i]: math.inf for i in HALVES})
    inputs = torch.tensor([ids])
    with model.inference_session(max_length=len(ids) + NEW) as session:
        model.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=2)
        assert [peers[LAST] in line for line in model.last_stats.route] == [False, False, True]

        def leave() -> None:
            for i in HALVES:
                del away[peers[i]]
            session._ring.mover.leaves(2, seconds)

        out = model.generate(None, max_new_tokens=NEW - 2, streamer=Trigger(4, leave))
    assert model.last_stats.moves == 1 and model.last_stats.retries == 0
    assert [peers[i] in line for i, line in zip(HALVES, model.last_stats.route[2:])] == [True, True]
    return list(out[0, -NEW + 2 :].tolist())


def test_two_servers_are_prepared_for_the_blocks_of_one(swarm: Any, model: Any, toy_local: Any) -> None:
    (ids,) = prompts(1, VOCAB, length=60, seed=11)
    before = free_cache(swarm)
    respec(model, moving="kv")
    assert move_away(swarm, model, ids) == reference(toy_local, ids, NEW)[2:]
    assert model.last_stats.resumed >= len(ids), "they were given nothing"
    assert model.last_stats.inexact == 0
    deadline = time.monotonic() + 30
    while free_cache(swarm) != before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert free_cache(swarm) == before


@pytest.mark.parametrize("quality", ["exact", "coarse"])
def test_kv_loses_quality_only_where_that_is_allowed(
    swarm: Any, model: Any, toy_local: Any, quality: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (ids,) = prompts(1, VOCAB, length=60, seed=12)
    monkeypatch.setattr("bloombee_spec.client.prepared.known_bandwidth", lambda peer: 2e4)  # exact KV would be late
    respec(model, moving="kv", churn_quality=quality)
    text = move_away(swarm, model, ids)
    assert len(text) == NEW - 2
    if quality == "exact":
        assert text == reference(toy_local, ids, NEW)[2:] and model.last_stats.inexact == 0
    else:
        assert model.last_stats.inexact >= len(ids)
