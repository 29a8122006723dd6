"""Rounds in a simulated ring, whatever the timing: the text is the one that the rule gives without a network."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from round_play import play_round

from bloombee_spec.client.stream import StreamRequest
from bloombee_spec.config import SpecConfig
from bloombee_spec.draft.base import Drafter, Proposal
from bloombee_spec.draft.sampled import Sampler
from bloombee_spec.sampling.round_rules import ROUND_RULES
from bloombee_spec.sampling.rounds import Distributions, spec_of
from bloombee_spec.sampling.spec import SamplingSpec
from tests.ring_client import Client
from tests.ring_model import HashModel
from tests.ring_world import RingShape, World

PROMPT, LENGTH, VOCAB = (3, 1, 2, 1), 14, 12


class FlatDrafter(Drafter):
    """The target's distribution, made flatter; also its own sampler."""

    instant = True

    def __init__(self, model: HashModel):
        self._model = model
        self._tokens: list[int] = []

    def start(self, prompt: Any) -> None:
        self._tokens = list(prompt)

    def observe(self, tokens: Any) -> None:
        self._tokens += tokens

    def propose(self, *args: Any, **options: Any) -> list[Proposal]:
        raise AssertionError("rounds draw")

    def sampler(self, vocab_size: int) -> Sampler:
        return self  # type: ignore[return-value]

    def distribution(self, path: Any, shape: Any) -> torch.Tensor:
        text = (*self._tokens, *path)
        return shape(flat(self._model, text), text)


def flat(model: HashModel, text: tuple[int, ...]) -> torch.Tensor:
    return 0.5 * model.after(text)[1].float()


def sampling_of(seed: int) -> dict[str, Any]:
    if seed % 5 == 0:
        return {}
    options: dict[str, Any] = [{}, {"repetition_penalty": 1.3}, {"top_k": 5}][seed % 3]
    return SamplingSpec(len(PROMPT), do_sample=True, seed=seed, **options).to_wire()


def expected(name: str, model: HashModel, sampling: dict[str, Any], burst: int, row: int, stop: int) -> list[int]:
    spec, rule = spec_of(sampling), ROUND_RULES[name]
    shape = Distributions(spec, VOCAB)
    text = PROMPT
    while len(text) < LENGTH and (text == PROMPT or stop not in text[len(PROMPT) :]):
        new = play_round(
            rule, lambda t: shape(model.after(t)[1].float(), t), lambda t: shape(flat(model, t), t),
            rule.widths(burst)[: LENGTH - 1 - len(text)], text, spec.seed, row,
        )  # fmt: skip
        end = new.index(stop) + 1 if stop in new else len(new)
        text += tuple(new[:end])
    return list(text[len(PROMPT) : LENGTH])


@pytest.mark.parametrize("name", ROUND_RULES)
def test_any_timing_gives_the_text_of_the_rule(name: str) -> None:
    committed = hits = 0
    for seed in range(40):
        rng = random.Random(seed)
        burst, lanes = rng.randint(1, 6), rng.randint(1, 2)
        shape = RingShape(
            blocks=rng.choice([(1,), (1, 1), (2, 1, 1)]), embed=rng.random() < 0.7, lanes=lanes,
            arena=rng.choice((burst, 8)), max_rows=rng.choice((2, 8)), chunk=rng.choice((2, 256)),
        )  # fmt: skip
        world = World(shape, vocab=VOCAB, seed=seed)
        try:
            config = SpecConfig(rule=name, burst=burst)
            user = Client(world, config, lambda model=world.model: FlatDrafter(model))
            if seed % 2:  # what the client tells the judge comes after the rows that it is about
                user._up[-1].weight = 1e-4
            sampling, stop = sampling_of(seed), rng.randrange(VOCAB)
            requests = [StreamRequest(PROMPT, LENGTH, (stop,), sampling, row) for row in range(lanes)]
            got: list[list[int]] = [[] for _ in requests]
            for lane, tokens in user.decoder.decode(requests):
                got[lane] += tokens
            assert got == [expected(name, world.model, sampling, burst, row, stop) for row in range(lanes)]
            world.drain()
            committed += sum(stream.tally.tokens for stream in user.decoder.streams)
            hits += sum(stream.tally.hits for stream in user.decoder.streams)
            assert sum(stream.tally.tokens for stream in user.decoder.streams) == sum(map(len, got))
        finally:
            world.close()
    assert committed > 200 and 0.1 * committed < hits < 0.9 * committed


@pytest.mark.parametrize("name", ROUND_RULES)
def test_turns_and_stops_in_one_session(name: str) -> None:
    """A stopped stream, then another text: its rows are those of an older epoch everywhere."""
    for seed in range(20):
        world = World(RingShape(blocks=(1, 1), lanes=1, embed=seed % 2 == 0), vocab=VOCAB, seed=seed)
        try:
            user = Client(world, SpecConfig(rule=name, burst=3), lambda model=world.model: FlatDrafter(model))
            for _, tokens in user.decoder.decode([StreamRequest(PROMPT, LENGTH, (), sampling_of(seed))]):
                user.decoder.stop(0, len(PROMPT) + len(tokens))
            kept = tuple(user.decoder.streams[0].committed)
            request = StreamRequest((*kept, 5), len(kept) + 6)
            got = [token for _, tokens in user.decoder.decode([request]) for token in tokens]
            assert got == world.model.decode(request.tokens, request.limit)
        finally:
            world.close()


def test_another_text_of_the_same_length() -> None:
    """The row that the judge has belongs to the text before, until the new one's is there."""
    for seed in range(150):
        world = World(RingShape(blocks=(1, 1), lanes=1), vocab=VOCAB, seed=seed, interleave=0.7)
        try:
            user = Client(world, SpecConfig(rule="picospec"))
            for _, _ in user.decoder.decode([StreamRequest(PROMPT, LENGTH)]):
                if len(user.decoder.streams[0].committed) > 6:
                    world.drain()
                    user.decoder.stop(0, 7)
            kept = tuple(user.decoder.streams[0].committed)
            request = StreamRequest((*kept[:-1], (kept[-1] + 1) % VOCAB), 9)
            got = [token for _, tokens in user.decoder.decode([request]) for token in tokens]
            assert got == world.model.decode(request.tokens, request.limit)
        finally:
            world.close()
