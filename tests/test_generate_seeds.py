"""Sampled text is a function of model, prompt, seed and row: 200 seeds in simulated rings with random timing, some on
the real swarm, with every kind of drafter, in a stream or in one tree per lap, verified here or there."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from host_helpers import OLD_TRANSFORMERS
from swarm_helpers import PLAIN, ROUTES, VOCAB, Knowing, client, prompts, respec

from bloombee_spec.client.stream import StreamRequest
from bloombee_spec.config import SpecConfig
from bloombee_spec.draft.base import Drafter
from bloombee_spec.draft.scripted import Script
from bloombee_spec.draft.suffix import SuffixDrafter
from bloombee_spec.sampling.spec import SamplingSpec
from tests.ring_client import Client
from tests.ring_model import HashModel
from tests.ring_play import ErringDrafter, RandomDrafter, SteppedDrafting
from tests.ring_world import RingShape, World

SEEDS = 200
PROMPT = (3, 1, 2, 1)
LENGTH = 6


def rules(seed: int) -> dict[str, Any]:
    options = (
        {"temperature": 0.9},
        {"temperature": 1.3, "top_k": 12, "repetition_penalty": 1.2},
        {"top_p": 0.9, "no_repeat_ngram_size": 2},
    )
    return SamplingSpec(len(PROMPT), do_sample=True, seed=seed, **options[seed % len(options)]).to_wire()  # type: ignore[arg-type]


def drafter_of(kind: str, model: HashModel, text: list[int], rng: random.Random) -> Callable[[], Drafter | None]:
    if kind == "none":
        return lambda: None
    if kind == "suffix":
        return SuffixDrafter
    if kind == "model":  # greedy guesses of the target's own model, in random trees, by a drafter that takes its time
        return lambda: RandomDrafter(model, rng, 0.8, chain=False, instant=False)
    wrong = {len(PROMPT) + i for i in range(LENGTH) if rng.random() < 0.3}
    return lambda: ErringDrafter(text, wrong)


def ring_text(kind: str, seed: int, sampling: dict[str, Any]) -> tuple[list[int], list[int], int]:
    """Plain decoding's tokens, the ring's, and how many of them were drafted."""
    rng = random.Random(f"{kind} {seed}")
    shape = RingShape(blocks=(1, 1), embed=seed % 4 != 3, verify=seed % 2 == 0, lanes=1)
    world = World(shape, vocab=16, seed=seed)
    try:
        row = seed % 3
        plain = world.model.decode(PROMPT, len(PROMPT) + LENGTH, sampling=sampling, row=row)
        config = SpecConfig(plan="none", min_probability=0.0, burst=rng.choice((1, 4)))
        user = Client(world, config, drafter_of(kind, world.model, [*PROMPT, *plain], rng))
        if kind == "model":
            SteppedDrafting(user, config, 1.0)
        request = StreamRequest(PROMPT, len(PROMPT) + LENGTH, (), sampling, row)
        tokens = [token for _, new in user.decoder.decode([request]) for token in new]
        return plain, tokens, user.decoder.streams[0].tally.hits
    finally:
        world.close()


@pytest.mark.parametrize("kind", ["none", "suffix", "model", "scripted"])
def test_two_hundred_seeds_under_any_timing(kind: str) -> None:
    texts, hits = set(), 0
    for seed in range(SEEDS):
        plain, tokens, found = ring_text(kind, seed, rules(seed))
        assert tokens == plain, f"seed {seed}"
        texts.add(tuple(tokens))
        hits += found
    assert len(texts) > SEEDS * 0.95  # each seed is a text of its own
    assert hits >= {"none": 0, "suffix": 1, "model": 50, "scripted": 400}[kind]


def test_the_test_would_notice_another_seed_or_row() -> None:
    model = HashModel(16, 2)
    texts = {
        tuple(model.decode(PROMPT, len(PROMPT) + LENGTH, sampling=rules(seed * 3), row=row))
        for seed in range(10)
        for row in range(3)
    }
    assert len(texts) == 30


# --- the swarm ----------------------------------------------------------------------------------------------------


class Slow(Knowing):
    """Takes a random while to answer, in a thread of its own."""

    instant = False

    def propose(self, *args: Any, **options: Any) -> Any:
        time.sleep(random.random() * 0.02)
        return super().propose(*args, **options)


@pytest.fixture(scope="module")
def model(swarm: Any) -> Iterator[Any]:
    with client(swarm, PLAIN, ROUTES[3]) as connected:
        yield connected


@pytest.mark.swarm
def test_seeds_on_the_swarm(model: Any, toy_local: Any) -> None:
    """Three rows per seed: 24 seeded texts, decoded plainly, and in two to eight other ways."""
    n, seeds = 10, 8
    rows = [ids[:9] for ids in prompts(3, VOCAB, seed=60)]
    batch, texts = torch.tensor(rows), {}
    options = {"max_new_tokens": n, "do_sample": True, "temperature": 0.8, "top_k": 40}

    def decode(seed: int, **changes: Any) -> list[list[int]]:
        respec(model, seed=seed, **changes)
        return model.generate(batch, **options).tolist()

    for seed in range(seeds):
        texts[seed] = decode(seed, speculate=False, drafter="none", plan="auto")
    assert len({tuple(row) for text in texts.values() for row in text}) == 3 * seeds
    known = [row for text in texts.values() for row in text]
    for seed, plain in texts.items():
        mine = [row for row in known if row in plain]
        drafters = {
            "suffix": "suffix",
            "model": toy_local,
            "scripted": lambda mine=mine: Knowing(mine, VOCAB, Script(0.7, siblings=(0.2,))),
            "slow": lambda mine=mine: Slow(mine, VOCAB, Script(0.7)),
        }
        if OLD_TRANSFORMERS:  # it has no cache class, which model drafters need
            del drafters["model"]
        ways = [(name, plan) for name in drafters for plan in ("stream", "tree")]
        for name, plan in ways[seed % 4 :: 4] if seed > 1 else ways:  # all of them for the first two seeds
            got = decode(seed, speculate=True, drafter=drafters[name], plan=plan)
            assert got == plain, f"seed {seed}, {name}, {plan}"
    respec(model, seed=0, speculate=True, drafter="suffix", plan="auto")
    alone = model.generate(batch[:1], **options).tolist()
    assert alone == texts[0][:1]  # row 0 alone is row 0 of a batch


@pytest.mark.swarm
def test_the_relay_draws_the_same(model: Any) -> None:
    ids = torch.tensor([prompts(1, VOCAB, seed=61)[0]])
    options = {"max_new_tokens": 10, "do_sample": True, "top_k": 0}
    texts = []
    for mode in ("ring", "relay"):
        respec(model, seed=5, speculate=True, drafter="suffix", plan="auto", mode=mode)
        texts.append(model.generate(ids, **options).tolist())
    respec(model, mode="auto")
    assert texts[0] == texts[1]


@pytest.mark.swarm
def test_calls_without_a_seed_differ_and_torch_repeats_them(model: Any) -> None:
    ids = torch.tensor([prompts(1, VOCAB, seed=62)[0]])
    respec(model, seed=None, speculate=True, drafter="suffix", plan="auto")
    runs = []
    for _ in range(2):
        torch.manual_seed(77)
        runs.append([model.generate(ids, max_new_tokens=8, do_sample=True, top_k=0).tolist() for _ in range(4)])
    assert runs[0] == runs[1]
    assert len({str(text) for text in runs[0]}) == 4
