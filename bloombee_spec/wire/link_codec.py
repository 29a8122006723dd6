"""The codecs of one link: the sender may change among those that were agreed on, and measures what each costs."""

from __future__ import annotations

import time

import torch

from bloombee_spec.wire.activations import ActivationCodec, CodecError, get_codec

SEPARATOR = "|"
MAX_CODECS = 4
SAMPLE_EVERY = 32  # frames between two trials of all codecs
SAMPLED_ROWS = 16
WEIGHT = 0.2  # of a new sample in a running mean


def split_names(names: str) -> tuple[str, ...]:
    """`"raw|lossless"` is raw first, and lossless when the sender prefers it.

    :raises CodecError: none, too many, or one twice
    """
    found = tuple(names.split(SEPARATOR))
    if not 1 <= len(found) <= MAX_CODECS or len(set(found)) < len(found):
        raise CodecError(f"{names[:60]!r} does not name 1 to {MAX_CODECS} different codecs")
    return found


class LinkCodec:
    """Encodes or decodes the rows of one direction of a link. With a single codec the bytes are that codec's; with
    several, one byte in front says which. Not shared between threads that encode.

    :param names: see `split_names`; the first one is in use at the start
    :raises CodecUnavailable: one is unknown here
    """

    def __init__(self, names: str):
        self.names = split_names(names)
        self._codecs: list[ActivationCodec] = [get_codec(name) for name in self.names]
        self._used = 0
        self._frames = 0
        self._costs: list[tuple[float, float] | None] = [None] * len(self.names)

    @property
    def used(self) -> str:
        return self.names[self._used]

    def use(self, name: str) -> None:
        """:raises CodecError: not one of those that were agreed on"""
        if name not in self.names:
            raise CodecError(f"codec {name[:40]!r} was not agreed on for this link: {', '.join(self.names)}")
        self._used = self.names.index(name)

    @property
    def costs(self) -> tuple[float, ...]:
        """`(bytes, seconds)` per row of each codec in order, flat; seconds for both ends, as far as the sender can
        tell. Empty until all have been tried."""
        if any(cost is None for cost in self._costs):
            return ()
        return tuple(number for cost in self._costs if cost is not None for number in cost)

    def encode(self, rows: torch.Tensor) -> bytes:
        if not len(rows):  # no rows, no tag
            return self._codecs[0].encode(rows)
        if self._frames % SAMPLE_EVERY == 0:
            for index in range(len(self._codecs)):
                self._encode(index, rows[:SAMPLED_ROWS])
        self._frames += 1
        return self._tag(self._used) + self._codecs[self._used].encode(rows)

    def decode(self, data: bytes | memoryview, n: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
        """`[n, hidden]` of `dtype`; raises as `ActivationCodec.decode`."""
        if len(self._codecs) == 1 or n == 0:
            return self._codecs[0].decode(data, n, hidden, dtype)
        view = memoryview(data).cast("B")
        if not len(view) or view[0] >= len(self._codecs):
            raise CodecError(f"rows do not say in which of {len(self._codecs)} codecs they are")
        return self._codecs[view[0]].decode(view[1:], n, hidden, dtype)

    def _tag(self, index: int) -> bytes:
        return bytes([index]) if len(self._codecs) > 1 else b""

    def _encode(self, index: int, rows: torch.Tensor) -> None:
        started = time.perf_counter()
        size = len(self._codecs[index].encode(rows))
        cost = (size / len(rows), 2 * (time.perf_counter() - started) / len(rows))
        before = self._costs[index]
        if before is not None:
            cost = tuple(WEIGHT * new + (1 - WEIGHT) * old for new, old in zip(cost, before))  # type: ignore[assignment]
        self._costs[index] = cost
