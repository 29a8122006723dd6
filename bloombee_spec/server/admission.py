"""Who gets a session at a stage, and with which KV: new, or that of an earlier session of the same client."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hivemind.utils.tensor_descr import TensorDescriptor

from bloombee_spec.kv.buffer import KVShape
from bloombee_spec.sampling.round_rules import ROUND_RULES
from bloombee_spec.server.allocator import CacheAllocator
from bloombee_spec.server.boundary import BoundaryLog, LogBudget
from bloombee_spec.server.config import SpecServerConfig
from bloombee_spec.server.families.base import BlockFamily
from bloombee_spec.server.heads import Heads
from bloombee_spec.server.holding import Holding, NewLog, ParkingLot
from bloombee_spec.server.session import StageSession
from bloombee_spec.server.stage import Stage
from bloombee_spec.wire.activations import CodecError, CodecUnavailable
from bloombee_spec.wire.frames import FrameError
from bloombee_spec.wire.link_codec import LinkCodec
from bloombee_spec.wire.messages import Open
from bloombee_spec.wire.streams import Outbox


class Admission:
    """Event loop only.

    :param loaded: the server's `LoadedBlocks`
    :param freed: called once KV was given back
    """

    def __init__(
        self, loaded: Any, config: SpecServerConfig, family: BlockFamily, heads: Heads, allocator: CacheAllocator,
        stage: Stage, freed: Callable[[], None],
    ):  # fmt: skip
        self._loaded, self._config, self._family, self._heads = loaded, config, family, heads
        self._allocator, self._stage, self._freed = allocator, stage, freed
        self._opening: set[tuple[bytes, int]] = set()
        self._parking = ParkingLot(config.park_timeout, self._free_parked)
        self._log_budget = LogBudget(config.log_mib << 20, config.log_disk_mib << 20)
        self.closed = False  # the server is leaving

    @property
    def parked(self) -> int:
        return len(self._parking)

    async def open(self, opened: Open, client: str, box: Outbox) -> StageSession:
        """
        :raises FrameError: more than this server grants, or it has no room for another session
        :raises AllocationRefused: no room for its KV
        """
        if self.closed:
            raise FrameError("this server is leaving")
        opened = self._granted(opened)
        key = (opened.session, opened.stage)
        if key in self._stage.sessions or key in self._opening:
            raise FrameError("a session of this id is open already")
        new_log = self._new_log(opened) if opened.next is not None or opened.prepared else None
        earlier = self._earlier(opened, client)
        if earlier is not None:
            holding = earlier.resumed(opened.resume_lengths, opened.embed, new_log)
        else:
            self._check_room()
            holding = await self._allocated(opened, key, new_log)
        loaded = self._loaded
        session = StageSession(
            opened, client, holding, box, hidden_size=loaded.config.hidden_size, dtype=loaded.dtype,
            device=loaded.device, vocab_size=loaded.config.vocab_size, max_prefill=self._config.max_prefill,
            head=self._heads.logits, loop=asyncio.get_running_loop(),
        )  # fmt: skip
        self._stage.sessions[key] = session
        return session

    def retire(self, session: StageSession) -> None:
        """The session ended; its KV is freed, or kept for a while if another one may go on with it."""
        if session.keep and (holding := session.give_holding()) is not None:
            self._parking.park(session.open, session.client, holding)
        self._stage.retire(session)
        self._freed()

    def _free_parked(self, holding: Holding) -> None:
        self._stage.free(holding)
        self._freed()

    def _check_room(self) -> None:
        while len(self._stage.sessions) + len(self._opening) + len(self._parking) >= self._config.max_sessions:
            if self._parking.evict() is None:
                raise FrameError(f"server is busy: {self._config.max_sessions} sessions are open")

    def _earlier(self, opened: Open, client: str) -> Holding | None:
        """KV of this client's earlier session, if it is to be gone on with. That session ends, wherever it stands."""
        running = self._stage.sessions.get((opened.resume or b"", opened.resume_stage))
        if running is not None and running.client == client:
            running.keep = True
            self.retire(running)
        return self._parking.take(opened, client)

    async def _allocated(self, opened: Open, key: tuple[bytes, int], new_log: NewLog | None) -> Holding:
        """:raises AllocationRefused: no room"""
        shape = KVShape(
            opened.end - opened.start, self._family.kv_heads, self._family.head_dim, opened.arena, opened.max_length
        )
        descriptor = TensorDescriptor(shape.size, dtype=self._loaded.dtype, device=self._loaded.device)
        room = self._loaded.memory_cache.bytes_left
        size = opened.lanes * math.prod(shape.size) * self._loaded.dtype.itemsize
        while room < size and (freed := self._parking.evict()) is not None:  # whoever is here goes first
            room += freed
        self._opening.add(key)
        try:
            ticket, handles = await self._allocator.allocate([descriptor] * opened.lanes, self._config.alloc_timeout)
        finally:
            self._opening.discard(key)
        return Holding.fresh(opened, ticket, handles, size, new_log)

    def _new_log(self, opened: Open) -> NewLog:
        hidden, dtype = int(self._loaded.config.hidden_size), self._loaded.dtype
        return lambda: BoundaryLog(hidden, opened.max_length, dtype, self._log_budget)

    def _granted(self, opened: Open) -> Open:
        """What this server agrees to; limits are checked before anything is allocated."""
        loaded, config = self._loaded, self._config
        first, last = loaded.first_block, loaded.first_block + len(loaded.blocks)
        if not first <= opened.start < opened.end <= last:
            raise FrameError(f"blocks {opened.start}:{opened.end} are not here, this server has {first}:{last}")
        if opened.lanes > config.max_lanes:
            raise FrameError(f"{opened.lanes} lanes, at most {config.max_lanes} are allowed")
        if opened.max_length > loaded.max_length:
            raise FrameError(f"max_length {opened.max_length} exceeds this server's {loaded.max_length}")
        if opened.embed and not (self._heads.embeds and opened.start == 0):
            raise FrameError("this stage has no embeddings for the first block")
        if opened.rule is not None and opened.rule not in ROUND_RULES:
            raise FrameError(f"rule {opened.rule[:20]!r} is not known here, only {', '.join(ROUND_RULES)}")
        if (opened.verify or opened.rule) and not (self._heads.verifies and opened.end == loaded.n_blocks):
            raise FrameError("this stage has no LM head behind the last block")
        if opened.adapter is not None and opened.adapter not in loaded.adapters:
            raise FrameError(f"adapter {opened.adapter!r} is not loaded here")
        for name in (opened.codec, opened.codec_in):
            try:
                LinkCodec(name)
            except (CodecUnavailable, CodecError) as e:
                raise FrameError(str(e)) from None
        return replace(opened, arena=min(opened.arena, config.max_arena))
