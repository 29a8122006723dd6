"""Lossy KV after the idea of CacheGen: anchors and deltas along the tokens, bins by layer, entropy coding by channel.

Per channel, what is sent is its mean, then the distance from it: of every fourth token (the anchors) as it is, of
the tokens between them after taking away a share of the decoded anchor's. The share is fitted per channel, in
eighths; where neighbours tell nothing it is 0. All go in steps of one size per block, for keys and values apart: an
equal step for all channels of a block gives the least error for the bytes, as channels of little spread round to 0
and take next to none. The sender sets the steps, finer in shallow blocks; whoever decodes just reads them.

The first tokens of a text go in 8 bits. Models use them as attention sinks: their keys and values are unlike all
others, nearly every later token looks at them, and steps made for the others destroy them (docs/kv.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from bloombee_spec.kv.span import SpanShape, from_channels, to_channels
from bloombee_spec.kv.symbols import Symbols, put_symbols, take_symbols
from bloombee_spec.wire.activations import CodecError, get_codec
from bloombee_spec.wire.entropy import put_plane, take_plane
from bloombee_spec.wire.int8 import in_range

Values = npt.NDArray[np.float32]

SINKS = 4  # positions of a text that count as attention sinks
GROUP = 4  # tokens of an anchor and its deltas
_SHARES = 8  # a share is a number of eighths
_MEAN_STEPS = 4  # a mean is a number of quarters of a step
_DEAD = 0.1  # rounding leans towards 0 by this part of a step: fewer bits for the same error
_FAR = 4.0  # times the median energy, from where on a token does not count
_FLOOR = 2.0**-20  # the smallest step, as a part of a block's largest magnitude
_MAX_STEP = 1e25  # times any 32-bit code it stays finite
_LIMIT = 1 << 30  # of a code


@dataclass(frozen=True, slots=True)
class Quality:
    """Step sizes, as parts of the typical distance of a block's values from their channel's mean.

    :param keys: of the deepest blocks, `values` likewise
    :param shallow: factor for the first block of the model; it grows to 1 until `deep`, a part of the model's depth
    """

    keys: float
    values: float
    shallow: float
    deep: float

    def __post_init__(self) -> None:
        if not (1e-3 <= self.keys <= 8 and 1e-3 <= self.values <= 8 and 0 < self.shallow <= 1 and 0 < self.deep <= 1):
            raise ValueError(f"no usable steps: {self}")

    def steps(self, first_block: int, blocks: int, model_blocks: int) -> Values:
        """`[2, blocks]`: for the keys, then the values, of blocks `first_block ..` of a model of `model_blocks`."""
        depth = (first_block + np.arange(blocks)) / (self.deep * max(1, model_blocks))
        tier = self.shallow + (1.0 - self.shallow) * np.minimum(depth, 1.0)
        steps: Values = np.stack([self.keys * tier, self.values * tier]).astype(np.float32)
        return steps


FINE = Quality(keys=0.35, values=0.35, shallow=0.7, deep=0.5)
COARSE = Quality(keys=0.8, values=0.8, shallow=0.7, deep=0.5)


def encode_lossy(kv: torch.Tensor, start: int, parts: Values) -> bytes:
    """
    :param kv: `[2, blocks, kv_heads, tokens, head_dim]`
    :param start: position of the first token
    :param parts: `[2, blocks]` step sizes as in `Quality`
    :raises CodecError: values that are not finite, or too large: only `lossless` carries those
    """
    if not bool(kv.isfinite().all()):
        raise CodecError("KV that is not finite travels lossless only")
    sinks = max(0, min(SINKS - start, kv.shape[3]))
    head = get_codec("int8").encode(kv[:, :, :, :sinks].reshape(-1, kv.shape[4]))
    rest = _encode_steps(to_channels(kv[:, :, :, sinks:]), kv.shape[1], parts) if sinks < kv.shape[3] else b""
    return bytes([sinks]) + head + rest


def decode_lossy(data: memoryview, shape: SpanShape, tokens: int) -> torch.Tensor:
    """`[2, blocks, kv_heads, tokens, head_dim]`. Allocates a small multiple of that, whatever `data` says.

    :raises CodecError: malformed
    """
    sinks = data[0] if len(data) else tokens + 1
    if sinks > min(SINKS, tokens):
        raise CodecError(f"a chunk of {tokens} tokens begins with {sinks} tokens in 8 bits")
    rows, int8 = shape.channels // shape.head_dim * sinks, get_codec("int8")
    end = 1 + int8.max_bytes(rows, shape.head_dim, shape.dtype)
    head = int8.decode(data[1:end], rows, shape.head_dim, shape.dtype).view(shape.size(sinks))
    if sinks == tokens:
        if len(data) != end:
            raise CodecError(f"{len(data) - end} unexpected bytes at the end of a chunk")
        return head
    return torch.cat([head, from_channels(_decode_steps(data[end:], shape, tokens - sinks), shape)], dim=3)


def _encode_steps(rows: torch.Tensor, blocks: int, parts: Values) -> bytes:
    """`rows`: `[channels, tokens]` on the CPU, keys of all blocks first; channels of a block lie together."""
    channels, tokens = rows.shape
    values: Values = rows.float().numpy()
    means, typical, largest = _statistics(values.reshape(2 * blocks, -1, tokens))
    steps = np.maximum(parts.reshape(-1) * typical, _FLOOR * largest).astype("<f4")
    if not (steps <= _MAX_STEP).all():
        raise CodecError(f"KV of magnitude {largest.max():.3g} travels lossless only")
    steps[steps < np.finfo(np.float32).tiny] = 1.0  # nothing but zeros, or so near that they become zeros
    step = np.repeat(steps, channels // len(steps)).astype(np.float32)[:, None]
    scaled = values / step
    mean_codes = np.rint(means.reshape(-1, 1) / step * _MEAN_STEPS).astype(np.int32)
    scaled -= mean_codes.astype(np.float32) / _MEAN_STEPS
    anchors = _round(scaled[:, ::GROUP])
    shares = _shares(scaled, anchors)
    deltas = _round(_between(scaled - _expected(anchors, shares, tokens)))
    out = bytearray(steps.tobytes())
    put_symbols(out, mean_codes.reshape(len(steps), -1))
    put_plane(out, shares.tobytes())
    put_symbols(out, anchors)
    put_symbols(out, deltas)
    return bytes(out)


def _decode_steps(data: memoryview, shape: SpanShape, tokens: int) -> torch.Tensor:
    """`[channels, tokens]`."""
    channels, count = shape.channels, 2 * shape.blocks
    if len(data) < 4 * count:
        raise CodecError(f"{len(data)} bytes do not begin with the steps of {shape.blocks} blocks")
    steps = np.frombuffer(data[: 4 * count], dtype="<f4").astype(np.float32)
    if not ((steps > 0) & (steps <= _MAX_STEP)).all():
        raise CodecError(f"steps between {steps.min()} and {steps.max()}, expected up to {_MAX_STEP}")
    mean_codes, rest = take_symbols(data[4 * count :], count, channels // count)
    shares, rest = take_plane(rest, channels)
    if int(shares.max()) > _SHARES:
        raise CodecError(f"a share of {shares.max()} eighths, at most {_SHARES}")
    anchors, rest = take_symbols(rest, channels, -(-tokens // GROUP))
    deltas, rest = take_symbols(rest, channels, tokens - anchors.shape[1])
    if len(rest):
        raise CodecError(f"{len(rest)} unexpected bytes at the end of a chunk")
    values = _expected(anchors, shares, tokens)
    values[:, ::GROUP] = anchors
    values[:, _is_delta(tokens)] += deltas
    values += mean_codes.reshape(-1, 1).astype(np.float32) / _MEAN_STEPS
    values *= np.repeat(steps, channels // count)[:, None]
    return in_range(torch.from_numpy(values), shape.dtype)


def _statistics(by_block: Values) -> tuple[Values, Values, Values]:
    """Of `[2·blocks, channels, tokens]`: the channels' means `[2·blocks, channels, 1]`, the typical distance from them
    and the largest magnitude, `[2·blocks]` each.

    Tokens far away from all others, as sinks are in some models, count neither for the means nor for what is typical.
    """
    means = by_block.mean(axis=2, keepdims=True, dtype=np.float32)
    energy = np.square(by_block - means).mean(axis=1)
    near = (energy <= _FAR * np.median(energy, axis=1, keepdims=True)).astype(np.float32)
    means = np.matmul(by_block, (near / near.sum(axis=1, keepdims=True))[:, :, None])
    typical = np.sqrt(np.median(np.square(by_block - means).mean(axis=1), axis=1))
    largest = np.abs(by_block).max(axis=(1, 2))
    return means, typical, largest


def _round(scaled: Values) -> Symbols:
    """To the nearest code, but towards 0 a little earlier; `scaled` is used up."""
    towards = np.maximum(np.abs(scaled) + np.float32(0.5 - _DEAD), 0.0)
    np.minimum(towards, _LIMIT, out=towards)
    return np.copysign(np.floor(towards, out=towards), scaled).astype(np.int32)


def _is_delta(tokens: int) -> npt.NDArray[np.bool_]:
    mask: npt.NDArray[np.bool_] = np.arange(tokens) % GROUP != 0
    return mask


def _between(scaled: Values) -> Values:
    return scaled[:, _is_delta(scaled.shape[1])]


def _expected(anchors: Symbols, shares: npt.NDArray[np.uint8], tokens: int) -> Values:
    """`[channels, tokens]`: each token's part of its anchor."""
    part = anchors * (shares[:, None] * np.float32(1 / _SHARES))
    return np.repeat(part.astype(np.float32), GROUP, axis=1)[:, :tokens]


def _shares(scaled: Values, anchors: Symbols) -> npt.NDArray[np.uint8]:
    """The share of its anchor that leaves the least of a channel's deltas (least squares), `[channels]`."""
    channels, tokens = scaled.shape
    groups = tokens // GROUP  # a group that is cut short does not take part
    if not groups:
        return np.zeros(channels, dtype=np.uint8)
    sums = scaled[:, : groups * GROUP].reshape(channels, groups, GROUP)[:, :, 1:].sum(axis=2)
    decoded = anchors[:, :groups].astype(np.float32)
    along = np.einsum("cg,cg->c", sums, decoded)
    energy = np.einsum("cg,cg->c", decoded, decoded) * np.float32(GROUP - 1)
    best = np.rint(_SHARES * along / np.maximum(energy, 1.0))
    shares: npt.NDArray[np.uint8] = np.clip(best, 0, _SHARES).astype(np.uint8)
    return shares
