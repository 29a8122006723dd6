"""A fuzzer for the decoders. A few seconds by default; BLOOMBEE_SPEC_FUZZ_SECONDS sets another budget."""

from __future__ import annotations

import os
import random
import time

import torch
from codec_helpers import CODECS, DTYPES, activations, any_bits, codec

from bloombee_spec.wire.activations import CodecError


def _mutate(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        at = rng.randrange(len(out) + 1)
        action = rng.randrange(5)
        if action == 0 and out:
            out[at % len(out)] ^= 1 << rng.randrange(8)
        elif action == 1 and out:
            out[at % len(out)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif action == 2:
            del out[at:]
        elif action == 3:
            out[at:at] = rng.randbytes(rng.randrange(1, 9))
        elif out:
            del out[at % len(out) : at % len(out) + rng.randrange(1, 9)]
    return bytes(out)


def fuzz_decoders(seconds: float, seed: int, at_least: int = 0) -> tuple[int, int]:
    """Feeds mutated encodings and noise to every decoder; what one raises, except CodecError, goes up to the caller.

    :returns: inputs tried, and how many of them were refused
    """
    rng = random.Random(seed)
    end = time.monotonic() + seconds
    tried = refused = 0
    while time.monotonic() < end or tried < at_least:
        name, dtype = rng.choice(CODECS), rng.choice(DTYPES)
        n, hidden = rng.choice(((1, 1), (1, 64), (2, 65), (3, 320), (1, 576), (5, 130)))
        make = rng.choice((activations, activations, any_bits))
        valid = codec(name).encode(make(n, hidden, dtype, rng.randrange(1000)))
        for _ in range(50):
            data = _mutate(valid, rng) if rng.random() < 0.9 else rng.randbytes(rng.randrange(len(valid) + 4))
            shape = (n, hidden) if rng.random() < 0.9 else (rng.randrange(4), rng.randrange(400))
            tried += 1
            try:
                rows = codec(name).decode(data, *shape, dtype)
            except CodecError:
                refused += 1
            else:
                assert rows.shape == shape and rows.dtype == dtype
    return tried, refused


def test_no_input_makes_a_decoder_do_anything_but_decode_or_refuse():
    torch.set_num_threads(1)
    seconds = float(os.environ.get("BLOOMBEE_SPEC_FUZZ_SECONDS", "3"))
    seed = int(os.environ.get("BLOOMBEE_SPEC_FUZZ_SEED", str(time.time_ns() % 2**32)))
    print(f"BLOOMBEE_SPEC_FUZZ_SEED={seed}")  # pytest shows it when the test fails
    tried, refused = fuzz_decoders(seconds, seed, at_least=500)
    print(f"{tried} inputs, {refused} refused")
    assert 0 < refused < tried
