"""Relay mode: speculation on plain servers. The same tokens as local transformers, in fewer steps of the host."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from host_helpers import host_module, not_on_old_petals, only_on
from swarm_helpers import VOCAB, Knowing, client, decode, prompts, reference, respec

from bloombee_spec import SpecConfig
from bloombee_spec.choose import make_chooser
from bloombee_spec.client import connection, relay
from bloombee_spec.client.model import UnsupportedCall
from bloombee_spec.client.relay import RelayError
from bloombee_spec.draft.base import Drafter
from bloombee_spec.draft.scripted import Hostility, Script
from bloombee_spec.sampling.spec import SamplingSpec

pytestmark = pytest.mark.swarm
NEW = 24
PLAIN, MIXED, EVERYTHING = (0, 1), (2, 1), (0, 1, 2, 3)  # servers 0 and 1 are the host's own, 2 and 3 have the plugin
RELAY = SpecConfig(strict=True, drafter="none")
SCRIPTS = {
    "h=0.9": Script(0.9),
    "tree": Script(0.6, siblings=(0.2, 0.1), depth=6),
    "random ids": Script(0.5, hostility=Hostility.RANDOM),
    "duplicates": Script(0.9, hostility=Hostility.DUPLICATES),
    "empty": Script(0.5, hostility=Hostility.EMPTY),
}


speculates = not_on_old_petals  # whose servers cannot go back to an earlier position


@pytest.fixture(scope="module")
def servers(toy_path: Any) -> Iterator[Any]:
    """Two plain servers (0, 1) and two with the plugin (2, 3), each pair covers all blocks."""
    from benchmarks.inprocess_swarm import InProcessSwarm
    from bloombee_spec.hosts.base import load_host
    from bloombee_spec.server.config import SpecServerConfig

    stock = host_module("server.server").Server
    kinds = iter([stock, stock] + [load_host().server_class(SpecServerConfig())] * 2)
    with InProcessSwarm(
        toy_path, [(0, 4), (4, 8)] * 2, server_factory=lambda **arguments: next(kinds)(**arguments)
    ) as running:
        yield running


@pytest.fixture(scope="module")
def model(servers: Any) -> Iterator[Any]:
    with client(servers, RELAY, PLAIN) as connected:
        yield connected


@pytest.fixture(scope="module")
def expected(toy_local: Any) -> list[tuple[list[int], list[int]]]:
    return [(ids, reference(toy_local, ids, 2 * NEW)) for ids in prompts(6, VOCAB)]


def _knowing(expected: Any, script: Script) -> Callable[[], Drafter]:
    texts = [[*ids, *target] for ids, target in expected]
    return lambda: Knowing(texts, VOCAB, script)


def _padded(rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, rows))
    ids = [[7] * (width - len(row)) + list(row) for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids), torch.tensor(mask)


def _bytes_left(servers: Any, which: Sequence[int] = PLAIN) -> list[int]:
    containers = [servers.servers[i].module_container for i in which]
    return [next(iter(container.module_backends.values())).memory_cache.bytes_left for container in containers]


@contextmanager
def _logged(name: str) -> Iterator[list[str]]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(name).addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger(name).removeHandler(handler)


class Caller:
    """A streamer that does something once, after some tokens."""

    def __init__(self, after: int, action: Callable[[], None]):
        self._left, self._action = after + 1, action  # the prompt comes first

    def put(self, tokens: torch.Tensor) -> None:
        self._left -= 1
        if self._left == 0:
            self._action()

    def end(self) -> None: ...


def test_without_a_drafter_each_token_is_a_lap(model: Any, expected: Any) -> None:
    ids, target = expected[0]
    assert decode(model, ids, NEW) == target[:NEW]
    stats = model.last_stats
    assert (stats.mode, stats.tokens, stats.laps, stats.misses) == ("relay", NEW, NEW, NEW)
    assert (stats.hits, stats.proposed, stats.bytes_up, stats.bytes_down) == (0, 0, 0, 0)
    assert stats.rows_computed == 2 * (len(ids) + NEW - 1)  # each row once per server: what was computed stays in use
    assert [line.split()[0] for line in stats.route] == ["0:4", "4:8"]


@speculates
def test_acceptance_of_nine_tenths_saves_laps(model: Any, expected: Any) -> None:
    respec(model, drafter=_knowing(expected, SCRIPTS["h=0.9"]))
    for ids, target in expected[:3]:
        assert decode(model, ids, NEW) == target[:NEW]
        stats = model.last_stats
        assert stats.laps <= NEW // 2
        assert stats.hits + stats.misses == stats.tokens == NEW and stats.misses <= stats.laps
        assert stats.hits <= stats.proposed == sum(stats.sent_by_depth.values())
        assert stats.hits == sum(stats.hits_by_depth.values())
        wasted = stats.proposed - stats.hits
        assert stats.rows_computed <= 2 * (len(ids) + NEW - 1 + wasted)


@only_on("petals", "2.2.0.post1")
def test_servers_that_cannot_step_back_get_no_candidates(model: Any, expected: Any) -> None:
    respec(model, drafter=_knowing(expected, Script(1.0)))
    ids, target = expected[0]
    assert decode(model, ids, NEW) == target[:NEW]
    stats = model.last_stats
    assert (stats.mode, stats.laps, stats.proposed) == ("relay", NEW, 0)


@pytest.mark.parametrize("name", ["suffix", *SCRIPTS])
def test_every_drafter_is_exact(model: Any, expected: Any, name: str) -> None:
    respec(model, drafter=name if name == "suffix" else _knowing(expected, SCRIPTS[name]))
    for ids, target in expected[-2:]:
        assert decode(model, ids, NEW) == target[:NEW]
        assert model.last_stats.mode == "relay"


@speculates
@pytest.mark.parametrize("new", [1, 2, 3])
def test_no_token_beyond_the_limit(model: Any, expected: Any, new: int) -> None:
    respec(model, drafter=_knowing(expected, Script(1.0)))
    ids, target = expected[0]
    assert decode(model, ids, new) == target[:new]
    assert (model.last_stats.tokens, model.last_stats.laps, model.last_stats.proposed) == (new, 1, new - 1)


def test_batch_with_ragged_acceptance_and_left_padding(servers: Any, model: Any, expected: Any) -> None:
    before = _bytes_left(servers)
    drafters = iter(_knowing(expected, Script(h))() for h in (0.0, 0.5, 1.0))
    respec(model, drafter=lambda: next(drafters))
    inputs, mask = _padded([ids for ids, _ in expected[:3]])
    assert not mask.all()
    out = model.generate(inputs, attention_mask=mask, max_new_tokens=NEW)
    assert out[:, : inputs.shape[1]].tolist() == inputs.tolist()
    assert out[:, inputs.shape[1] :].tolist() == [target[:NEW] for _, target in expected[:3]]
    assert model.last_stats.laps == NEW and model.last_stats.tokens == 3 * NEW
    assert _bytes_left(servers) == before


def test_stop_token_inside_an_accepted_run_ends_the_row_there(model: Any, expected: Any) -> None:
    respec(model, drafter=_knowing(expected, Script(1.0)))
    for ids, target in expected[:2]:
        stop = next(token for token in target[3:] if target.index(token) >= 3)
        kept = target[: target.index(stop) + 1]
        assert decode(model, ids, NEW, eos_token_id=[VOCAB - 1 if VOCAB - 1 not in kept else stop, stop]) == kept
        assert model.last_stats.tokens == len(kept)
    inputs, mask = _padded([ids for ids, _ in expected[:2]])
    stop = next(token for token in expected[0][1][3:] if token not in expected[0][1][:3])
    out = model.generate(inputs, attention_mask=mask, max_new_tokens=NEW, eos_token_id=stop, pad_token_id=1)
    for row, (_, target) in zip(out[:, inputs.shape[1] :].tolist(), expected):
        kept = target[:NEW][: target.index(stop) + 1] if stop in target[:NEW] else target[:NEW]
        assert row == kept + [1] * (len(row) - len(kept))


@pytest.mark.parametrize("how", ["stop token", "criterion"])
def test_several_calls_in_one_session(model: Any, expected: Any, toy_local: Any, how: str) -> None:
    """The second call starts in the middle of what the first, which ended inside an accepted run, left at the
    servers."""
    ids, target = expected[0]
    stop = next(token for token in target[4:] if target.index(token) >= 4)
    first = target[: target.index(stop) + 1]
    more = [3, 0, 2, 9]
    second = reference(toy_local, [*ids, *first, *more], NEW)
    respec(model, drafter=lambda: Knowing([[*ids, *target], [*ids, *first, *more, *second]], VOCAB, Script(1.0)))
    options: dict[str, Any] = {"eos_token_id": stop}
    if how == "criterion":
        options = {"stopping_criteria": [lambda ids, _: torch.tensor([int(ids[0, -1]) == stop])]}
    with model.inference_session(max_length=len(ids) + len(first) + len(more) + 2 * NEW) as session:
        out = model.generate(torch.tensor([ids]), max_new_tokens=NEW, **options)
        assert out[0].tolist() == [*ids, *first] and model.last_stats.tokens == len(first)
        out = model.generate(torch.tensor([more]), max_new_tokens=NEW)
        assert out[0].tolist() == [*more, *second]
        stats = model.last_stats
        assert stats.rows_computed // 2 <= len(more) + 1 + NEW + stats.proposed - stats.hits  # no row twice
        edited = [*ids, *first[:2], 5, 1]
        session.output_ids = torch.tensor([edited])
        session._decoder.streams[0].drafter = None
        out = model.generate(None, max_new_tokens=6)
        assert out[0].tolist() == reference(toy_local, edited, 6)
        assert session.mode == "relay"


@speculates
def test_long_prompt_takes_several_steps(model: Any, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "STEP_ROWS", 4)
    monkeypatch.setattr(relay, "STEP_ROWS", 4)
    respec(model, drafter=_knowing(expected, Script(0.9)))
    ids, target = expected[3]
    assert decode(model, ids, NEW) == target[:NEW]
    stats = model.last_stats
    assert max(stats.sent_by_depth) <= 3 and stats.laps >= (len(ids) + 3) // 4 + (NEW - 4) // 4


def test_sampling_does_not_depend_on_the_drafter(model: Any, expected: Any, toy_local: Any) -> None:
    ids = expected[0][0]
    options = {"do_sample": True, "temperature": 0.8, "top_k": 20}
    spec = SamplingSpec(prompt_length=len(ids), do_sample=True, temperature=0.8, top_k=20, seed=5)
    chooser = make_chooser(spec.to_wire(), 0, VOCAB)
    tokens = list(ids)
    with torch.inference_mode():
        for _ in range(NEW):
            tokens.append(chooser(toy_local(torch.tensor([tokens])).logits[0, -1], tokens))
    texts = [(ids, tokens[len(ids) :])]
    assert texts[0][1] != expected[0][1][:NEW]
    for drafter in ("none", _knowing(texts, Script(0.9)), _knowing(texts, SCRIPTS["random ids"])):
        respec(model, drafter=drafter, seed=5)
        assert decode(model, ids, NEW, **options) == texts[0][1]
    respec(model, seed=None)


def test_caller_that_breaks_off_leaves_nothing_behind(servers: Any, model: Any, expected: Any) -> None:
    before = _bytes_left(servers)
    respec(model, drafter=_knowing(expected, Script(0.5)))
    inputs, mask = _padded([ids for ids, _ in expected[:3]])
    flying: list[Any] = []  # host sessions; held here, so that no garbage collector ends them

    def fail() -> None:
        streams = model.active_session._decoder.streams
        flying.extend(stream.connection.session for stream in streams if stream.lap is not None)
        raise ZeroDivisionError

    with model.inference_session(max_length=inputs.shape[1] + NEW) as active:
        with pytest.raises(ZeroDivisionError):
            model.generate(inputs, attention_mask=mask, max_new_tokens=NEW, streamer=Caller(4, fail))
        out = model.generate(inputs, attention_mask=mask, max_new_tokens=NEW)
        assert out[:, inputs.shape[1] :].tolist() == [target[:NEW] for _, target in expected[:3]]
        assert not any(stream.connection.session in flying for stream in active._decoder.streams)
        assert model.last_stats.retries == 0
    deadline = time.monotonic() + 30
    while not all(session._closed for session in flying) and time.monotonic() < deadline:
        time.sleep(0.05)  # each ends with its lap
    assert flying and all(session._closed and not session._server_sessions for session in flying)
    while _bytes_left(servers) != before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _bytes_left(servers) == before


def test_reason_is_said_once_and_ring_mode_refuses(
    servers: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, target = expected[0]
    looks = list[None]()
    with client(servers, RELAY, MIXED) as model, _logged("bloombee_spec.client.session") as said:
        host = model._spec_host
        again = host.look_again
        monkeypatch.setattr(host, "look_again", lambda model: (looks.append(None), again(model)))
        for _ in range(2):
            assert decode(model, ids, 4) == target[:4] and model.last_stats.mode == "relay"
        assert len(looks) == 1, "a swarm without the plugin is not searched again for each call"
        respec(model, mode="ring")
        with pytest.raises(UnsupportedCall, match=r"blocks 4\.\.7 have no server with the plugin"):
            decode(model, ids, 4)
    assert len(said) == 1 and "relay mode" in said[0] and "blocks 4..7 have no server with the plugin" in said[0]


def test_relay_where_the_whole_swarm_has_the_plugin_only_if_asked(servers: Any, expected: Any) -> None:
    ids, target = expected[0]
    with client(servers, RELAY, EVERYTHING) as model:
        assert decode(model, ids, 4) == target[:4] and model.last_stats.mode == "ring"
        respec(model, mode="relay", drafter=_knowing(expected, Script(1.0)))
        assert decode(model, ids, 4) == target[:4] and model.last_stats.mode == "relay"


# --- servers that stall, or leave for good; each of the latter tests takes one away, so their order matters ---------


def test_lap_that_never_ends_is_given_up(model: Any, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host can hang before it sends anything, where none of its own limits counts: here in the first session."""
    released, opened = threading.Event(), []
    host = model._spec_host
    new_session = host.new_session

    def hanging(*args: Any, **kwargs: Any) -> Any:
        session = new_session(*args, **kwargs)
        if not opened:
            session.step = lambda *_: released.wait(60)
        opened.append(session)
        return session

    monkeypatch.setattr(host, "new_session", hanging)
    respec(model, drafter="none", connect_timeout=0.0, stall_timeout=4.0)
    try:
        assert decode(model, expected[0][0], 4) == expected[0][1][:4]
        assert model.last_stats.retries >= 1 and not opened[0]._closed
    finally:
        released.set()
        respec(model, connect_timeout=SpecConfig().connect_timeout, stall_timeout=SpecConfig().stall_timeout)
    deadline = time.monotonic() + 30
    while not opened[0]._closed and time.monotonic() < deadline:
        time.sleep(0.05)
    assert opened[0]._closed


