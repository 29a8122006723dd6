"""The stage's compute: rows of all sessions that wait go through this server's blocks in one forward, in the runtime's
thread."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from hivemind.utils.logging import get_logger
from torch import nn

from bloombee_spec.kv.buffer import LaneView, move_columns
from bloombee_spec.lane import LaneBatch, Row
from bloombee_spec.plan.compute import ComputeProfile
from bloombee_spec.server.config import SpecServerConfig
from bloombee_spec.server.families.base import BlockFamily
from bloombee_spec.server.heads import Heads
from bloombee_spec.server.holding import Holding
from bloombee_spec.server.pool import StagePool
from bloombee_spec.server.session import StageSession
from bloombee_spec.wire.frames import FrameError

logger = get_logger(__name__)

AdapterContext = Callable[[str | None], AbstractContextManager[Any]]


@dataclass(eq=False, slots=True)
class _LaneWork:
    session: StageSession
    index: int
    batch: LaneBatch
    moves: list[tuple[int, int]]
    rows: list[Row] = field(default_factory=list)  # still alive in this forward


class Stage:
    """
    :param blocks: this server's blocks in order; the first one has index `first_block` in the model
    :param memory_cache: the host's KV cache
    :param adapter: the host's context manager that activates a LoRA adapter by name
    :param free: gives an allocator's ticket back
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        first_block: int,
        family: BlockFamily,
        heads: Heads,
        memory_cache: Any,
        config: SpecServerConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        adapter: AdapterContext,
        free: Callable[[int], None],
    ):
        self.blocks, self.first_block, self.family, self.heads = blocks, first_block, family, heads
        self.device, self.dtype, self.config = device, dtype, config
        self.pool = StagePool(self.step)
        self.sessions: dict[tuple[bytes, int], StageSession] = {}
        self.max_rows = config.max_rows or 16
        self.compute = ComputeProfile.flat(0.0)  # seconds of a forward through all blocks, by rows
        self._memory_cache, self._adapter, self._free = memory_cache, adapter, free
        self._retired: list[int] = []  # tickets
        self._jobs: deque[tuple[StageSession, int, Callable[[torch.Tensor], Any], asyncio.Future[Any]]] = deque()

    def retire(self, session: StageSession) -> None:
        """The session ended: its KV, if it still has it, is freed by the runtime thread, between two forwards."""
        session.end()
        self.sessions.pop(session.key, None)
        holding = session.give_holding()
        if holding is not None:
            self.free(holding)

    def on_buffer(self, session: StageSession, index: int, job: Callable[[torch.Tensor], Any]) -> asyncio.Future[Any]:
        """What `job` makes of a lane's KV buffer, between two forwards. Event loop only."""
        future: asyncio.Future[Any] = session.loop.create_future()
        self._jobs.append((session, index, job, future))
        self.pool.wake()
        return future

    def _run_jobs(self) -> None:
        while self._jobs:
            session, index, job, future = self._jobs.popleft()
            try:
                if session.dead:
                    raise RuntimeError("the session ended")
                with self._memory_cache.use_cache(session.handles[index]) as (buffer,):
                    result, error = job(buffer), None
            except Exception as e:
                result, error = None, e
            session.loop.call_soon_threadsafe(_settle, future, result, error)

    def free(self, holding: Holding) -> None:
        holding.close()
        self._retired.append(holding.ticket)
        self.pool.wake()

    @torch.inference_mode()
    def step(self) -> None:
        """Compute what waits, at most `max_rows` candidate rows, and pass it on."""
        while self._retired:
            self._free(self._retired.pop())
        self._run_jobs()
        work = self._collect()
        handles = [item.session.handles[item.index] for item in work]
        with self._memory_cache.use_cache(*handles) as buffers:  # also creates and frees what was asked for
            if work:
                try:
                    self._run(work, buffers)
                except Exception as e:
                    logger.exception("Speculative forward failed")
                    for session in {item.session for item in work}:
                        _fail(session, f"stage failed to compute: {e!r}")
        if any(lane.has_work for session in list(self.sessions.values()) for lane in session.lanes):
            self.pool.wake()

    def _collect(self) -> list[_LaneWork]:
        """Lanes with work, those on a committed path first, then the longest unserved; one span of blocks per
        forward."""
        waiting = [
            (session, index)
            for session in list(self.sessions.values())
            if not session.dead
            for index, lane in enumerate(session.lanes)
            if lane.has_work
        ]
        waiting.sort(key=lambda item: (not item[0].lanes[item[1]].urgent, item[0].served))
        work: list[_LaneWork] = []
        room = self.max_rows
        for session, index in waiting:
            if room <= 0:
                break
            if work and _span(session) != _span(work[0].session):
                continue
            try:
                with session.lock:
                    moves = session.lanes[index].take_moves()
                    batch = session.lanes[index].take(room)
            except FrameError as e:  # what waited for room makes no sense: that is its peer's fault, nobody else's
                _fail(session, f"impossible frame: {e}")
                continue
            room -= len(batch.rows)
            work.append(_LaneWork(session, index, batch, moves, list(batch.rows)))
        return work

    def _run(self, work: list[_LaneWork], buffers: Sequence[torch.Tensor]) -> None:
        for item, buffer in zip(work, buffers):
            move_columns(buffer, item.moves)
            item.session.meter.forward_begins()
        started = time.perf_counter()
        computed = {id(item): len(item.batch.rows) for item in work}
        hidden = self._forward(work, buffers)
        elapsed = time.perf_counter() - started
        self._learn(work, computed, elapsed)
        at = 0
        for item in work:
            part = hidden[at : at + len(item.rows)]
            at += len(item.rows)
            item.session.touch(elapsed)
            item.session.meter.forward_ended()
            if item.session.dead:
                continue
            try:
                self._pass_on(item, computed[id(item)], part)
            except Exception as e:  # of this session; the others that were computed with it go on
                logger.exception("Results of a speculative forward cannot be passed on")
                _fail(item.session, f"stage failed: {e!r}")

    def _pass_on(self, item: _LaneWork, computed: int, hidden: torch.Tensor) -> None:
        """What a forward left of a lane's rows, to whoever decides upon them.

        :param hidden: `[len(item.rows), hidden]`
        """
        session, lane = item.session, item.session.lanes[item.index]
        with session.lock:
            live = lane.finish(item.batch, computed, item.rows, hidden)
        if len(live) < len(item.rows):
            kept = {id(row) for row in live}
            hidden = hidden[[i for i, row in enumerate(item.rows) if id(row) in kept]]
        if session.open.verify:
            self._verify(session, item.index, live, hidden)
        elif session.judges:
            session.outgoing.emit_answer(session.judges[item.index].step(live, hidden))
        else:
            session.outgoing.emit(item.index, item.batch, live, hidden)

    def _forward(self, work: list[_LaneWork], buffers: Sequence[torch.Tensor]) -> torch.Tensor:
        """`[rows still alive, hidden]`, in the order of `work` and its rows."""
        rows = [row for item in work for row in item.batch.rows]
        if not rows:
            return torch.empty(0, self.family.config.hidden_size)
        hidden = self._inputs(rows)
        positions = torch.tensor([row.position for row in rows], device=self.device)
        views, at = [], 0
        for item, buffer in zip(work, buffers):
            batch, n = item.batch, len(item.batch.rows)
            views.append(LaneView.make(buffer, slice(at, at + n), batch.columns, batch.mask, batch.begin, batch.end))
            at += n
        opened = work[0].session.open
        first, last = opened.start - self.first_block, opened.end - self.first_block
        with self._adapter(opened.adapter):
            shared = self.family.prepare(self.blocks[first], hidden, positions)
            for index, block in enumerate(self.blocks[first:last]):
                if index:
                    hidden, shared, views = self._prune(work, hidden, shared, views)
                    if not len(hidden):
                        break
                hidden = self.family.forward(
                    index, block, hidden, shared, [view for view in views if view.columns.numel()]
                )
        return hidden

    def _learn(self, work: list[_LaneWork], computed: dict[int, int], elapsed: float) -> None:
        """Keep the compute profile up to date with forwards through all blocks that lost no row on the way."""
        opened, rows = work[0].session.open, sum(computed.values())
        if rows and opened.end - opened.start == len(self.blocks) and rows == sum(len(item.rows) for item in work):
            self.compute = self.compute.updated(rows, elapsed)

    def _inputs(self, rows: list[Row]) -> torch.Tensor:
        hidden = [row.hidden for row in rows]
        if all(part is not None for part in hidden):
            return torch.stack(hidden).to(self.device, self.dtype)  # type: ignore[arg-type]
        embedded = self.heads.embed([row.token for row in rows])
        for i, part in enumerate(hidden):
            if part is not None:
                embedded[i] = part.to(embedded)
        return embedded

    def _prune(
        self, work: list[_LaneWork], hidden: torch.Tensor, shared: Any, views: list[LaneView]
    ) -> tuple[torch.Tensor, Any, list[LaneView]]:
        """Between two blocks: rows that died since the last look leave the batch."""
        kept_all: list[int] = []
        changed = False
        new_views = []
        at = kept_at = 0
        for item, view in zip(work, views):
            session, lane = item.session, item.session.lanes[item.index]
            with session.lock:
                kept = [] if session.dead else [i for i, row in enumerate(item.rows) if lane.is_live(row)]
            if len(kept) < len(item.rows):
                changed = True
                view = view.keep(slice(0, 0), torch.tensor(kept, dtype=torch.long, device=self.device))
            kept_all.extend(at + i for i in kept)
            at += len(item.rows)
            item.rows = [item.rows[i] for i in kept]
            view.rows = slice(kept_at, kept_at + len(kept))
            kept_at += len(kept)
            new_views.append(view)
        if not changed:
            return hidden, shared, views
        index = torch.tensor(kept_all, dtype=torch.long, device=self.device)
        return hidden[index], self.family.select(shared, index), new_views

    def _verify(self, session: StageSession, index: int, rows: list[Row], hidden: torch.Tensor) -> None:
        """Last stage: walk the tree as far as hidden rows reach, and say so to everybody."""
        done = session.verifiers[index].step(rows, hidden)
        session.outgoing.emit_commits(index, done)


def _fail(session: StageSession, reason: str) -> None:
    session.loop.call_soon_threadsafe(session.fail, reason)


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


def _span(session: StageSession) -> tuple[int, int, str | None]:
    return session.open.start, session.open.end, session.open.adapter
