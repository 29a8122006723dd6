"""What a server says about itself, asked by the client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgpack
from hivemind.p2p import PeerID
from hivemind.proto import runtime_pb2

from bloombee_spec.server.service import SpecService
from bloombee_spec.wire.frames import PROTOCOL_VERSION

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class StageInfo:
    """What `rpc_spec_info` says about a server; sizes in tokens, rows or bytes, times in seconds."""

    peer: str
    start: int
    end: int
    family: str
    embed: bool
    lm_head: bool
    dtype: str
    hidden: int
    codecs: tuple[str, ...]
    adapters: tuple[str, ...]
    max_length: int
    max_lanes: int
    max_arena: int
    max_prefill: int
    row_seconds: dict[int, float]
    kv_bytes: int = 0  # of one token in one block

    @property
    def row_bytes(self) -> int:
        """Of one activation row."""
        return self.hidden * BYTES.get(self.dtype, 4)


async def fetch_info(p2p: Any, peer: str, timeout: float) -> StageInfo | None:
    """What a server says about itself; None when it has no plugin, or does not answer, or answers nonsense."""
    try:
        stub = SpecService.get_stub(p2p, PeerID.from_base58(peer))
        reply = await stub.rpc_spec_info(runtime_pb2.ExpertUID(), timeout=timeout)
        if len(reply.serialized_info) > 1 << 16:
            return None
        info = msgpack.unpackb(reply.serialized_info, strict_map_key=True, max_ext_len=0)
        if info["protocol"] != PROTOCOL_VERSION:
            return None
        return StageInfo(
            peer=peer, start=int(info["start"]), end=int(info["end"]), family=str(info["family"]),
            embed=bool(info["embed"]), lm_head=bool(info["lm_head"]), dtype=str(info["dtype"]),
            hidden=int(info["hidden"]),
            codecs=tuple(map(str, info["codecs"])), adapters=tuple(map(str, info["adapters"])),
            max_length=int(info["max_length"]), max_lanes=int(info["max_lanes"]), max_arena=int(info["max_arena"]),
            max_prefill=int(info["max_prefill"]),
            kv_bytes=int(info["kv_bytes"]),
            row_seconds={int(rows): float(seconds) for rows, seconds in info["row_seconds"].items()},
        )  # fmt: skip
    except Exception:
        return None