def test_stream_leaves_a_server_that_does_not_answer(servers: Any, expected: Any) -> None:
    """Its processes are stopped in the middle of a stream: neither the lap nor closing the session may wait for it."""
    inputs, mask = _padded([ids for ids, _ in expected[:2]])
    with client(servers, RELAY, (0, 1, 2)) as model, _logged("bloombee_spec.client.relay") as said:
        respec(model, mode="relay", drafter=_knowing(expected, Script(0.5)), stall_timeout=1.5)
        frozen: list[Any] = []

        def freeze() -> None:
            first = model.active_session._decoder.streams[0].route[0]
            index = next(i for i in (0, 2) if servers.servers[i].dht.peer_id.to_base58() == first.peer)
            frozen.extend(child for child in servers._children[index] if child.is_running())
            for child in frozen:
                child.suspend()

        try:
            with model.inference_session(max_length=inputs.shape[1] + NEW):
                out = model.generate(inputs, attention_mask=mask, max_new_tokens=NEW, streamer=Caller(5, freeze))
            assert out[:, inputs.shape[1] :].tolist() == [target[:NEW] for _, target in expected[:2]]
            assert model.last_stats.retries >= 1
        finally:
            for child in frozen:
                child.resume()
    assert frozen
    assert not any("in time" in line for line in said)  # it was the server's own time limit, so the server is banned


