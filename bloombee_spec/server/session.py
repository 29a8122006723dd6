"""One plugin session at one stage: its lanes, who may send what, and where results go."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterable

import torch

from bloombee_spec.choose import make_chooser
from bloombee_spec.lane import Lane
from bloombee_spec.plan.compute import ComputeProfile
from bloombee_spec.sampling.round_rules import ROUND_RULES
from bloombee_spec.server.holding import Holding, digest
from bloombee_spec.server.judge import Judge
from bloombee_spec.server.meter import SessionMeter
from bloombee_spec.server.outgoing import Outgoing
from bloombee_spec.verify import Head, Verifier
from bloombee_spec.wire.activations import CodecError
from bloombee_spec.wire.frames import (
    CommitFrame,
    ControlFrame,
    Frame,
    FrameError,
    NodesFrame,
    PrefixFrame,
    RewindFrame,
    RoundFrame,
)
from bloombee_spec.wire.ledger import CLIENT, COMMIT, DATA, Ledger
from bloombee_spec.wire.link_codec import LinkCodec
from bloombee_spec.wire.messages import Link, Open
from bloombee_spec.wire.steering import Failure, Rule, Statistics
from bloombee_spec.wire.streams import Outbox, StreamClosed

NEIGHBOUR_GRACE = 1.0  # seconds for a neighbour's own words to arrive first


class StageSession:
    """
    :param opened: what the client asked for, already checked against the server's limits
    :param client: base58 id of the peer that opened the session
    :param holding: the KV of the lanes, with their books
    :param client_box: towards the client
    """

    def __init__(
        self,
        opened: Open,
        client: str,
        holding: Holding,
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
        self.open, self.client = opened, client
        self._holding: Holding | None = holding
        self.lock = threading.Lock()
        self.lanes, self.handles = holding.lanes, holding.handles
        self.keep = False  # when the session ends, another one may go on with its KV
        self.verifiers = [Verifier(lane, self.lock, head) for lane in self.lanes] if opened.verify else []
        self.judges = [
            Judge(ROUND_RULES[opened.rule], lane, self.lock, head, vocab_size, device)
            for lane in self.lanes
            if opened.rule is not None
        ]
        self.meter = SessionMeter()
        self.client_box = client_box
        self.max_prefill = max_prefill
        self.closed = asyncio.Event()
        self._losing: asyncio.TimerHandle | None = None
        self.dead = False  # read by the runtime thread between two blocks
        self.served = 0.0  # monotonic time of the last forward, for fairness between lanes
        self.arrived = time.monotonic()  # of the latest frame
        self.forwards = 0
        self.compute_s = self.wait_s = 0.0
        self.bytes_in = 0
        self.ledger = Ledger()
        self._hidden_size, self._dtype, self._vocab_size, self.loop = hidden_size, dtype, vocab_size, loop
        self._device = device
        self._codec_in, self.codec = LinkCodec(opened.codec_in), LinkCodec(opened.codec)
        self.outgoing = Outgoing(opened, self.lanes, self.lock, self.codec, client_box, loop, self.lost)

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
                commits = self._lane(frame.lane).accept_commit(frame)
                if self.judges:
                    self.judges[frame.lane].committed(commits)
        elif isinstance(frame, RewindFrame):
            if source != CLIENT:
                raise FrameError("only the client rewinds")
            with self.lock:
                self._lane(frame.lane).accept_rewind(frame)
        elif isinstance(frame, RoundFrame):
            if source != CLIENT or not self.judges:
                raise FrameError("rounds are judged by the last stage, for the client, where the session says so")
            with self.lock:
                self._lane(frame.lane).look_again()
                self.judges[frame.lane].accept(frame)
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
            if self.judges:
                self.judges[rule.lane].set_rule(rule.sampling, rule.row)
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

    def check_link(self, link: Link) -> None:
        """:raises FrameError: it asks for rows that are not here"""
        lanes = len(self.lanes)
        if len(link.next_holds) not in (0, lanes) or len(link.replay) not in (0, len(link.next_holds)):
            raise FrameError(f"a link that speaks of {len(link.next_holds)} lanes, of {lanes}")
        with self.lock:
            for lane, start, end in zip(self.lanes, link.next_holds, link.replay):
                if end and (lane.log is None or not lane.log.first <= start <= end <= lane.log.end):
                    raise FrameError(f"rows {start} to {end} are not in this stage's log")
        self.outgoing.next_holds = list(link.next_holds) or self.outgoing.next_holds

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
            self.keep = True  # the client may find another neighbour
            self._losing = self.loop.call_later(NEIGHBOUR_GRACE, self.fail, reason, stage)

    def give_holding(self) -> Holding | None:
        """Whoever takes it has to keep or free it; None when it is gone already."""
        holding, self._holding = self._holding, None
        return holding

    @property
    def filled(self) -> tuple[int, ...]:
        """By lane, tokens whose KV is here."""
        return tuple([lane.filled for lane in self.lanes])

    def held(self) -> tuple[tuple[int, ...], tuple[bytes, ...], tuple[int, ...]]:
        """What is here of an earlier session: by lane the tokens with KV, their digest, where the log begins."""
        with self.lock:
            held = self.filled
            digests = tuple(digest(lane.tree.committed[:n]) for lane, n in zip(self.lanes, held))
            logged = tuple(n if lane.log is None else min(lane.log.first, n) for lane, n in zip(self.lanes, held))
        return held, digests, logged

    def end(self) -> None:
        self.dead = True
        self.closed.set()
        if self._losing is not None:
            self._losing.cancel()

    def statistics(self) -> Statistics:
        boxes = [self.client_box, *self.outgoing.links]
        with self.lock:
            return Statistics(
                computed_rows=sum(lane.total_computed for lane in self.lanes),
                dropped_rows=sum(lane.total_dropped for lane in self.lanes),
                forwards=self.forwards,
                compute_s=self.compute_s,
                wait_s=self.wait_s,
                bytes_in=self.bytes_in,
                bytes_out=sum(box.bytes_sent for box in boxes),
                traffic=self.ledger.to_wire(),
            )

    def touch(self, compute_s: float) -> None:
        """Account for one forward that took `compute_s` seconds and has just ended."""
        self.served = time.monotonic()
        self.wait_s += max(0.0, self.served - compute_s - self.arrived)
        self.forwards += 1
        self.compute_s += compute_s
