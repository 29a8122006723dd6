"""Rules of a caller's own in simulated rings with random timing, and streams that are stopped from outside."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from bloombee_spec.client.stream import StreamRequest
from bloombee_spec.config import SpecConfig
from tests.ring_client import Client
from tests.ring_play import RandomDrafter, SteppedDrafting
from tests.ring_world import RingShape, World

LENGTH = 10
PROMPTS = ((3, 1, 2), (5, 1))


class Counting:
    """A chooser with state: each call excludes the token that came out of the last one, and remembers its position."""

    def __init__(self) -> None:
        self.positions: list[int] = []

    def __call__(self, logits: torch.Tensor, committed: Sequence[int]) -> int:
        self.positions.append(len(committed))
        scores = logits.clone()
        scores[(committed[-1] + len(self.positions)) % len(scores)] = 9.0 if len(self.positions) % 3 == 0 else -1.0
        return int(scores.argmax())


def expected(world: World, prompt: Sequence[int], n: int) -> list[int]:
    choose, text = Counting(), list(prompt)
    while len(text) < len(prompt) + n:
        text.append(choose(world.model.after(tuple(text))[1], text))
    return text[len(prompt) :]


def ring(seed: int, lanes: int) -> tuple[World, Client]:
    rng = random.Random(seed)
    world = World(RingShape(embed=seed % 2 == 0, verify=False, lanes=lanes), vocab=8, seed=seed)
    config = SpecConfig(plan="none", min_probability=0.0, burst=rng.choice((1, 4)))
    slow = seed % 3 == 0
    user = Client(world, config, lambda: RandomDrafter(world.model, rng, 0.7, chain=False, instant=not slow))
    if slow:
        SteppedDrafting(user, config, 1.0)
    return world, user


@pytest.mark.parametrize("block", range(4))
def test_a_rule_with_state_is_asked_once_per_token_and_in_order(block: int) -> None:
    for seed in range(block * 10, block * 10 + 10):
        world, user = ring(seed, 1)
        try:
            rule, prompt = Counting(), PROMPTS[0]
            request = StreamRequest(prompt, len(prompt) + LENGTH, chooser=rule)
            tokens = [token for _, new in user.decoder.decode([request]) for token in new]
            assert tokens == expected(world, prompt, LENGTH), f"seed {seed}"
            assert rule.positions == list(range(len(prompt), len(prompt) + LENGTH))
        finally:
            world.close()


@pytest.mark.parametrize("block", range(4))
def test_any_stream_may_be_stopped_while_another_one_yields(block: int) -> None:
    """As a stopping criterion does that looks at all rows; the next turn goes on from what was kept."""
    for seed in range(block * 10, block * 10 + 10):
        world, user = ring(seed, 2)
        rng = random.Random(seed)
        try:
            requests = [StreamRequest(prompt, len(prompt) + LENGTH, row=i) for i, prompt in enumerate(PROMPTS)]
            got: list[list[int]] = [[], []]
            kept: dict[int, int] = {}
            for lane, new in user.decoder.decode(requests):
                assert lane not in kept, "a stopped stream is silent"
                got[lane] += new
                other = 1 - lane
                if not kept and got[other] and rng.random() < 0.3:
                    kept[other] = rng.randint(1, len(got[other]))
                    user.decoder.stop(other, len(PROMPTS[other]) + kept[other])
            texts = [world.model.decode(prompt, len(prompt) + LENGTH) for prompt in PROMPTS]
            for lane, text in enumerate(texts):
                assert got[lane] == text[: len(got[lane])]
                assert lane in kept or len(got[lane]) == LENGTH
            history = [(*prompt, *new[: kept.get(i)]) for i, (prompt, new) in enumerate(zip(PROMPTS, got))]
            again = [StreamRequest(tokens, len(tokens) + 5, row=i) for i, tokens in enumerate(history)]
            more: list[list[int]] = [[], []]
            for lane, new in user.decoder.decode(again):
                more[lane] += new
            assert more == [world.model.decode(tokens, len(tokens) + 5) for tokens in history], f"seed {seed}"
        finally:
            world.close()
