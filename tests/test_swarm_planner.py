"""The planner and the codecs' choice on real servers: what is measured arrives, and no choice changes a token."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from swarm_helpers import ROUTES, VOCAB, Knowing, client, decode, prompts, reference, respec

from bloombee_spec import SpecConfig
from bloombee_spec.draft.scripted import Script
from bloombee_spec.wire.frames import ControlFrame, encode
from bloombee_spec.wire.steering import UseCodec

pytestmark = pytest.mark.swarm
NEW = 48


@pytest.fixture(scope="module")
def model(swarm: Any) -> Iterator[Any]:
    with client(swarm, SpecConfig(strict=True), ROUTES[4]) as found:
        yield found


@pytest.fixture(scope="module")
def expected(toy_local: Any) -> list[tuple[list[int], list[int]]]:
    return [(ids, reference(toy_local, ids, NEW)) for ids in prompts(3, VOCAB, seed=71)]


@pytest.mark.parametrize("plan", ["auto", "stream", "tree", "none"])
@pytest.mark.parametrize("direct", [True, False])
def test_every_plan_is_exact(model: Any, expected: Any, plan: str, direct: bool) -> None:
    texts = [[*ids, *target] for ids, target in expected]
    for script in (Script(0.8, siblings=(0.1,), depth=8), Script(0.0), Script(1.0, layer_seconds=0.0005)):
        respec(model, plan=plan, direct_commits=direct, drafter=partial(Knowing, texts, VOCAB, script))
        for ids, target in expected[:1]:
            assert decode(model, ids, NEW) == target
        stats = model.last_stats
        assert sum(stats.modes.values()) == NEW
        allowed = {"auto": {"off", "tree", "stream", "unplanned"}, "none": {"unplanned"}, "tree": {"tree", "off"}}
        assert set(stats.modes) <= allowed.get(plan, {"stream", "off", "unplanned"})
        assert script.acceptance != 1.0 or stats.laps < NEW


def test_a_route_is_measured_while_it_works(model: Any, expected: Any) -> None:
    respec(model, plan="auto", direct_commits=True, drafter="suffix")
    with model.inference_session(max_length=2000) as session:
        ids = torch.tensor([prompts(1, VOCAB, length=600, seed=5)[0]])
        model.generate(ids, max_new_tokens=64)
        meter = session._ring.meter
        stages = meter._stages

        def unknown() -> list[str]:
            """What the stages have not told yet: on a busy machine the text may end before their second report."""
            told = {
                "round trips": all(stage.rtt_s is not None for stage in stages),
                "to the next": all(stage.next_rtt_s is not None for stage in stages[:-1]),
                "to the first": meter._first_rtt_s is not None,
                "bandwidths": all(stage.bandwidth_bps is not None for stage in stages[1:]),
                "compute": all(len(stage.compute.points) >= 3 for stage in stages),
                "codecs": all(len(stage.codec_costs) == 4 for stage in stages[:-1]),
            }
            return [name for name, known in told.items() if not known]

        deadline = time.monotonic() + 30
        while unknown() and time.monotonic() < deadline:
            model.generate(None, max_new_tokens=16)
        assert not unknown()
        assert all(0 < stage.rtt_s < 5 for stage in stages)
    stats = model.last_stats
    assert stats.lap_s > 0 and len(stats.legs) == 5 and len(stats.codecs) == 5


@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_exact_codecs_change_no_token(model: Any, expected: Any, codec: str) -> None:
    respec(model, codec=codec)
    try:
        for ids, target in expected:
            assert decode(model, ids, NEW) == target
        assert set(model.last_stats.codecs) == {codec}
    finally:
        respec(model, codec="auto")


def test_codecs_may_change_in_mid_stream(model: Any, expected: Any) -> None:
    ids, target = expected[0]

    class Switch:
        """At every token, every stage changes to the other codec."""

        def __init__(self) -> None:
            self.names = ["lossless", "raw"]

        def put(self, _: Any) -> None:
            self.names.reverse()
            ring = session._ring
            if ring is not None:
                data = encode(ControlFrame(UseCodec(self.names[0]).to_wire()))
                ring._loop.call_soon_threadsafe(ring._put, data, tuple(range(len(ring.spans))))

        def end(self) -> None:
            pass

    with model.inference_session(max_length=len(ids) + NEW) as session:
        assert decode(model, ids, NEW, streamer=Switch()) == target


@pytest.mark.parametrize("codec", ["int8", "tah4"])
def test_a_lossy_codec_is_used_where_it_is_asked_for(model: Any, expected: Any, codec: str) -> None:
    """The same texts each time without speculation. With it they agree up to rounding: a row computed beside others
    differs in its last bit, which a coarse codec may round up to a step."""
    respec(model, codec=codec, speculate=False)
    try:
        for ids, _ in expected[:2]:
            plain = decode(model, ids, NEW)
            assert decode(model, ids, NEW) == plain
            assert set(model.last_stats.codecs) == {codec}
            respec(model, speculate=True, drafter=partial(Knowing, [[*ids, *plain]], VOCAB, Script(1.0)))
            found = decode(model, ids, NEW)
            assert len(found) == NEW and found[0] == plain[0]
            respec(model, speculate=False)
    finally:
        respec(model, codec="auto", speculate=True, drafter="suffix")


def test_a_codec_that_was_not_agreed_on_ends_the_session_with_the_reason(model: Any) -> None:
    from bloombee_spec.client.routing import open_ring

    ring = open_ring(model._spec_host, model, model.spec, lanes=1, max_length=64)
    try:
        data = encode(ControlFrame(UseCodec("tah3").to_wire()))
        ring._loop.call_soon_threadsafe(ring._put, data, (1,))
        assert "not agreed" in str(ring.events.get(timeout=20))
    finally:
        ring.close()
