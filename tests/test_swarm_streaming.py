"""`stream` yields what `generate` returns, as it is committed, and leaves nothing behind when it is closed early."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch
from api_helpers import settled
from host_helpers import OLD_PETALS
from swarm_helpers import PLAIN, ROUTES, VOCAB, Knowing, client, decode, free_cache, prompts, reference, respec

from bloombee_spec.client.model import UnsupportedCall
from bloombee_spec.draft.scripted import Script

pytestmark = pytest.mark.swarm
NEW = 24


@pytest.fixture(scope="module")
def model(swarm: Any) -> Any:
    with client(swarm, PLAIN, ROUTES[2]) as connected:
        yield connected


def knowing(toy_local: Any, rows: list[list[int]]) -> Any:
    texts = [[*ids, *reference(toy_local, ids, 2 * NEW)] for ids in rows]
    return lambda: Knowing(texts, VOCAB, Script(1.0))


def test_chunks_are_what_generate_returns_several_tokens_per_lap(model: Any, toy_local: Any) -> None:
    rows = prompts(2, VOCAB, seed=60)
    respec(model, speculate=True, drafter=knowing(toy_local, rows))
    for ids in rows:
        chunks = list(model.stream(torch.tensor([ids]), max_new_tokens=NEW))
        assert [token for chunk in chunks for token in chunk] == reference(toy_local, ids, NEW)
        assert all(chunks) and model.last_stats.tokens == NEW and model.last_stats.laps < NEW
        assert all(stage is not None for stage in model.last_stats.stages)


def test_relay_mode_streams_the_same(model: Any, toy_local: Any) -> None:
    (ids,) = prompts(1, VOCAB, seed=61)
    respec(model, mode="relay", speculate=True, drafter=knowing(toy_local, [ids]))
    chunks = list(model.stream(torch.tensor([ids]), max_new_tokens=NEW))
    assert [token for chunk in chunks for token in chunk] == reference(toy_local, ids, NEW)
    assert model.last_stats.mode == "relay"
    assert len(chunks) < NEW or OLD_PETALS, "several per lap, where servers can step back"


def test_closing_early_frees_the_servers_within_a_lap(swarm: Any, model: Any) -> None:
    (ids,) = prompts(1, VOCAB, seed=62)
    respec(model, mode="auto", speculate=False)
    before = free_cache(swarm)
    stream = model.stream(torch.tensor([ids]), max_new_tokens=500)
    taken = list(itertools.islice(stream, 3))
    assert len(taken) == 3 and free_cache(swarm) != before
    stream.close()
    assert settled(swarm, before)
    assert model.last_stats.tokens < 20, "the generation went on"


def test_a_session_goes_on_behind_a_stream_that_was_closed(model: Any, toy_local: Any) -> None:
    (ids,) = prompts(1, VOCAB, seed=63)
    respec(model, speculate=False)
    whole = reference(toy_local, ids, 2 * NEW)
    with model.inference_session(max_length=len(ids) + 500) as session:
        stream = model.stream(torch.tensor([ids]), max_new_tokens=450)
        taken = [*next(stream), *next(stream)]
        stream.close()
        assert session.output_ids.tolist() == [[*ids, *taken]] and taken == whole[: len(taken)]
        assert unread(session) < 200, "the stages, which start tokens by themselves, went on"
        more = [token for chunk in model.stream(None, max_new_tokens=NEW) for token in chunk]
        assert more == whole[len(taken) : len(taken) + NEW]
        assert model.generate(None, max_new_tokens=4).tolist() == [whole[len(taken) + NEW :][:4]]


def unread(session: Any) -> int:
    """Commits that arrived and nobody took, once no more arrive."""
    events, before = session._decoder.ring.events, -1
    while before != (before := events.qsize()):
        time.sleep(0.5)
    return before


def test_eos_and_criteria_end_a_stream_where_they_end_generate(model: Any, toy_local: Any) -> None:
    (ids,) = prompts(1, VOCAB, seed=64)
    respec(model, speculate=True, drafter=knowing(toy_local, [ids]))
    whole = reference(toy_local, ids, NEW)
    for options in (
        {"eos_token_id": whole[7]},
        {"stopping_criteria": [lambda tokens, scores: tokens.shape[1] >= len(ids) + 5]},
    ):
        streamed = [t for chunk in model.stream(torch.tensor([ids]), max_new_tokens=NEW, **options) for t in chunk]
        assert streamed == decode(model, ids, NEW, **options)
        assert len(streamed) < NEW


def test_rows_stream_on_their_own_and_one_can_be_stopped(model: Any, toy_local: Any) -> None:
    ids = prompts(1, VOCAB, seed=65)[0]
    respec(model, speculate=False)
    got: list[list[int]] = [[], []]
    rows = model.stream_rows(torch.tensor([ids, ids[::-1]]), max_new_tokens=NEW)
    for row, tokens in rows:
        got[row] += tokens
        if row == 0 and len(got[0]) == 3:
            rows.stop(0)
    assert got[0] == reference(toy_local, ids, 3) and got[1] == reference(toy_local, ids[::-1], NEW)
    assert rows.stats is model.last_stats


def test_seed_and_penalties_of_one_call(model: Any) -> None:
    (ids,) = prompts(1, VOCAB, seed=66)
    inputs = torch.tensor([ids])

    def streamed(**options: Any) -> list[int]:
        return [token for chunk in model.stream(inputs, max_new_tokens=NEW, **options) for token in chunk]

    respec(model, seed=9, speculate=True, drafter="suffix")
    warm = {"do_sample": True, "top_k": 0}
    assert streamed(**warm) == decode(model, ids, NEW, **warm)
    assert streamed(seed=5, **warm) != streamed(seed=9, **warm) == decode(model, ids, NEW, **warm)
    assert streamed(seed=0, **warm) == streamed(seed=0, **warm) != streamed(seed=9, **warm)
    never_twice = streamed(presence_penalty=100.0)
    assert len(set(never_twice)) == NEW, "each token once: its score falls by 100 then"
    assert streamed(frequency_penalty=100.0) == never_twice
    with pytest.raises(ValueError, match="presence_penalty must be in"):
        streamed(presence_penalty=1000.0)


def test_what_the_plugin_cannot_serve_goes_the_hosts_way_or_is_refused(swarm: Any, toy_local: Any) -> None:
    (ids,) = prompts(1, VOCAB, seed=67)
    with client(swarm, PLAIN, ROUTES[2]) as model:
        respec(model, mode="off", strict=False)
        before = free_cache(swarm)
        chunks = list(model.stream(torch.tensor([ids]), max_new_tokens=6))
        assert [token for chunk in chunks for token in chunk] == reference(toy_local, ids, 6)
        assert model.last_stats is None
        stream = model.stream(torch.tensor([ids]), max_new_tokens=400)
        next(stream)
        stream.close()
        assert settled(swarm, before)
        with pytest.raises(UnsupportedCall, match="cannot honour presence_penalty, seed"):
            model.stream(torch.tensor([ids]), max_new_tokens=6, seed=1, presence_penalty=1.0)
        with pytest.raises(ValueError, match="streams one row"):
            model.stream(torch.tensor([ids, ids]), max_new_tokens=6)
        respec(model, mode="off", strict=True)
        with pytest.raises(UnsupportedCall, match="mode is off"):
            model.stream(torch.tensor([ids]), max_new_tokens=6)


def test_arguments_are_judged_at_once(model: Any) -> None:
    with pytest.raises(ValueError, match="takes one row"):
        model.stream(torch.tensor([[1, 2], [3, 4]]), max_new_tokens=4)
    with pytest.raises(ValueError, match="streamer goes with generate"):
        model.stream(torch.tensor([[1, 2]]), max_new_tokens=4, streamer=object())
    with pytest.raises(ValueError, match="nothing to generate"):
        model.stream(torch.tensor([[1, 2]]), max_length=2)
