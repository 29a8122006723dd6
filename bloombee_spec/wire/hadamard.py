"""4- and 3-bit activations: each tile of 64 values is rotated by a Hadamard matrix, then quantised between its
extremes.

The scheme follows TAH-Quant (tile-wise adaptive Hadamard quantisation): the largest value of a tile, the pivot,
trades places with the first one, so that the rotation spreads it evenly; it then sits in the tile's offset and no
longer widens its range. Unlike the paper, every tile is pivoted and rotated: on real rows that has the smallest
error (docs/codecs.md).

Tiles are columns here, `[64, tiles]`: every step of the rotation is then one addition of long contiguous vectors. It
is made of additions only, because the rounding of a matrix product depends on how many rows are multiplied at once,
and the bytes of a row must not.
"""

from __future__ import annotations

import torch

from bloombee_spec.wire.activations import ActivationCodec, CodecError
from bloombee_spec.wire.int8 import from_bytes, in_range, to_bytes

TILE = 64
_TILE_HEAD = 5  # bytes: step and offset in bf16, position of the pivot
_WIDE_BYTES, _NARROW_BYTES = 32, 24  # the 64 codes of a tile of 4 and of 3 bits


class HadamardCodec(ActivationCodec):
    """Each row travels alone: the heads of its tiles, which tiles are wide (if some are), codes of the wide, of the
    narrow.

    A tile that holds NaN or an infinity decodes to NaN throughout. Values beyond the range of float32 count as
    infinite.
    """

    lossless = False
    wide_share: float  # the share of a row's tiles that get 4 bits; the others get 3

    def max_bytes(self, n: int, hidden: int, dtype: torch.dtype) -> int:
        return n * sum(self._sections(hidden))

    def _sections(self, hidden: int) -> tuple[int, int, int, int]:
        """Bytes of a row: tile heads, mask of the wide tiles, codes of the wide tiles, codes of the narrow ones."""
        tiles = -(-hidden // TILE)
        wide = self._wide(tiles)
        mask = -(-tiles // 8) if 0 < wide < tiles else 0
        return tiles * _TILE_HEAD, mask, wide * _WIDE_BYTES, (tiles - wide) * _NARROW_BYTES

    def _wide(self, tiles: int) -> int:
        return int(tiles * self.wide_share + 0.5)

    def _encode(self, rows: torch.Tensor) -> bytes:
        n, tiles = rows.shape[0], -(-rows.shape[1] // TILE)
        values = _tiles(rows)
        spare = torch.empty_like(values)
        pivot = swap_pivot(values, spare)
        values = rotate(values.mul_(1 / TILE), spare)
        low, high = values.amin(0), values.amax(0)
        offset = ((low + high) / 2).to(torch.bfloat16)
        # The offset was rounded: the range is what it takes to reach both extremes from there.
        half = torch.maximum(high - offset.float(), offset.float() - low)
        is_wide = _widest(half.view(n, tiles), self._wide(tiles))
        levels = _largest_codes(is_wide)
        step = (2 * half / levels).to(torch.bfloat16)
        values.sub_(offset.float()).div_(torch.where(step > 0, step.float(), 1.0)).add_(levels / 2)
        # Casting NaN to an integer is undefined, and a row's bytes may depend on nothing but the row.
        values.nan_to_num_(0.0).round_().clamp_(min=0)
        codes = torch.minimum(values, levels, out=values).to(torch.int8).view(torch.uint8)
        head = torch.cat([_halves(step), _halves(offset), pivot.to(torch.uint8)[:, None]], dim=1)
        return to_bytes(torch.cat([head.view(n, -1), *self._pack_codes(codes, is_wide)], dim=1))

    def _pack_codes(self, codes: torch.Tensor, is_wide: torch.Tensor) -> list[torch.Tensor]:
        n, tiles = is_wide.shape
        wide = self._wide(tiles)
        if wide == tiles:
            return [_pack(codes, 4).t().reshape(n, -1)]
        if not wide:
            return [_pack_three(codes).t().reshape(n, -1)]
        order = _wide_first(is_wide)
        of_wide, of_narrow = codes[:, order[:, :wide].reshape(-1)], codes[:, order[:, wide:].reshape(-1)]
        return [
            _pack_mask(is_wide),
            _pack(of_wide, 4).t().reshape(n, -1),
            _pack_three(of_narrow).t().reshape(n, -1),
        ]

    def _decode(self, data: memoryview, n: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
        tiles = -(-hidden // TILE)
        wide = self._wide(tiles)
        packed = from_bytes(self.name, data, n, self.max_bytes(1, hidden, dtype))
        head, mask, of_wide, of_narrow = packed.split(list(self._sections(hidden)), dim=1)
        head = head.reshape(n * tiles, _TILE_HEAD)
        step, offset, pivot = _joined(head[:, 0:2]), _joined(head[:, 2:4]), head[:, 4].long()
        if int(pivot.amax()) >= TILE:
            raise CodecError(f"{self.name}: pivot {int(pivot.amax())} in a tile of {TILE}")
        codes = torch.cat(
            [_unpack(_columns(of_wide, _WIDE_BYTES), 4), _unpack_three(_columns(of_narrow, _NARROW_BYTES))], 1
        )
        is_wide = torch.full((n, tiles), wide == tiles)
        if 0 < wide < tiles:
            is_wide = _unpack_mask(self.name, mask, tiles, wide)
            order = _wide_first(is_wide)
            sent = torch.cat([order[:, :wide].reshape(-1), order[:, wide:].reshape(-1)])
            codes = codes[:, sent.argsort()]
        values = codes.float().sub_(_largest_codes(is_wide) / 2).mul_(step).add_(offset)
        values = rotate(values, torch.empty_like(values))
        _swap(values, pivot)
        return in_range(values.t().reshape(n, -1)[:, :hidden], dtype).contiguous()


class Tah4Codec(HadamardCodec):
    """4 bits and a head of 40 bits per tile: 4.63 bits per value."""

    name = "tah4"
    wide_share = 1.0


class Tah3Codec(HadamardCodec):
    """3 bits and a head of 40 bits per tile: 3.63 bits per value."""

    name = "tah3"
    wide_share = 0.0


class TahMixedCodec(HadamardCodec):
    """4 bits for the 80 % of a row's tiles whose values have the largest entropy, 3 bits for the rest: 4.44 bits per
    value.

    After the rotation all tiles are distributed alike up to their spread, so their differential entropy is the
    logarithm of the spread plus a constant: ranking by spread is ranking by entropy.
    """

    name = "tah-mixed"
    wide_share = 0.8


def rotate(values: torch.Tensor, spare: torch.Tensor) -> torch.Tensor:
    """The unnormalised Hadamard transform of each column of `values` `[64, tiles]`: its own inverse, up to a factor
    64.

    :param spare: of the same shape; the result is in `values` or here, and the other is overwritten
    """
    half = TILE // 2
    while half:
        source, target = values.view(-1, 2, half, values.shape[1]), spare.view(-1, 2, half, values.shape[1])
        torch.add(source[:, 0], source[:, 1], out=target[:, 0])
        torch.sub(source[:, 0], source[:, 1], out=target[:, 1])
        values, spare, half = spare, values, half // 2
    return values


def swap_pivot(values: torch.Tensor, spare: torch.Tensor) -> torch.Tensor:
    """Exchanges, in place, the first value of each column with the one of largest magnitude; returns where that was.

    Magnitudes are compared without their lowest six bits, which hold the place instead: argmax() is slower here, and
    leaves open which of equal values it picks.
    """
    places = torch.arange(TILE, device=values.device, dtype=torch.int32)[:, None]
    keys = torch.bitwise_and(values.view(torch.int32), 0x7FFFFFFF - (TILE - 1), out=spare.view(torch.int32))
    pivot = (keys.bitwise_or_(places).amax(0) & TILE - 1).long()
    _swap(values, pivot)
    return pivot


def _swap(values: torch.Tensor, pivot: torch.Tensor) -> None:
    first, at_pivot = values[0].clone(), values.gather(0, pivot[None])
    values.scatter_(0, pivot[None], first[None])
    values[0] = at_pivot[0]


def _tiles(rows: torch.Tensor) -> torch.Tensor:
    """`rows` in float32, one tile per column, `[64, n × ceil(hidden / 64)]`;

    the last tile of a row filled up with zeros.
    """
    if rows.shape[1] % TILE:
        rows = torch.nn.functional.pad(rows, (0, -rows.shape[1] % TILE))
    columns = rows.view(-1, TILE).t()
    return torch.empty(columns.shape, dtype=torch.float32, device=rows.device).copy_(columns)


def _largest_codes(is_wide: torch.Tensor) -> torch.Tensor:
    """For each tile of `[n, tiles]` its largest code, 15 or 7, in float32 `[n × tiles]`."""
    return is_wide.view(-1).float() * 8 + 7


def _widest(spread: torch.Tensor, wide: int) -> torch.Tensor:
    """Which tiles of each row `[n, tiles]` get four bits; among equals the earlier ones."""
    rank = spread.nan_to_num(0.0).argsort(dim=1, descending=True, stable=True)
    chosen = torch.zeros_like(spread, dtype=torch.bool)
    return chosen.scatter_(1, rank[:, :wide], True)


def _wide_first(is_wide: torch.Tensor) -> torch.Tensor:
    """Tile numbers of each row `[n, tiles]`, counted through all rows:

    first the wide ones, then the others, each rising.
    """
    n, tiles = is_wide.shape
    order = is_wide.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
    return order + torch.arange(n, device=is_wide.device)[:, None] * tiles


def _halves(values: torch.Tensor) -> torch.Tensor:
    """bf16 `[tiles]` as bytes `[tiles, 2]`."""
    return values.view(torch.uint8).view(-1, 2)


def _joined(halves: torch.Tensor) -> torch.Tensor:
    """Inverse of `_halves`, in float32."""
    return halves.reshape(-1).clone().view(torch.bfloat16).float()


def _columns(packed: torch.Tensor, tile_bytes: int) -> torch.Tensor:
    """Bytes of rows, `[n, tiles of a row × tile_bytes]`, as `[tile_bytes, tiles]`."""
    return packed.reshape(-1, tile_bytes).t().contiguous()


def _places(width: int, device: torch.device) -> torch.Tensor:
    return torch.arange(0, 8, width, device=device, dtype=torch.uint8)[:, None, None]


def _pack(codes: torch.Tensor, width: int) -> torch.Tensor:
    """Codes of `width` (1, 2, 4) bits, `[64, tiles]`, as bytes `[8 × width, tiles]`."""
    places = codes.view(8 // width, 8 * width, -1) << _places(width, codes.device)
    return places.sum(0, dtype=torch.uint8)


def _unpack(packed: torch.Tensor, width: int) -> torch.Tensor:
    places = packed[None] >> _places(width, packed.device) & (1 << width) - 1
    return places.view(TILE, -1)


def _pack_three(codes: torch.Tensor) -> torch.Tensor:
    """Codes of 3 bits, `[64, tiles]`, as bytes `[24, tiles]`: their low bits, then their upper two."""
    return torch.cat([_pack(codes & 1, 1), _pack(codes >> 1, 2)])


def _unpack_three(packed: torch.Tensor) -> torch.Tensor:
    return _unpack(packed[8:], 2) << 1 | _unpack(packed[:8], 1)


def _pack_mask(is_wide: torch.Tensor) -> torch.Tensor:
    """Which tiles are wide, `[n, tiles]`, as bytes `[n, ceil(tiles / 8)]`."""
    n, tiles = is_wide.shape
    bits = torch.nn.functional.pad(is_wide.to(torch.uint8), (0, -tiles % 8)).view(n, -1, 8)
    return (bits << _places(1, bits.device).view(8)).sum(-1, dtype=torch.uint8)


def _unpack_mask(name: str, mask: torch.Tensor, tiles: int, wide: int) -> torch.Tensor:
    """:raises CodecError: a row does not mark exactly `wide` tiles"""
    bits = (mask[..., None] >> _places(1, mask.device).view(8) & 1).view(mask.shape[0], -1)
    if not bool((bits[:, :tiles].sum(1) == wide).all()) or bool(bits[:, tiles:].any()):
        raise CodecError(f"{name}: a row marks another number of wide tiles than {wide} of {tiles}")
    return bits[:, :tiles].bool()
