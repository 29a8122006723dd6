"""All decoders under fuzz for BLOOMBEE_SPEC_FUZZ_SECONDS (20), and proof that the fuzzer notices what it looks for."""

from __future__ import annotations

import os
import random
import time

import pytest
import torch

from benchmarks.fuzz import BATCH, Failed, fuzz, mutated
from benchmarks.fuzz_targets import Case, Target, targets
from bloombee_spec.wire.frames import FrameError


def test_no_input_makes_a_decoder_do_anything_but_decode_or_refuse() -> None:
    torch.set_num_threads(1)
    seconds = float(os.environ.get("BLOOMBEE_SPEC_FUZZ_SECONDS", "20"))
    seed = int(os.environ.get("BLOOMBEE_SPEC_FUZZ_SEED", str(time.time_ns() % 2**32)))
    tally = fuzz(targets(), seed=seed, seconds=seconds)
    for name, count in tally.counts.items():
        assert 0 < count.refused < count.inputs, f"{name}: only one thing ever happened, seed {seed}"


def _target(decode: object) -> Target:
    return Target("planted", lambda rng: Case(b"valid", decode, FrameError, lambda size: 1 << 20))  # type: ignore[arg-type]


def _crash(data: bytes) -> None:
    if data.startswith(b"va") and len(data) < 5:
        raise IndexError("a field beyond the end")


def _hang(data: bytes) -> None:
    while data != b"valid":
        pass


def _swallow(data: bytes) -> None:
    bytearray(2 << 20)


def _allocate(data: bytes) -> None:
    torch.empty(1 << 34, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("decode", "found"),
    [(_crash, "IndexError"), (_hang, "no answer"), (_swallow, "are declared"), (_allocate, "RuntimeError")],
)
def test_a_decoder_that_misbehaves_is_caught_and_its_input_is_told(decode: object, found: str) -> None:
    with pytest.raises(Failed, match=found) as caught:
        fuzz([_target(decode)], seed=3, inputs=100 * BATCH)
    assert "--target planted --seed 3 --batch " in str(caught.value)


def test_the_same_seed_makes_the_same_inputs() -> None:
    def inputs(seed: int) -> list[bytes]:
        seen: list[bytes] = []
        fuzz([_target(seen.append)], seed=seed, inputs=3 * BATCH)
        return seen

    assert inputs(1) == inputs(1) != inputs(2)


def test_damage_is_of_every_kind() -> None:
    rng = random.Random(0)
    found = [mutated(bytes(range(40)), rng) for _ in range(300)]
    assert any(len(data) < 40 for data in found) and any(len(data) > 40 for data in found)
    assert any(len(data) == 40 and data != bytes(range(40)) for data in found)