def test_ring_that_loses_its_last_plugin_server_goes_on_as_relay(servers: Any, expected: Any) -> None:
    ids, target = expected[1]
    with client(servers, RELAY, (1, 2, 3)) as model:
        respec(model, drafter=_knowing(expected, Script(0.5)))
        assert decode(model, ids, 2) == target[:2] and model.last_stats.mode == "ring"
        # Without a word: told to stop, it would serve this text to its end.
        out = decode(model, ids, 2 * NEW, streamer=Caller(5, servers.servers[3].module_container.spec.shutdown))
        servers.stop_server(3)
        assert out == target and model.last_stats.mode == "relay"


def test_stream_moves_to_another_server(servers: Any, expected: Any) -> None:
    with client(servers, RELAY, (0, 1, 2)) as model:
        respec(model, mode="relay", drafter=_knowing(expected, Script(0.5)))
        inputs, mask = _padded([ids for ids, _ in expected[:2]])
        peers = {servers.servers[i].dht.peer_id.to_base58(): i for i in (0, 1, 2)}
        left: list[int] = []

        def leave() -> None:
            first = model.active_session._decoder.streams[0].route[0]
            left.append(peers[first.peer])
            servers.stop_server(left[0])

        with model.inference_session(max_length=inputs.shape[1] + NEW):
            out = model.generate(inputs, attention_mask=mask, max_new_tokens=NEW, streamer=Caller(5, leave))
        assert out[:, inputs.shape[1] :].tolist() == [target[:NEW] for _, target in expected[:2]]
        assert model.last_stats.retries >= 1 and left[0] in (0, 2)
        assert not any(
            line.endswith(peer) for line in model.last_stats.route for peer, i in peers.items() if i == left[0]
        )


def test_failure_is_raised_once_retries_are_used_up(servers: Any, expected: Any) -> None:
    with client(servers, RELAY, (0, 1, 2)) as model:
        respec(model, mode="relay", max_retries=0)
        model.transformer.h.sequence_manager.config.max_retries = None  # the host's default: for ever
        with pytest.raises(RelayError, match="failed 1 times") as failure:
            decode(model, expected[0][0], NEW, streamer=Caller(3, lambda: servers.stop_server(1)))
        assert "in time" not in str(failure.value)  # at once, not when the host had retried for long enough
