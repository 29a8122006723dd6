"""The promise: the same tokens as local transformers, for every route, drafter, tree and batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from swarm_helpers import HOSTILE, PLAIN, ROUTES, VOCAB, Knowing, client, decode, prompts, reference, replayed, respec

from bloombee_spec import SpecConfig
from bloombee_spec.draft.scripted import Hostility, Script

pytestmark = pytest.mark.swarm
NEW = 64
SCRIPTS = {
    "chain h=0.9": Script(0.9),
    "chain h=0.5": Script(0.5, depth=8),
    "tree": Script(0.6, siblings=(0.2, 0.1), depth=6),
    **HOSTILE,
    "empty": Script(0.5, hostility=Hostility.EMPTY),
}


@pytest.fixture(scope="module")
def expected(toy_local: Any) -> list[tuple[list[int], list[int]]]:
    return [(ids, reference(toy_local, ids, NEW)) for ids in prompts(30, VOCAB)]


@pytest.fixture(scope="module", params=sorted(ROUTES))
def stages(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def model(swarm: Any, stages: int) -> Any:
    with client(swarm, PLAIN, ROUTES[stages]) as connected:
        yield connected


def test_plain_decoding_needs_one_lap_per_token(model: Any, expected: Any) -> None:
    respec(model, speculate=False, drafter="none")
    ids, target = expected[0]
    assert decode(model, ids, NEW) == target
    stats = model.last_stats
    assert (stats.laps, stats.misses, stats.hits, stats.proposed) == (NEW, NEW, 0, 0)
    stages = len(stats.route)
    assert stats.rows_computed <= stages * (len(ids) + NEW)  # every row once per stage


def test_suffix_drafter_is_exact(model: Any, stages: int, expected: Any) -> None:
    respec(model, speculate=True, drafter="suffix")
    for ids, target in expected if stages == 4 else expected[:6]:
        assert decode(model, ids, NEW) == target


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_drafter_is_exact(model: Any, stages: int, expected: Any, name: str) -> None:
    texts = [replayed(name, ids, target, VOCAB) for ids, target in expected]
    respec(model, speculate=True, drafter=lambda: Knowing(texts, VOCAB, SCRIPTS[name]))
    for ids, target in expected[: 5 if stages == 4 else 1]:
        assert decode(model, ids, NEW) == target
    stats = model.last_stats
    assert stats.misses <= stats.laps <= stats.misses + 1  # one lap per miss, and the first one
    if name == "always right":
        assert stats.laps <= 3 and stats.hits >= NEW - 3
    if name == "always wrong":
        assert stats.hits == 0 and stats.laps == NEW
        assert 0 < stats.proposed < 20 * NEW  # believed at first, then silenced


def test_batch_with_ragged_acceptance(model: Any, expected: Any) -> None:
    texts = [[*ids, *target] for ids, target in expected]
    scripts = iter([Script(0.0), Script(0.5), Script(1.0)] * 4)
    respec(model, speculate=True, drafter=lambda: Knowing(texts, VOCAB, next(scripts)))
    chosen = [expected[0], expected[1], expected[2]]
    width = max(len(ids) for ids, _ in chosen)
    inputs = torch.tensor([[7] * (width - len(ids)) + ids for ids, _ in chosen])
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids, _ in chosen])
    out = model.generate(inputs, attention_mask=mask, max_new_tokens=40)
    assert out[:, :width].tolist() == inputs.tolist()
    assert out[:, width:].tolist() == [target[:40] for _, target in chosen]


@pytest.mark.parametrize(
    "changes", [{"client_verifies": True}, {"client_embeds": True}, {"client_verifies": True, "client_embeds": True}]
)
@pytest.mark.parametrize("drafter", ["none", "tree"])
def test_ends_of_the_model_at_the_client(
    model: Any, stages: int, expected: Any, changes: dict[str, bool], drafter: str
) -> None:
    texts = [[*ids, *target] for ids, target in expected]
    make = (lambda: Knowing(texts, VOCAB, SCRIPTS["tree"])) if drafter == "tree" else "none"
    respec(model, speculate=drafter != "none", drafter=make, **changes)
    try:
        for ids, target in expected[: 3 if stages == 4 else 1]:
            assert decode(model, ids, NEW) == target
        if drafter == "none":
            assert model.last_stats.laps == NEW
    finally:
        respec(model, client_verifies=False, client_embeds=False)


def test_tiny_credits(model: Any, stages: int, expected: Any) -> None:
    texts = [[*ids, *target] for ids, target in expected]
    respec(
        model,
        speculate=True,
        drafter=lambda: Knowing(texts, VOCAB, Script(0.7, siblings=(0.2,))),
        max_candidates=3,
        burst=2,
    )
    try:
        for ids, target in expected[: 3 if stages == 4 else 1]:
            assert decode(model, ids, NEW) == target
    finally:
        respec(model, max_candidates=SpecConfig().max_candidates, burst=SpecConfig().burst)
