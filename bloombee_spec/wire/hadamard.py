"""4- and 3-bit activations: each tile of 64 values is rotated by a Hadamard matrix, then quantised between its extremes.

The scheme follows TAH-Quant (tile-wise adaptive Hadamard quantisation): the largest value of a tile, the pivot, trades places
with the first, so that the rotation spreads it evenly over the tile; it then sits in the tile's offset and no longer widens
its range. Unlike the paper, every tile is pivoted and rotated: on real rows that has the smallest error at each boundary
(docs/codecs.md), and it costs no flag.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bloombee_spec.wire.activations import ActivationCodec, CodecError
from bloombee_spec.wire.int8 import from_bytes, in_blocks, in_range, rounded_up, to_bytes
from bloombee_spec.wire.planes import pack_bit, pack_three, unpack_bit, unpack_three

TILE = 64
_NARROW, _WIDE = 7.0, 15.0  # the largest code of a 3-bit and of a 4-bit tile
