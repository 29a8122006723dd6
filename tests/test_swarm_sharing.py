"""Several callers on the same servers, and what a decoded token costs the last stage."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from connect_helpers import at_once
from swarm_helpers import PLAIN, ROUTES, SUFFIX, VOCAB, Knowing, client, decode, prompts, reference, respec

from bloombee_spec import SpecConfig
from bloombee_spec.draft.scripted import Hostility, Script

pytestmark = pytest.mark.swarm
NEW = 32
SCRIPTS = {
    "always right": Script(1.0),
    "always wrong": Script(0.9, hostility=Hostility.RANDOM),
    "tree": Script(0.6, siblings=(0.2, 0.1), depth=6),
}


@pytest.fixture(scope="module")
def model(swarm: Any) -> Iterator[Any]:
    with client(swarm, SUFFIX, ROUTES[4]) as connected:
        yield connected


def expected_of(local: Any, seed: int, n: int = 3) -> list[tuple[list[int], list[int]]]:
    return [(ids, reference(local, ids, NEW)) for ids in prompts(n, VOCAB, seed=seed)]


# --- at once ------------------------------------------------------------------------------------------------------


def test_a_stock_client_and_a_plugin_client_decode_at_once(swarm: Any, model: Any, toy_local: Any) -> None:
    texts = expected_of(toy_local, seed=40)
    known = [[*ids, *target] for ids, target in texts]
    respec(model, drafter=partial(Knowing, known, VOCAB, SCRIPTS["tree"]))
    with client(swarm, SpecConfig(mode="off"), ROUTES[4]) as stock:

        def of_stock() -> list[list[int]]:
            return [decode(stock, ids, NEW, do_sample=False) for ids, _ in texts[:2]]

        def of_plugin() -> list[list[int]]:
            return [decode(model, ids, NEW) for ids, _ in texts * 3]

        through_host, through_ring = at_once(of_stock, of_plugin)
    assert stock.last_stats is None and model.last_stats.mode == "ring"
    assert through_host == [target for _, target in texts[:2]]
    assert through_ring == [target for _, target in texts] * 3


@pytest.mark.parametrize("drafter", ["none", "suffix"])
def test_calls_in_two_threads_on_one_model_are_both_exact(model: Any, toy_local: Any, drafter: str) -> None:
    texts = expected_of(toy_local, seed=41, n=4)
    respec(model, drafter=drafter)
    first, second = at_once(
        lambda: [decode(model, ids, NEW) for ids, _ in texts[:2]],
        lambda: [decode(model, ids, NEW) for ids, _ in texts[2:]],
    )
    assert first + second == [target for _, target in texts]


def test_two_plugin_clients_of_one_server_take_turns(swarm: Any, model: Any, toy_local: Any) -> None:
    """Rows of both share forwards where their blocks agree, and stay apart where they do not."""
    texts = expected_of(toy_local, seed=42)
    respec(model, drafter="suffix")
    with client(swarm, PLAIN, (3, 2, 4, 1, 7, 6)) as other:
        found = at_once(
            lambda: [decode(model, ids, NEW) for ids, _ in texts],
            lambda: [decode(other, ids, NEW) for ids, _ in texts],
        )
    assert found == [[target for _, target in texts]] * 2


# --- the LM head --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_lm_head_sees_only_rows_that_become_the_root(swarm: Any, toy_local: Any, name: str) -> None:
    """As many rows as committed tokens, however many candidates came by."""
    server = swarm.servers[ROUTES[2][-1]].module_container.spec
    texts = expected_of(toy_local, seed=43, n=2)
    known = [[*ids, *target] for ids, target in texts]
    rows: list[int] = []
    head = server._heads.logits

    def counted(hidden: torch.Tensor) -> torch.Tensor:
        rows.append(hidden.shape[0])
        return head(hidden)  # type: ignore[no-any-return]

    server._heads.logits = counted  # sessions that open from now on
    try:
        spec = SpecConfig(
            strict=True, plan="none", min_probability=0.0, drafter=partial(Knowing, known, VOCAB, SCRIPTS[name])
        )
        with client(swarm, spec, ROUTES[2]) as model:
            for ids, target in texts:
                with model.inference_session(max_length=len(ids) + NEW):
                    assert model.generate(torch.tensor([ids]), max_new_tokens=NEW)[0, len(ids) :].tolist() == target
                    (session,) = server.stage.sessions.values()
                    assert session.verifiers[0].head_rows == NEW
                assert model.last_stats.proposed > (NEW if name == "tree" else 0)
    finally:
        del server._heads.logits
    assert sum(rows) == NEW * len(texts)


# --- long prompts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["none", "suffix"])
def test_a_prompt_of_several_chunks(model: Any, toy_local: Any, drafter: str) -> None:
    respec(model, drafter=drafter)
    for length in (256, 257, 700):
        ids = prompts(1, VOCAB, length=length, seed=44)[0]
        assert decode(model, ids, 12) == reference(toy_local, ids, 12), f"a prompt of {length} tokens"


@pytest.mark.parametrize("new", [1, 2, 3])
def test_a_prompt_that_almost_fills_its_session(model: Any, toy_local: Any, new: int) -> None:
    """Candidates never go beyond the end, although the drafter would."""
    (ids,) = prompts(1, VOCAB, length=120, seed=45)
    target = reference(toy_local, ids, 64)
    respec(model, drafter=partial(Knowing, [[*ids, *target]], VOCAB, Script(1.0)))
    with model.inference_session(max_length=len(ids) + new):
        out = model.generate(torch.tensor([ids]), max_new_tokens=new)
        assert out[0, len(ids) :].tolist() == target[:new]
        assert model.last_stats.proposed < new
        with pytest.raises(ValueError, match="maximum length exceeded"):
            model.generate(None, max_new_tokens=1)
    respec(model, drafter="suffix")
