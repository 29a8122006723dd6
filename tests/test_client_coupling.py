"""What a drafter learns when a stream begins: the history, and the noise that the target will draw with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from bloombee_spec.client.stream import Stream, StreamRequest
from bloombee_spec.config import SpecConfig
from bloombee_spec.draft.base import Drafter, Proposal, never
from bloombee_spec.draft.coupling import NoiseSource
from bloombee_spec.sampling.noise import exponential_noise
from bloombee_spec.sampling.spec import SamplingSpec
from bloombee_spec.wire.frames import CommitFrame

VOCAB = 50


class Pupil(Drafter):
    instant = True

    def __init__(self) -> None:
        self.known: list[int] = []
        self.noise: NoiseSource | None = None
        self.temperature = -1.0

    def couple(self, noise: NoiseSource | None, temperature: float) -> None:
        self.noise, self.temperature = noise, temperature

    def start(self, prompt: Sequence[int]) -> None:
        self.known = list(prompt)

    def observe(self, tokens: Sequence[int]) -> None:
        self.known += tokens

    def propose(
        self, path: Sequence[int], budget: int, *, max_depth: int = 64, interrupted: Callable[[], bool] = never
    ) -> list[Proposal]:
        return []


def begun(pupil: Pupil, sampling: dict[str, object], row: int = 0) -> Stream:
    stream = Stream(0, pupil, SpecConfig(plan="none"), credits=8, inject=True, vocab_size=VOCAB)
    stream.begin(StreamRequest((1, 2, 3), 20, sampling=sampling, row=row), 64)
    stream.draft()
    return stream


def test_a_sampled_call_gives_the_drafter_the_rows_noise_and_temperature() -> None:
    pupil = Pupil()
    spec = SamplingSpec(prompt_length=3, do_sample=True, seed=11, temperature=0.7)
    stream = begun(pupil, spec.to_wire(), row=2)
    assert pupil.temperature == 0.7 and pupil.noise is not None
    assert torch.equal(pupil.noise(5), exponential_noise(11, 2, 5, VOCAB))
    stream.commit(CommitFrame(0, stream.epoch, 3, (9,)))
    stream.draft()
    assert pupil.known == [1, 2, 3, 9]


def test_a_greedy_call_takes_the_noise_away_again() -> None:
    pupil = Pupil()
    begun(pupil, SamplingSpec(prompt_length=3, do_sample=True, seed=11).to_wire())
    begun(pupil, {})
    assert pupil.noise is None and pupil.temperature == 0.0
