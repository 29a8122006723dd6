"""Other ways to make activations small, behind one face with our own: general compressors, and hivemind's codecs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bloombee_spec.wire.activations import codec_names, get_codec, row_bytes, rows_from_bytes


@dataclass(frozen=True, slots=True)
class Candidate:
    """:param size: bytes on the wire of what `encode` returned"""

    name: str
    encode: Callable[[torch.Tensor], Any]
    decode: Callable[[Any, torch.Size, torch.dtype], torch.Tensor]
    size: Callable[[Any], int] = len


def own(names: tuple[str, ...] = codec_names()) -> list[Candidate]:
    return [_own(name) for name in names]


def _own(name: str) -> Candidate:
    codec = get_codec(name)
    return Candidate(name, codec.encode, lambda data, shape, dtype: codec.decode(data, shape[0], shape[1], dtype))


def _of_bytes(name: str, pack: Callable[[bytes], bytes], unpack: Callable[[bytes], bytes]) -> Candidate:
    def decode(data: bytes, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        return rows_from_bytes(memoryview(bytes(unpack(data))), shape[0], shape[1], dtype)

    return Candidate(name, lambda rows: pack(row_bytes(rows)), decode)


def general() -> list[Candidate]:
    """zstd, blosc2 with byte and bit shuffle (for 2-byte values), and zipnn (for bf16)."""
    import blosc2
    import zipnn
    import zstandard

    blosc2.set_nthreads(1)
    compressor, decompressor = zstandard.ZstdCompressor(level=3), zstandard.ZstdDecompressor()
    settings = {"typesize": 2, "codec": blosc2.Codec.ZSTD, "clevel": 5, "nthreads": 1}
    zip_nn = zipnn.ZipNN(bytearray_dtype="bfloat16", input_format="byte", threads=1)

    def blosc(name: str, shuffle: Any) -> Candidate:
        return _of_bytes(name, lambda raw: blosc2.compress2(raw, filters=[shuffle], **settings), blosc2.decompress2)

    return [
        _of_bytes("zstd -3", compressor.compress, decompressor.decompress),
        blosc("blosc2 byte shuffle", blosc2.Filter.SHUFFLE),
        blosc("blosc2 bit shuffle", blosc2.Filter.BITSHUFFLE),
        _of_bytes("zipnn", lambda raw: bytes(zip_nn.compress(bytearray(raw))), zip_nn.decompress),
    ]


def of_host() -> list[Candidate]:
    """What BloomBee and Petals can send: hivemind's FLOAT16 and BLOCKWISE_8BIT.

    Sizes without the protobuf around them.
    """
    from hivemind.compression import BlockwiseQuantization, CompressionInfo, Float16Compression

    class Blockwise(BlockwiseQuantization):  # type: ignore[misc]
        """As in hivemind, whose own `quantize` fails with the bitsandbytes that BloomBee pins:

        there the state is a list.
        """

        def quantize(self, tensor: torch.Tensor, allow_inplace: bool = False) -> Any:
            from bitsandbytes.functional import quantize_blockwise

            codes, state = quantize_blockwise(tensor.contiguous(), blocksize=4096, nested=False)
            absmax, codebook = (state[0], state[1]) if isinstance(state, list | tuple) else (state.absmax, state.code)
            return codes.numpy(), (absmax.numpy(), codebook.numpy())

    def host(name: str, codec: Any) -> Candidate:
        def encode(rows: torch.Tensor) -> Any:
            wide = rows.float()  # FLOAT16 refuses bf16; the host, too, widens before it compresses
            return codec.compress(wide, CompressionInfo.from_tensor(wide))

        return Candidate(
            name,
            encode,
            lambda message, shape, dtype: codec.extract(message).view(shape).to(dtype),
            lambda message: len(message.buffer),
        )

    return [host("hivemind FLOAT16", Float16Compression()), host("hivemind BLOCKWISE_8BIT", Blockwise())]
