"""The KV of a span of blocks for a run of committed tokens: its shape, and its way out of a lane's buffer and back.

Between buffers it travels as `[2, blocks, kv_heads, tokens, head_dim]` (keys, values). Codecs see it as channels
`[2·blocks·kv_heads·head_dim, tokens]`: along a channel values are alike, which saves bytes at every level.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bloombee_spec.wire.activations import WIRE_DTYPES, CodecError

MAX_BLOCKS, MAX_KV_HEADS, MAX_HEAD_DIM = 1024, 1024, 1024
MAX_CHANNELS = 1 << 20  # a chunk of 256 tokens then stays within MAX_VALUES of one encoding


@dataclass(frozen=True, slots=True)
class SpanShape:
    """What both ends know before the first byte: the blocks of the span and how wide their keys and values are.

    :raises CodecError: a shape or dtype that does not travel
    """

    blocks: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        bounds = ((self.blocks, MAX_BLOCKS), (self.kv_heads, MAX_KV_HEADS), (self.head_dim, MAX_HEAD_DIM))
        if not all(1 <= size <= most for size, most in bounds) or self.channels > MAX_CHANNELS:
            sizes = f"{self.blocks} blocks, {self.kv_heads} KV heads, head size {self.head_dim}"
            raise CodecError(f"KV of {sizes} does not travel")
        if self.dtype not in WIRE_DTYPES:
            raise CodecError(f"KV of {self.dtype} does not travel; expected one of {', '.join(map(str, WIRE_DTYPES))}")

    @classmethod
    def of(cls, kv: torch.Tensor) -> SpanShape:
        """:param kv: `[2, blocks, kv_heads, tokens, head_dim]`
        :raises CodecError: another rank
        """
        if kv.ndim != 5 or kv.shape[0] != 2:
            raise CodecError(f"KV has shape {list(kv.shape)}, expected [2, blocks, kv_heads, tokens, head_dim]")
        return cls(kv.shape[1], kv.shape[2], kv.shape[4], kv.dtype)

    @property
    def channels(self) -> int:
        return 2 * self.blocks * self.kv_heads * self.head_dim

    @property
    def token_bytes(self) -> int:
        """Of one token in the buffer's own dtype."""
        return int(self.channels * self.dtype.itemsize)

    def size(self, tokens: int) -> tuple[int, int, int, int, int]:
        return 2, self.blocks, self.kv_heads, tokens, self.head_dim


def to_channels(kv: torch.Tensor) -> torch.Tensor:
    """`[2, blocks, kv_heads, tokens, head_dim]` as contiguous `[channels, tokens]` on the CPU."""
    return kv.detach().cpu().transpose(3, 4).reshape(-1, kv.shape[3]).contiguous()


def from_channels(rows: torch.Tensor, shape: SpanShape) -> torch.Tensor:
    """Inverse of `to_channels`; a view."""
    return rows.view(2, shape.blocks, shape.kv_heads, shape.head_dim, rows.shape[1]).transpose(3, 4)


def export_columns(buffer: torch.Tensor, arena: int, start: int, end: int) -> torch.Tensor:
    """A copy on the CPU of the KV of the committed tokens `start .. end-1` in a lane's buffer, in the buffer's dtype.

    Committed columns are written once, so a copy taken between two forwards stays true until a rewind.

    :param buffer: `[2, blocks, kv_heads, arena + max_length, head_dim]`
    :param arena: columns of candidates, which come first
    :returns: `[2, blocks, kv_heads, end - start, head_dim]`
    :raises CodecError: outside the committed part of the buffer
    """
    _check_columns(buffer, arena, start, end)
    part = buffer[:, :, :, arena + start : arena + end].detach()
    return part.cpu().clone() if part.device.type == "cpu" else part.cpu()


def import_columns(buffer: torch.Tensor, arena: int, start: int, kv: torch.Tensor) -> None:
    """Writes what `export_columns` gave into another lane's buffer, as the KV of the committed tokens from `start` on.

    :raises CodecError: another shape or dtype than the buffer's, or outside its committed part; nothing is written
    """
    shape = SpanShape.of(kv)
    if shape != SpanShape.of(buffer):
        raise CodecError(f"KV of {shape} does not fit a buffer of {SpanShape.of(buffer)}")
    end = start + kv.shape[3]
    _check_columns(buffer, arena, start, end)
    buffer[:, :, :, arena + start : arena + end].copy_(kv)


def _check_columns(buffer: torch.Tensor, arena: int, start: int, end: int) -> None:
    SpanShape.of(buffer)
    if not 0 <= arena <= buffer.shape[3]:
        raise CodecError(f"an arena of {arena} columns in a buffer of {buffer.shape[3]}")
    if not 0 <= start <= end <= buffer.shape[3] - arena:
        raise CodecError(f"tokens {start} to {end}: the buffer holds {buffer.shape[3] - arena}")
