"""One plugin session at one stage: its lanes, who may send what, and where results go."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterable
from dataclasses import replace

import torch

from bloombee_spec.choose import make_chooser
from bloombee_spec.lane import Lane, LaneBatch, Row
from bloombee_spec.plan.compute import ComputeProfile
from bloombee_spec.server.meter import SessionMeter
from bloombee_spec.verify import Committed, Head, Verifier
from bloombee_spec.wire.activations import CodecError
from bloombee_spec.wire.frames import (
    CommitFrame,
    ControlFrame,
    Frame,
    FrameError,
    NodesFrame,
    PrefixFrame,
    RewindFrame,
    encode,
)
from bloombee_spec.wire.link_codec import LinkCodec
from bloombee_spec.wire.messages import Failure, Open, Rule, Statistics
from bloombee_spec.wire.streams import Outbox, StreamClosed

NEIGHBOUR_GRACE = 1.0  # seconds for a neighbour's own words to arrive first
CLIENT, DATA, COMMIT = "client", "data", "commit"  # what kind of stream a frame came on


class StageSession:
    """
    :param opened: what the client asked for, already checked against the server's limits
    :param client: base58 id of the peer that opened the session
    :param ticket: allocator's ticket of the KV memory; `handles` one cache handle per lane
    :param client_box: towards the client
    """

    def __init__(
        self,
        opened: Open,
        client: str,
        ticket: int,
        handles: tuple[int, ...],
        client_box: Outbox,
        *,
        hidden_size: int,
        dtype: torch.dtype,
        vocab_size: int,
        max_prefill: int,
        device: torch.device,
        head: Head,
        loop: asyncio.AbstractEventLoop,
    ):
        self.open, self.client, self.ticket, self.handles = opened, client, ticket, handles
        self.lock = threading.Lock()
        self.lanes = [
            Lane(arena=opened.arena, max_length=opened.max_length, inject=opened.embed) for _ in range(opened.lanes)
        ]
        self.verifiers = [Verifier(lane, self.lock, head) for lane in self.lanes] if opened.verify else []
        self.meter = SessionMeter()
        self.client_box = client_box
        self._out_box = client_box  # where results go, once linked
        self._listener_boxes: list[Outbox] = []
        self.links: list[Outbox] = []  # this stage's own outgoing streams
        self._unsent: list[tuple[list[bytes], list[bytes]]] | None = []  # results from before the link
        self.max_prefill = max_prefill
        self.closed = asyncio.Event()
        self._losing: asyncio.TimerHandle | None = None
        self.dead = False  # read by the runtime thread between two blocks
        self.served = 0.0  # monotonic time of the last forward, for fairness between lanes
        self.arrived = time.monotonic()  # of the latest frame
        self.forwards = 0
        self.compute_s = self.wait_s = 0.0
        self.bytes_in = 0
        self._hidden_size, self._dtype, self._vocab_size, self.loop = hidden_size, dtype, vocab_size, loop
        self._device = device
        self._codec_in, self.codec = LinkCodec(opened.codec_in), LinkCodec(opened.codec)

    @property
    def key(self) -> tuple[bytes, int]:
        return self.open.session, self.open.stage

    # ---------------------------------------------------------------- frames in (event loop)

    def accept(self, frame: Frame, source: str, size: int) -> None:
        """Apply a frame of an authenticated stream.

        :raises FrameError: the frame is not allowed on this kind of stream, or its content is impossible
        """
        self.bytes_in += size
        self.arrived = time.monotonic()
        if isinstance(frame, (PrefixFrame, NodesFrame)):
            self.meter.rows_arrived()
            if source != (CLIENT if self.open.previous is None else DATA):
                raise FrameError("activations are accepted from the announced predecessor only")
            self._check_tokens(
                frame.tokens if isinstance(frame, PrefixFrame) else [node.token for node in frame.nodes]
            )
            hidden = self._rows(frame)
            with self.lock:
                lane = self._lane(frame.lane)
                if isinstance(frame, PrefixFrame):
                    lane.accept_prefix(frame, hidden)
                else:
                    lane.accept_nodes(frame, hidden)
        elif isinstance(frame, CommitFrame):
            if source != (CLIENT if self.open.verifier is None else COMMIT) or self.open.verify:
                raise FrameError("commits are accepted from the announced verifier only")
            self._check_tokens(frame.tokens)
            with self.lock:
                self._lane(frame.lane).accept_commit(frame)
        elif isinstance(frame, RewindFrame):
            if source != CLIENT:
                raise FrameError("only the client rewinds")
            with self.lock:
                self._lane(frame.lane).accept_rewind(frame)
        else:
            raise FrameError("unexpected control message")

    def set_rule(self, rule: Rule) -> None:
        """:raises FrameError: a stop token or a sampling option is out of range"""
        self._check_tokens(rule.stop_tokens)
        try:
            chooser = make_chooser(rule.sampling, rule.row, self._vocab_size, self._device)
        except ValueError as e:
            raise FrameError(f"sampling rule refused: {e}") from None
        with self.lock:
            self._lane(rule.lane).set_rule(rule.epoch, rule.stop_tokens)
            if self.verifiers:
                self.verifiers[rule.lane].set_chooser(chooser)

    def use_codec(self, name: str) -> None:
        """:raises FrameError: it was not agreed on for this link"""
        try:
            self.codec.use(name)
        except CodecError as e:
            raise FrameError(str(e)) from None

    def _lane(self, index: int) -> Lane:
        if index >= len(self.lanes):
            raise FrameError(f"lane {index} of a session with {len(self.lanes)}")
        return self.lanes[index]

    def _check_tokens(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            if token >= self._vocab_size:
                raise FrameError(f"token {token} is outside the vocabulary of {self._vocab_size}")

    def _rows(self, frame: PrefixFrame | NodesFrame) -> torch.Tensor | None:
        expected = len(frame.tokens) if isinstance(frame, PrefixFrame) else len(frame.nodes)
        if self.open.embed:
            if frame.n_rows:
                raise FrameError("this stage embeds tokens itself: no activations expected")
            return None
        if frame.n_rows != expected:
            raise FrameError(f"{frame.n_rows} activation rows for {expected} tokens")
        try:
            return self._codec_in.decode(frame.rows, expected, self._hidden_size, self._dtype)
        except CodecError as e:
            raise FrameError(f"activations cannot be decoded: {e}") from None

    # ---------------------------------------------------------------- results out (runtime thread)

    def emit(self, index: int, batch: LaneBatch, rows: list[Row], hidden: torch.Tensor) -> None:
        """Send what a forward left: to the next stage, or as hidden rows to a verifying client.

        :param rows: survivors in batch order; `hidden` `[len(rows), hidden]`
        """
        lane = self.lanes[index]
        prefix = batch.prefix if rows and batch.prefix is not None and rows[0].position == batch.prefix.start else None
        n_prefix = batch.prefix_rows if prefix is not None else 0
        to_client = self.open.next is None
        frames: list[Frame] = []
        with self.lock:
            nodes = tuple([lane.forwarded_spec(row) for row in rows[n_prefix:]])
            seq = lane.answered
            counters = lane.take_counters() if nodes or prefix is None or batch.seq > prefix.seq else None
        if prefix is not None:
            first = (n_prefix - 1 if prefix.last else n_prefix) if to_client else 0
            data = self.codec.encode(hidden[first:n_prefix])
            frames.append(
                PrefixFrame(
                    index, prefix.epoch, prefix.seq, prefix.start, prefix.tokens, prefix.last, prefix.limit,
                    n_prefix - first, data,
                )
            )  # fmt: skip
        if counters is not None:
            data = self.codec.encode(hidden[n_prefix:]) if nodes else b""
            frames.append(NodesFrame(index, batch.epoch, seq, nodes, *counters, len(nodes), data))
        self._post(frames, [])

    def emit_commits(self, index: int, done: Committed) -> None:
        """Verifier: tokens to the client with counters, and to every other stage without."""
        lane = self.lanes[index]
        with self.lock:
            computed, dropped = lane.take_counters()
            seq = lane.answered
        commit = CommitFrame(index, done.epoch, done.position, done.tokens)
        to_client = replace(commit, seq=seq, computed=computed, dropped=dropped)
        to_stages = [commit] if done.tokens else []
        self._post([to_client], to_stages)

    def _post(self, frames: list[Frame], to_listeners: list[CommitFrame]) -> None:
        encoded = [encode(frame) for frame in frames]
        broadcast = [encode(frame) for frame in to_listeners]
        self.loop.call_soon_threadsafe(self._send, encoded, broadcast)

    def link(self, next_box: Outbox | None, listeners: list[Outbox]) -> None:
        """The outgoing streams are open: send what waited for them. Event loop only."""
        self._out_box = next_box or self.client_box
        self._listener_boxes = listeners
        self.links = [*([next_box] if next_box else []), *listeners]
        unsent, self._unsent = self._unsent or [], None
        for encoded, broadcast in unsent:
            self._send(encoded, broadcast)

    def _send(self, encoded: list[bytes], broadcast: list[bytes]) -> None:
        if self._unsent is not None:
            self._unsent.append((encoded, broadcast))
            return
        for data in broadcast:  # first of all: the commit overtakes the frames that it makes useless
            for stage, box in enumerate(self._listener_boxes):
                self._pass_on(data, box, stage)
        for data in encoded:
            self._pass_on(data, self._out_box, self.open.stage + 1)

    def _pass_on(self, data: bytes, box: Outbox, stage: int) -> None:
        try:
            box.put_bytes(data)
        except StreamClosed as e:
            self.lost(stage, f"stage {self.open.stage} cannot pass on its results to stage {stage}: {e}")

    def greeted(self, stage: int, rtt_s: float) -> None:
        """Another stage answered the greeting on a new stream to it."""
        if stage == self.open.stage + 1:
            self.meter.next_rtt_s = rtt_s
        elif stage == 0:
            self.meter.first_rtt_s = rtt_s

    def report(self, compute: ComputeProfile | None) -> None:
        """Tell the client's planner how this stage and its links fare, now and then. Event loop only."""
        report = None if self.dead else self.meter.report(compute, self.codec)
        if report is not None:
            with contextlib.suppress(StreamClosed):  # the reader of that stream ends the session
                self.client_box.put(ControlFrame(report.to_wire()))

    # ---------------------------------------------------------------- end

    def fail(self, reason: str, blame: int | None = None) -> None:
        """Tell the client why, and end the session. Event loop only."""
        if not self.closed.is_set():
            with contextlib.suppress(StreamClosed):
                self.client_box.put(ControlFrame(Failure(reason, blame).to_wire()))
        self.end()

    def lost(self, stage: int, reason: str) -> None:
        """A neighbour hung up: fail, unless within a moment the client, who hears the neighbour's own reason or is
        closing all stages, ends the session. Event loop only."""
        if self._losing is None and not self.dead:
            self._losing = self.loop.call_later(NEIGHBOUR_GRACE, self.fail, reason, stage)

    def end(self) -> None:
        self.dead = True
        self.closed.set()
        if self._losing is not None:
            self._losing.cancel()

    def statistics(self) -> Statistics:
        boxes = [self.client_box, *self.links]
        with self.lock:
            return Statistics(
                computed_rows=sum(lane.total_computed for lane in self.lanes),
                dropped_rows=sum(lane.total_dropped for lane in self.lanes),
                forwards=self.forwards,
                compute_s=self.compute_s,
                wait_s=self.wait_s,
                bytes_in=self.bytes_in,
                bytes_out=sum(box.bytes_sent for box in boxes),
            )

    def touch(self, compute_s: float) -> None:
        """Account for one forward that took `compute_s` seconds and has just ended."""
        self.served = time.monotonic()
        self.wait_s += max(0.0, self.served - compute_s - self.arrived)
        self.forwards += 1
        self.compute_s += compute_s
