"""Assembles a stage from a host's loaded blocks and runs its service: what the host adapter starts next to the host's
own handlers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from hivemind import DHT
from hivemind.p2p import P2P
from hivemind.utils import switch_to_uvloop
from hivemind.utils.logging import get_logger
from torch import nn

import bloombee_spec
from bloombee_spec.kv.buffer import KVShape, LaneView
from bloombee_spec.plan.compute import ComputeProfile
from bloombee_spec.server.admission import Admission
from bloombee_spec.server.allocator import CacheAllocator
from bloombee_spec.server.config import SpecServerConfig
from bloombee_spec.server.families.base import UnsupportedModel
from bloombee_spec.server.families.registry import family_for
from bloombee_spec.server.heads import Heads
from bloombee_spec.server.service import SpecService
from bloombee_spec.server.stage import AdapterContext, Stage
from bloombee_spec.server.transfers import Dial, Transfers
from bloombee_spec.wire.activations import codec_names
from bloombee_spec.wire.frames import PROTOCOL_VERSION, ControlFrame
from bloombee_spec.wire.moving import Leaving
from bloombee_spec.wire.streams import StreamClosed

logger = get_logger(__name__)

MEASURED_ROWS = (1, 8, 64)
START_TIMEOUT = 30.0


@dataclass(frozen=True)
class LoadedBlocks:
    """What the host has loaded and the plugin uses.

    :param blocks: modules in order, the first has index `first_block`; `n_blocks` is the model's total
    :param adapter: context manager that activates a LoRA adapter by name (None: base model); `adapters` their names
    :param hub: keyword arguments for reading the checkpoint (token, revision, cache_dir)
    """

    model: str
    config: Any
    blocks: Sequence[nn.Module]
    first_block: int
    n_blocks: int
    memory_cache: Any
    device: torch.device
    dtype: torch.dtype
    adapter: AdapterContext
    adapters: tuple[str, ...]
    max_length: int
    hub: dict[str, Any]


class StageServer:
    """
    :raises UnsupportedModel: no family serves these blocks, or they cannot compute on this device

    Order: construct, add `pool` to the runtime, `fork` before the process starts threads for requests, `start`,
    `shutdown`.
    """

    def __init__(self, dht: DHT, loaded: LoadedBlocks, config: SpecServerConfig):
        self._dht, self._loaded, self._config = dht, loaded, config
        self._family = family_for(loaded.config)
        for block in loaded.blocks:
            self._family.check(block)
        last_block = loaded.first_block + len(loaded.blocks)
        self._heads = Heads(
            loaded.model,
            loaded.config,
            embed=config.wants_embed(loaded.first_block == 0),
            lm_head=config.wants_lm_head(last_block == loaded.n_blocks),
            dtype=loaded.dtype,
            device=loaded.device,
            **loaded.hub,
        )
        self._allocator = CacheAllocator(loaded.memory_cache)
        self.stage = Stage(
            loaded.blocks, loaded.first_block, self._family, self._heads, loaded.memory_cache, config,
            device=loaded.device, dtype=loaded.dtype, adapter=loaded.adapter, free=self._allocator.free,
        )  # fmt: skip
        self.pool = self.stage.pool
        try:
            self._row_seconds = self._measure()
        except Exception as e:  # e.g. quantised layers, which compute on CUDA only
            raise UnsupportedModel(f"a trial forward through them failed: {e!r}") from e
        self.stage.compute = ComputeProfile.measured(self._row_seconds)
        self.stage.max_rows = config.max_rows or _affordable_rows(self._row_seconds)
        self._admission = Admission(
            loaded, config, self._family, self._heads, self._allocator, self.stage, self._wake_later
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ready = threading.Event()
        self._error: BaseException | None = None

    # ---------------------------------------------------------------- life

    def fork(self) -> None:
        self._allocator.start()

    def start(self) -> None:
        """Register the RPCs; returns once peers can call them.

        :raises RuntimeError: the service did not come up within 30 s
        """
        self._thread = threading.Thread(target=self._run, name="spec-service", daemon=True)
        self._thread.start()
        if not self._ready.wait(START_TIMEOUT) or self._error is not None:
            raise RuntimeError(f"speculative service did not start: {self._error!r}")
        logger.info(
            f"Speculative stage ready: {len(self._loaded.blocks)} blocks from {self._loaded.first_block} on, "
            f"family {self._family.name}, embeddings {self._heads.embeds}, LM head {self._heads.verifies}"
        )

    def is_alive(self) -> bool:
        return self._allocator.is_alive() and self._thread is not None and self._thread.is_alive()

    def leave(self) -> None:
        """Tell all clients that this server stops, and serve them until they have moved on, or for `leave_timeout`
        seconds. Not for the event loop's thread."""
        if self._loop is None or not self.is_alive():
            return
        deadline = time.monotonic() + self._config.leave_timeout
        self._loop.call_soon_threadsafe(self._announce_leaving)
        while self.stage.sessions and time.monotonic() < deadline:
            time.sleep(0.05)

    def _announce_leaving(self) -> None:
        self._admission.closed = True
        if self.stage.sessions:
            logger.info(f"Leaving: {len(self.stage.sessions)} sessions may move on")
        for session in list(self.stage.sessions.values()):
            with contextlib.suppress(StreamClosed):
                session.client_box.put(ControlFrame(Leaving(self._config.leave_timeout).to_wire()))

    def shutdown(self) -> None:
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._stop)
            self._thread.join(5)
        self._allocator.shutdown()

    def _stop(self) -> None:
        for session in list(self.stage.sessions.values()):
            session.fail("the server is shutting down")
        assert self._loop is not None
        self._loop.call_later(0.2, self._loop.stop)  # failures are written first

    def _run(self) -> None:
        self._loop = switch_to_uvloop()
        p2p = None
        try:
            p2p = self._loop.run_until_complete(self._attach())
            self._ready.set()
            self._loop.run_forever()
        except BaseException as e:
            self._error = e
            self._ready.set()
            logger.exception("Speculative service failed")
        finally:
            pending = asyncio.all_tasks(self._loop)
            for task in pending:
                task.cancel()
            self._loop.run_until_complete(asyncio.wait_for(asyncio.gather(*pending, return_exceptions=True), 5))
            if p2p is not None:
                self._loop.run_until_complete(p2p.shutdown())
            self._loop.close()

    def _new_transfers(self, dial: Dial) -> Transfers:
        vocab, n_blocks = self._loaded.config.vocab_size, self._loaded.n_blocks
        return Transfers(n_blocks, vocab, self.stage.on_buffer, dial, 1e6 * self._config.transfer_mbps)

    async def _attach(self) -> Any:
        # What dht.replicate_p2p() does, but never its cached replica: that one belongs to another thread's event loop.
        p2p = await P2P.replicate(self._dht.run_coroutine(DHT._get_p2p_daemon_listen_maddr))
        service = SpecService(
            info=self.info, open_session=self._admission.open, retire=self._admission.retire, wake=self.pool.wake,
            compute=lambda: self.stage.compute, sessions=self.stage.sessions, new_transfers=self._new_transfers,
            idle_timeout=self._config.idle_timeout, max_outbox=self._config.max_outbox,
        )  # fmt: skip
        await service.attach(p2p)
        return p2p

    # ---------------------------------------------------------------- requests (event loop)

    def info(self) -> dict[str, Any]:
        loaded, config = self._loaded, self._config
        return {
            "protocol": PROTOCOL_VERSION,
            "version": bloombee_spec.__version__,
            "start": loaded.first_block,
            "end": loaded.first_block + len(loaded.blocks),
            "family": self._family.name,
            "embed": self._heads.embeds,
            "lm_head": self._heads.verifies,
            "dtype": str(loaded.dtype).removeprefix("torch."),
            "hidden": int(loaded.config.hidden_size),
            "kv_bytes": 2 * self._family.kv_heads * self._family.head_dim * loaded.dtype.itemsize,
            "codecs": list(codec_names()),
            "adapters": list(loaded.adapters),
            "max_length": loaded.max_length,
            "max_lanes": config.max_lanes,
            "max_arena": config.max_arena,
            "max_prefill": config.max_prefill,
            "max_rows": self.stage.max_rows,
            "row_seconds": {str(int(rows)): seconds for rows, seconds in self.stage.compute.points},
            "sessions": len(self.stage.sessions),
            "parked": self._admission.parked,
            "cache_bytes_left": int(loaded.memory_cache.bytes_left),
        }

    def _wake_later(self) -> None:
        assert self._loop is not None
        self._loop.call_later(0.25, self.pool.wake)  # by then the host's cache knows, and drops the tensors

    # ---------------------------------------------------------------- compute time

    @torch.inference_mode()
    def _measure(self) -> dict[int, float]:
        """Seconds for 1, 8 and 64 rows through all blocks with a short past, the best of three."""
        loaded = self._loaded
        shape = KVShape(len(loaded.blocks), self._family.kv_heads, self._family.head_dim, max(MEASURED_ROWS), 64)
        buffer = torch.zeros(shape.size, dtype=loaded.dtype, device=loaded.device)
        seconds = {}
        for rows in MEASURED_ROWS:
            hidden = torch.zeros(rows, loaded.config.hidden_size, dtype=loaded.dtype, device=loaded.device)
            positions = torch.full((rows,), 64, device=loaded.device)
            mask = np.zeros((rows, shape.columns), dtype=bool)
            mask[:, shape.arena :] = True
            mask[np.arange(rows), np.arange(rows)] = True
            view = LaneView.make(buffer, slice(0, rows), np.arange(rows), mask, 0, shape.columns)
            times = []
            for _ in range(3):
                started = time.perf_counter()
                with loaded.adapter(None):
                    out, shared = hidden, self._family.prepare(loaded.blocks[0], hidden, positions)
                    for index, block in enumerate(loaded.blocks):
                        out = self._family.forward(index, block, out, shared, [view])
                out.sum().item()
                times.append(time.perf_counter() - started)
            seconds[rows] = min(times)
        return seconds


def _affordable_rows(seconds: dict[int, float], factor: float = 2.5) -> int:
    """Most rows whose forward takes at most `factor` times as long as one row's, by linear interpolation."""
    points = sorted(seconds.items())
    budget = factor * points[0][1]
    for (n0, t0), (n1, t1) in pairwise(points):
        if t1 > budget:
            return max(n0, int(n0 + (n1 - n0) * (budget - t0) / (t1 - t0))) if t0 <= budget else n0
    return points[-1][0]
