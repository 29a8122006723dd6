"""A probability distribution over the vocabulary as bytes: 16-bit logarithms, of all tokens or of those above zero.

    code(p) = round(-2048 ln p)   for p >= e**-32, about 1e-14;    65535 for what is less, read as zero

Each entry is off by at most a factor of 1 ± 2**-12, small ones too, and a certain token (greedy) is exactly 1. What
was rounded is a distribution of its own once it is normalised: a rule that works on `rounded(p)` at both ends is exact
for it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from bloombee_spec.wire.varint import FrameError, Reader, put_uint

STEPS_PER_NAT = 2048
ZERO = 65535
DENSE, SPARSE = 0, 1
ENTRY_BYTES = 2

TINY = 1e-300  # whatever is smaller is zero too

Codes = npt.NDArray[np.uint16]

_VALUES = np.exp(np.arange(ZERO + 1) / -STEPS_PER_NAT)
_VALUES[ZERO] = 0.0


def encode_distribution(p: torch.Tensor) -> bytes:
    """
    :param p: `[vocab]`, not negative, sum about 1
    :returns: about 4 bytes per token above zero, at most 2 per token of the vocabulary
    """
    codes = _codes(p)
    support = np.flatnonzero(codes != ZERO)
    out = bytearray([SPARSE])
    if len(support) * (ENTRY_BYTES + 1) < len(codes) * ENTRY_BYTES:
        put_uint(out, len(support))
        for step in np.diff(support, prepend=-1).tolist():
            put_uint(out, step - 1)
        out += codes[support].astype("<u2").tobytes()
        if len(out) <= len(codes) * ENTRY_BYTES:
            return bytes(out)
    return bytes([DENSE]) + codes.astype("<u2").tobytes()


def decode_distribution(read: Reader, vocab: int) -> torch.Tensor:
    """:returns: `[vocab]` float64, sum 1
    :raises FrameError: truncated, a token outside the vocabulary, or no token above zero
    """
    kind = read.uint(SPARSE)
    if kind == DENSE:
        codes: Codes = np.frombuffer(read.take(vocab * ENTRY_BYTES), dtype="<u2")
    else:
        count, token = read.uint(vocab), -1
        support = np.empty(count, dtype=np.int64)
        for i in range(count):
            token += 1 + read.uint(vocab)
            support[i] = token
        if token >= vocab:
            raise FrameError(f"a distribution over {vocab} tokens names token {token}")
        codes = np.full(vocab, ZERO, dtype=np.uint16)
        codes[support] = np.frombuffer(read.take(count * ENTRY_BYTES), dtype="<u2")
    if not (codes != ZERO).any():
        raise FrameError("a distribution without any token")
    return _probabilities(codes)


def rounded(p: torch.Tensor) -> torch.Tensor:
    """What the other side reads: `[vocab]` float64, sum 1."""
    return _probabilities(_codes(p))


def _codes(p: torch.Tensor) -> Codes:
    values = np.maximum(p.detach().to("cpu", torch.float64).numpy(), TINY)
    codes: Codes = np.minimum(np.rint(-STEPS_PER_NAT * np.log(values)), ZERO).astype(np.uint16)
    return codes


def _probabilities(codes: Codes) -> torch.Tensor:
    p = _VALUES[codes]
    return torch.from_numpy(p / p.sum())
