"""Seeded sampling on a real swarm: a function of prompt, seed and model, whatever the drafter, the tree and the
timing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from swarm_helpers import PLAIN, ROUTES, VOCAB, Knowing, client, decode, prompts, respec

from bloombee_spec.draft.scripted import Script

pytestmark = pytest.mark.swarm
NEW = 24
OPTIONS: dict[str, dict[str, Any]] = {
    "warm": {"do_sample": True, "temperature": 0.7, "top_k": 0},
    "nucleus": {"do_sample": True, "temperature": 1.0, "top_k": 40, "top_p": 0.9},
    "penalties": {"do_sample": True, "temperature": 1.3, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    "greedy with a processor": {"do_sample": False, "repetition_penalty": 1.5},
}


@pytest.fixture(scope="module")
def model(swarm: Any) -> Any:
    with client(swarm, PLAIN, ROUTES[2]) as connected:
        yield connected


@pytest.mark.parametrize("name", OPTIONS)
def test_same_seed_same_tokens_with_any_drafter(model: Any, name: str) -> None:
    options, rows = OPTIONS[name], prompts(3, VOCAB, seed=20)
    respec(model, seed=7, speculate=False, drafter="none")
    plain = [decode(model, ids, NEW, **options) for ids in rows]
    texts = [[*ids, *out] for ids, out in zip(rows, plain)]
    for drafter in ("suffix", lambda: Knowing(texts, VOCAB, Script(0.7, siblings=(0.15,)))):
        for at_client in (False, True):
            respec(model, seed=7, speculate=True, drafter=drafter, client_verifies=at_client)
            assert [decode(model, ids, NEW, **options) for ids in rows] == plain
            hits = model.last_stats.hits
    respec(model, client_verifies=False)
    assert hits > 0  # of the drafter that knows the sampled text


def test_rows_of_a_batch_and_seeds_draw_differently(model: Any) -> None:
    (ids,) = prompts(1, VOCAB, seed=21)
    respec(model, seed=3, speculate=False, drafter="none", client_verifies=False)
    batch = torch.tensor([ids] * 3)
    mask = torch.ones_like(batch)
    out = model.generate(batch, attention_mask=mask, max_new_tokens=NEW, do_sample=True, top_k=0)[
        :, len(ids) :
    ].tolist()
    assert len({tuple(row) for row in out}) == 3
    assert out[0] == decode(model, ids, NEW, do_sample=True, top_k=0)  # row 0 alone is row 0 of a batch
    respec(model, seed=4)
    assert decode(model, ids, NEW, do_sample=True, top_k=0) != out[0]


def test_top_k_of_one_is_greedy_and_a_high_temperature_is_not(model: Any, toy_local: Any) -> None:
    from swarm_helpers import reference

    (ids,) = prompts(1, VOCAB, seed=22)
    respec(model, seed=5, speculate=True, drafter="suffix")
    greedy = reference(toy_local, ids, NEW)
    assert decode(model, ids, NEW, do_sample=True, top_k=1, temperature=0.9) == greedy
    assert decode(model, ids, NEW, do_sample=True, top_k=0, temperature=3.0) != greedy


def test_torch_seed_is_the_default_key(model: Any) -> None:
    (ids,) = prompts(1, VOCAB, seed=23)
    respec(model, seed=None)
    torch.manual_seed(11)
    first, second = (decode(model, ids, NEW, do_sample=True, top_k=0) for _ in range(2))
    torch.manual_seed(11)
    assert decode(model, ids, NEW, do_sample=True, top_k=0) == first
    assert first != second
