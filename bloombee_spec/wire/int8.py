"""8-bit activations: linear, one scale per block of 64 values of a row."""

from __future__ import annotations

import torch

from bloombee_spec.wire.activations import ActivationCodec, CodecError

BLOCK = 64
_LEVELS = 127


class Int8Codec(ActivationCodec):
    """Each row travels alone: `[ceil(hidden / 64)]` scales in bf16, then `[hidden]` signed bytes. 8.25 bits per value.

    The step of a block is its largest magnitude / 127, so the error of a value is at most half a step (0.4 % of that
    magnitude). A block that holds NaN or an infinity decodes to NaN throughout: it never becomes a plausible number.
    Values beyond the range of float32 count as infinite.
    """

    name = "int8"
    lossless = False

    def max_bytes(self, n: int, hidden: int, dtype: torch.dtype) -> int:
        return n * (2 * _blocks(hidden) + hidden)

    def _encode(self, rows: torch.Tensor) -> bytes:
        n, hidden = rows.shape
        values = torch.nn.functional.pad(rows, (0, -hidden % BLOCK)) if hidden % BLOCK else rows
        blocks = values.float().view(n, -1, BLOCK)
        step = (blocks.abs().amax(-1) / _LEVELS).to(torch.bfloat16)
        usable = (step > 0) & step.isfinite()
        steps = blocks / torch.where(usable, step.float(), 1.0)[..., None]
        # where(): casting NaN to int8 is undefined, and a row's bytes may depend on nothing but the row
        codes = torch.where(usable[..., None], steps, 0.0).round_().clamp_(-_LEVELS, _LEVELS).to(torch.int8)
        scales = step.view(torch.uint8).view(n, -1)
        packed = torch.cat([scales, codes.view(n, -1)[:, :hidden].view(torch.uint8)], dim=1)
        return to_bytes(packed)

    def _decode(self, data: memoryview, n: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
        packed = from_bytes(self.name, data, n, self.max_bytes(1, hidden, dtype))
        scale_bytes = 2 * _blocks(hidden)
        step = packed[:, :scale_bytes].reshape(-1).clone().view(torch.bfloat16).view(n, -1).float()
        codes = packed[:, scale_bytes:].view(torch.int8)
        if hidden % BLOCK:
            codes = torch.nn.functional.pad(codes, (0, BLOCK - hidden % BLOCK))
        values = codes.reshape(n, -1, BLOCK) * step[..., None]
        return in_range(values, dtype).view(n, -1)[:, :hidden].contiguous()


def in_range(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`values` in `dtype`;

    a finite value that rounding error carries past the largest number of `dtype` becomes that number.
    """
    limit = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    return values.clamp_(-limit, limit).to(dtype)


def to_bytes(packed: torch.Tensor) -> bytes:
    """`packed` (uint8, any device) row by row; on a GPU this is the only point at which the host waits."""
    return bytes(packed.cpu().numpy().tobytes())


def from_bytes(name: str, data: memoryview, n: int, row_bytes: int) -> torch.Tensor:
    """`data` as a uint8 tensor `[n, row_bytes]` of its own.

    :raises CodecError: another size
    """
    if len(data) != n * row_bytes:
        raise CodecError(f"{name}: {len(data)} bytes for {n} rows, expected {n * row_bytes}")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(n, row_bytes)


def _blocks(hidden: int) -> int:
    return -(-hidden // BLOCK)
