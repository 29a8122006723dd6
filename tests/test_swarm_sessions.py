"""Sessions: several turns, edits, stopping, and nothing left behind at the servers however they end."""

from __future__ import annotations

import asyncio
import gc
import secrets
import sys
import time
from typing import Any

import pytest
import torch
from generate_helpers import Recorder
from hivemind.p2p import PeerID
from host_helpers import PACKAGE
from swarm_helpers import PLAIN, ROUTES, SUFFIX, VOCAB, client, decode, free_cache, prompts, reference, respec

from bloombee_spec.client.ring import Ring
from bloombee_spec.client.routing import open_ring
from bloombee_spec.server.dialer import STREAM_PROTOCOL
from bloombee_spec.wire.frames import CommitFrame, ControlFrame, NodesFrame, RewindFrame
from bloombee_spec.wire.ledger import Traffic
from bloombee_spec.wire.messages import Hello
from bloombee_spec.wire.streams import Outbox, StreamClosed, read_frame

pytestmark = pytest.mark.swarm


@pytest.fixture(scope="module")
def model(swarm: Any) -> Any:
    with client(swarm, SUFFIX, ROUTES[4]) as connected:
        yield connected


def wait_until(condition: Any, what: str, limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def ids_of(rows: list[int]) -> torch.Tensor:
    return torch.tensor([rows])


def test_servers_that_were_silent_once_are_asked_again(model: Any, toy_local: Any) -> None:
    """All were too busy to say what they are; a moment ago they had the plugin."""
    (ids,) = prompts(1, VOCAB, seed=29)
    decode(model, ids, 4)
    model._spec_server_infos.update({peer: (time.monotonic(), None) for peer in model._spec_server_infos})
    assert decode(model, ids, 8) == reference(toy_local, ids, 8)
    assert model.last_stats.mode == "ring"


def test_servers_that_the_swarm_forgot_for_a_moment_are_waited_for(
    model: Any, toy_local: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where DHT peers are too busy to answer: the host's own clients wait for blocks that nobody serves."""
    (ids,) = prompts(1, VOCAB, seed=31)
    host, looks = model._spec_host, list[None]()
    servers = host.servers

    def forgetful(model: Any) -> dict[str, tuple[int, int]]:
        looks.append(None)
        return {} if len(looks) <= 6 else servers(model)  # a second look does not suffice

    monkeypatch.setattr(host, "servers", forgetful)
    assert decode(model, ids, 8) == reference(toy_local, ids, 8)
    assert model.last_stats.mode == "ring" and len(looks) > 6


# --- turns --------------------------------------------------------------------------------------------------------


def test_turns_in_one_session_continue_the_history(model: Any, toy_local: Any) -> None:
    first, second = prompts(2, VOCAB, seed=3)
    with model.inference_session(max_length=128) as session:
        one = model.generate(ids_of(first), max_new_tokens=20)
        two = model.generate(ids_of(second), max_new_tokens=20)
        three = model.generate(None, max_new_tokens=7)
        assert session.output_ids.shape[1] == len(first) + len(second) + 47
    history = first + reference(toy_local, first, 20)
    assert one[0].tolist() == history
    answer = reference(toy_local, history + second, 27)
    assert two[0].tolist() == second + answer[:20]
    assert three[0].tolist() == answer[20:]


def test_history_may_be_edited_between_turns(model: Any, toy_local: Any) -> None:
    (first,) = prompts(1, VOCAB, seed=4)
    with model.inference_session(max_length=128) as session:
        model.generate(ids_of(first), max_new_tokens=16)
        for cut, tail in ((len(first) + 5, [1, 2, 3]), (3, [9]), (len(first) + 1, [])):
            edited = session.output_ids[0, :cut].tolist() + tail
            session.output_ids = ids_of(edited)
            out = model.generate(None, max_new_tokens=12)
            assert out[0].tolist() == reference(toy_local, edited, 12), f"after cutting at {cut}"


def test_plugin_and_host_turns_mix_in_one_session(model: Any, toy_local: Any) -> None:
    (first,) = prompts(1, VOCAB, seed=5)
    respec(model, strict=False)
    try:
        with model.inference_session(max_length=96):
            one = model.generate(ids_of(first), max_new_tokens=10)
            assert model.last_stats.mode == "ring"
            respec(model, mode="off")
            two = model.generate(None, max_new_tokens=6)  # the host's own path
            assert model.last_stats is None
            respec(model, mode="auto")
            three = model.generate(None, max_new_tokens=10)
            assert model.last_stats.mode == "ring"
    finally:
        respec(model, strict=True, mode="auto")
    whole = one[0].tolist() + two[0].tolist() + three[0].tolist()
    assert whole == first + reference(toy_local, first, 26)


def test_a_session_refuses_more_than_it_was_opened_for(model: Any) -> None:
    with model.inference_session(max_length=16), pytest.raises(ValueError, match="maximum length exceeded"):
        model.generate(ids_of([1, 2, 3]), max_new_tokens=20)


# --- ends of a generation -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["none", "suffix"])
def test_eos_ends_the_output_wherever_it_falls(model: Any, toy_local: Any, drafter: str) -> None:
    (ids,) = prompts(1, VOCAB, seed=6)
    target = reference(toy_local, ids, 40)
    respec(model, drafter=drafter)
    decode(model, ids, 40)  # the suffix drafter now knows the text, so that EOS falls inside an accepted run
    for at in (0, 1, 7, 23):
        eos = [target[at], 210]
        expected = target[: target.index(target[at]) + 1]
        assert decode(model, ids, 40, eos_token_id=eos, pad_token_id=0) == expected
        assert model.last_stats.tokens == len(expected)
    respec(model, drafter="suffix")


@pytest.mark.parametrize("n", [1, 2, 3])
def test_never_more_tokens_than_asked_for(model: Any, toy_local: Any, n: int) -> None:
    (ids,) = prompts(1, VOCAB, seed=6)
    assert decode(model, ids, n) == reference(toy_local, ids, n)
    assert model.last_stats.tokens == n


def test_max_length_counts_the_prompt(model: Any, toy_local: Any) -> None:
    (ids,) = prompts(1, VOCAB, seed=7)
    out = model.generate(ids_of(ids), max_length=len(ids) + 9)
    assert out[0].tolist() == ids + reference(toy_local, ids, 9)


def test_streamer_sees_prompt_tokens_and_end(model: Any) -> None:
    (ids,) = prompts(1, VOCAB, seed=8)
    recorder = Recorder()
    out = model.generate(ids_of(ids), max_new_tokens=12, streamer=recorder)
    assert recorder.seen[0] == ids and recorder.ended == 1
    assert [token for (token,) in recorder.seen[1:]] == out[0, len(ids) :].tolist()


def test_stopping_criteria_end_a_run_and_the_session_goes_on(model: Any, toy_local: Any) -> None:
    (ids,) = prompts(1, VOCAB, seed=9)
    target = reference(toy_local, ids, 40)
    decode(model, ids, 40)

    def after_nine(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= len(ids) + 9)

    with model.inference_session(max_length=96):
        out = model.generate(ids_of(ids), max_new_tokens=40, stopping_criteria=[after_nine])
        assert out[0].tolist() == ids + target[:9]
        assert model.generate(None, max_new_tokens=20)[0].tolist() == target[9:29]


# --- nothing is left ----------------------------------------------------------------------------------------------


def test_killed_sessions_give_their_cache_back(swarm: Any, model: Any) -> None:
    decode(model, [1, 2, 3], 4)
    before = settled_cache(swarm)

    def kill(ring: Ring, how: int) -> None:
        stages = ring._stages
        if how == 0:  # the client dies: its streams end without a word
            model._spec_host.run(drop(stages), 10)
        elif how == 1:  # the client sends nonsense
            ring._loop.call_soon_threadsafe(ring._put, b"\x10nonsense", (0,))
        elif how == 2:  # in the middle of a prefill and a tree
            ring.send(CommitFrame(0, 5, 9, (1,)))
        else:
            ring.close()

    async def drop(stages: Any) -> None:
        for stage in stages:
            stage.box._writer.transport.abort()

    for i in range(200):
        ring = open_ring(model._spec_host, model, model.spec, lanes=1 + i % 3, max_length=64)
        assert any(now < full for now, full in zip(free_cache(swarm), before))
        kill(ring, i % 4)
        ring.close()
    wait_until(lambda: no_sessions(swarm), "all sessions end")
    wait_until(lambda: free_cache(swarm) == before, f"cache is free again: {before} before, {free_cache(swarm)} now")
    assert decode(model, [1, 2, 3], 4)


def test_interrupted_generation_leaves_the_model_usable(swarm: Any, model: Any, toy_local: Any) -> None:
    before = settled_cache(swarm)

    class Interrupt:
        def __init__(self) -> None:
            self.left = 5

        def put(self, _: torch.Tensor) -> None:
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt

        def end(self) -> None: ...

    (ids,) = prompts(1, VOCAB, seed=10)
    with pytest.raises(KeyboardInterrupt):
        model.generate(ids_of(ids), max_new_tokens=60, streamer=Interrupt())
    wait_until(lambda: no_sessions(swarm) and free_cache(swarm) == before, "the servers are clean")
    assert decode(model, ids, 10) == reference(toy_local, ids, 10)


def settled_cache(swarm: Any) -> list[int]:
    """Free bytes per server once everything that earlier tests opened is gone: all of each server's cache."""
    sizes = [server.module_container.spec._loaded.memory_cache.max_size_bytes for server in swarm.servers]
    wait_until(lambda: no_sessions(swarm) and free_cache(swarm) == sizes, "sessions of earlier tests end")
    return sizes


def no_sessions(swarm: Any) -> bool:
    return all(not server.module_container.spec.stage.sessions for server in swarm.servers)


# --- strangers ----------------------------------------------------------------------------------------------------


def stream_to(model: Any, peer: str, frames: list[Any]) -> Any:
    """Open a stream of our own to a stage and say what we like; the answer, or None when the stage hangs up."""

    async def talk() -> Any:
        _, reader, writer = await model._spec_host.p2p(model).call_binary_stream_handler(
            PeerID.from_base58(peer), STREAM_PROTOCOL
        )
        box = Outbox(writer, max_bytes=1 << 20, timeout=5)
        try:
            for frame in frames:
                box.put(frame)
            return await read_frame(reader, 5, Traffic())
        except (StreamClosed, asyncio.TimeoutError):
            return None
        finally:
            await box.aclose(0.2)

    return model._spec_host.run(talk(), 20)


def test_only_announced_peers_may_feed_a_session(model: Any, swarm: Any, toy_local: Any) -> None:
    """The client itself is not the announced predecessor or verifier of the inner stages, and knows the session id."""
    (ids,) = prompts(1, VOCAB, seed=11)
    ring = open_ring(model._spec_host, model, model.spec, lanes=1, max_length=64)
    try:
        session = next(iter(swarm.servers[ROUTES[4][1]].module_container.spec.stage.sessions))[0]
        for role in ("data", "commit"):
            assert stream_to(model, ring.spans[1].peer, [ControlFrame(Hello(session, 1, role).to_wire())]) is None
        for role in ("data", "commit"):
            unknown = Hello(secrets.token_bytes(16), 1, role)
            assert stream_to(model, ring.spans[1].peer, [ControlFrame(unknown.to_wire())]) is None
        for frame in (NodesFrame(0, 0, 1, ()), CommitFrame(0, 0, 0, (1,))):  # on the control stream of an inner stage
            ring.send(frame, stage=1)
            failure = ring.events.get(timeout=20)
            assert "only" in str(failure)  # the stage's own reason, not that its neighbours lost it
            assert failure.peer == ring.spans[1].peer
            break
    finally:
        ring.close()


def test_a_cut_link_between_stages_is_told_by_its_ends(model: Any, swarm: Any) -> None:
    """Both stages live and answer the client, only their stream to each other is gone."""
    ring = open_ring(model._spec_host, model, model.spec, lanes=1, max_length=64)
    try:
        stage = swarm.servers[ROUTES[4][0]].module_container.spec.stage
        (session,) = stage.sessions.values()
        wait_until(lambda: bool(session.outgoing.links), "the stages link")
        session.loop.call_soon_threadsafe(lambda: session.outgoing.links[0].task.cancel())
        session.loop.call_soon_threadsafe(session.outgoing.links[0]._writer.close)
        failure = ring.events.get(timeout=20)
        assert "lost stage" in str(failure)
        assert failure.peer in (ring.spans[0].peer, ring.spans[1].peer)
    finally:
        ring.close()


def test_a_stage_refuses_what_it_cannot_hold(model: Any) -> None:
    from dataclasses import replace

    from bloombee_spec.client.stage_link import RingError

    ring = open_ring(model._spec_host, model, model.spec, lanes=1, max_length=64)
    infos, spans = ring.infos, ring.spans
    ring.close()
    common: dict[str, Any] = dict(
        lanes=1,
        max_length=64,
        arena=8,
        embed=True,
        verify=True,
        codecs=["raw"] * (len(spans) + 1),
        adapter=None,
        timeout=20,
    )
    for changes, reason in (
        ({"max_length": 1 << 20}, "max_length"),
        ({"lanes": 200}, "lanes"),
        ({"adapter": "none/such"}, "adapter"),
        ({"codecs": ["no-such-codec"] * (len(spans) + 1)}, "codec"),
    ):
        with pytest.raises(RingError, match=reason):
            Ring.open(model._spec_host, model, spans, infos, **{**common, **changes})
    wrong = [replace(span, end=span.end + 3) for span in spans]
    with pytest.raises(RingError, match="are not here"):
        Ring.open(model._spec_host, model, wrong, infos, **common)


def test_late_frames_after_a_rewind_are_ignored(model: Any, toy_local: Any) -> None:
    (ids,) = prompts(1, VOCAB, seed=12)
    with model.inference_session(max_length=96) as session:
        model.generate(ids_of(ids), max_new_tokens=8)
        ring, stream = session._decoder.ring, session._decoder.streams[0]
        for old in (0, stream.epoch - 1):
            ring.send(NodesFrame(0, old, 1, ()))
            ring.broadcast(RewindFrame(0, old, 1))
        assert model.generate(None, max_new_tokens=8)[0].tolist() == reference(toy_local, ids, 16)[8:]


# --- the host stays what it is ------------------------------------------------------------------------------------


def test_a_stock_client_decodes_through_the_same_servers(swarm: Any, model: Any, toy_local: Any) -> None:
    (ids,) = prompts(1, VOCAB, seed=13)
    respec(model, mode="off", strict=False)
    try:
        assert decode(model, ids, 8, do_sample=False) == reference(toy_local, ids, 8)
        assert model.last_stats is None
    finally:
        respec(model, mode="auto", strict=True)


def test_no_attribute_of_a_host_module_changes(swarm: Any, model: Any) -> None:
    """Taken in a fresh process before the plugin is imported, and again after importing, serving and generating."""
    import subprocess

    script = f"""
import sys
def snapshot():
    found = {{}}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in ("bloombee", "petals") and module is not None:
            for key, value in list(vars(module).items()):
                found[name, key] = id(value)
                if isinstance(value, type) and value.__module__.split(".")[0] == name.split(".")[0]:
                    for attribute, inner in vars(value).items():
                        if not attribute.startswith(("_abc", "__doc__", "__weakref__", "__dict__")):
                            found[name, key, attribute] = id(inner)
    return found
from importlib import import_module
for path in ("server.server", "server.handler", "cli.run_server", "client.inference_session", "models.llama.model"):
    import_module("{PACKAGE}." + path)
before = snapshot()
import torch
from benchmarks.inprocess_swarm import InProcessSwarm
from bloombee_spec import AutoDistributedSpecModelForCausalLM, SpecConfig
from bloombee_spec.hosts.base import load_host
from bloombee_spec.server.config import SpecServerConfig
server = load_host().server_class(SpecServerConfig())
with InProcessSwarm({str(swarm.model)!r}, [(0, 8)], server_factory=server) as local:
    model = AutoDistributedSpecModelForCausalLM.from_pretrained(
        {str(swarm.model)!r}, initial_peers=local.initial_peers, dht_prefix=local.dht_prefix,
        torch_dtype=torch.float32, spec=SpecConfig(strict=True))
    model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=5)
    after = snapshot()
    model.close()
# filled by the first RPC, by design
hivemind_caches = {{"_rpc_handlers", "_stub_type", "_event_thread", "_event_loop_fut", "_pid"}}
changed = {{key for key in before if after.get(key) != before[key] and key[-1] not in hivemind_caches}}
print("CHANGED", sorted(map(str, changed)))
sys.stdout.flush()
import os
os._exit(0)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=240, cwd=".", check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("CHANGED")]
    assert lines == ["CHANGED []"], done.stdout[-2000:] + done.stderr[-3000:]


def test_the_plugin_models_are_collected(swarm: Any) -> None:
    """A closed model leaves no thread of the plugin behind."""
    import threading

    with client(swarm, PLAIN, ROUTES[1]) as short:
        decode(short, [1, 2, 3], 3)
    gc.collect()
    names = {thread.name for thread in threading.enumerate()}
    assert not any(name.startswith("spec-draft") for name in names)
